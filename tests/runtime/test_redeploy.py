"""A deployment that no longer serves an agent: its sessions end, and say why."""

from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Talk

BOTH = "tests.runtime.served:kept,tests.runtime.served:dropped"
ONE = {"PERDURE_AGENTS": "tests.runtime.served:kept"}


def redeploy(stack: Stack) -> None:
    """Replace the worker and the API by ones that serve less."""
    assert stack.workers[0].terminate() == 0
    assert stack.apis[0].terminate() == 0
    stack.start_worker(ONE)
    stack.start_api(ONE)


async def test_the_session_of_a_dropped_agent_ends_with_its_next_message(make_stack: StackFactory) -> None:
    stack = make_stack(agents=BOTH, provider=True)
    async with stack.talk() as kept, Talk(f"{stack.url}/agents/dropped") as dropped:
        await kept.say("say one")
        await dropped.say("say one")
        before = dropped.cursor

        redeploy(stack)

        async with follow(stack.talk(1), kept) as talk:
            assert await talk.say("say still here") == "still here"
        async with follow(stack.talk(1), dropped) as talk:
            await talk.send("say lost")
            told = [event async for event in talk.events(before)]
            late = await talk.http.post(
                f"/eve/v1/session/{talk.session_id}", json={"continuationToken": talk.token, "message": "hello?"}
            )

    assert told[-1]["type"] == "session.failed"
    assert told[-1]["data"]["code"] == "AGENT_GONE"
    assert "'dropped'" in told[-1]["data"]["message"]
    assert late.status_code == 409


def follow(talk: Talk, other: Talk) -> Talk:
    """Let the caller go on where the other one stands."""
    talk.session_id, talk.token, talk.cursor = other.session_id, other.token, other.cursor
    return talk
