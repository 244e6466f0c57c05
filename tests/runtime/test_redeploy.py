"""A deployment that no longer serves an agent: its sessions wait, report why, and continue once it is served again."""

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


async def test_the_session_of_a_dropped_agent_needs_attention_and_continues_with_the_agent(
    make_stack: StackFactory,
) -> None:
    stack = make_stack(agents=BOTH, provider=True)
    async with stack.talk() as kept, Talk(f"{stack.url}/agents/dropped") as dropped:
        await kept.say("say one")
        await dropped.say("say one")
        before = dropped.cursor

        redeploy(stack)

        async with follow(stack.talk(1), kept) as talk:
            assert await talk.say("say still here") == "still here"
        async with follow(stack.talk(1), dropped) as talk:
            await talk.send("say held back")
            signalled = await talk.until("session.attention", before)
            shown = (await talk.http.get(f"/v1/sessions/{talk.session_id}")).json()
            listed = (await talk.http.get("/v1/sessions", params={"status": "needs_attention"})).json()["sessions"]

            stack.start_worker()

            answered = await talk.until("session.waiting", signalled[-1]["meta"]["index"] + 1)

    assert signalled[-1]["data"]["code"] == "AGENT_GONE"
    assert "'dropped'" in signalled[-1]["data"]["message"]
    assert (shown["status"], shown["attention"]["code"]) == ("needs_attention", "AGENT_GONE")
    assert [row["sessionId"] for row in listed] == [shown["sessionId"]]
    types = [event["type"] for event in answered]
    assert types[0] == "session.recovered"
    assert [event["data"]["message"] for event in answered if event["type"] == "message.completed"] == ["held back"]


def follow(talk: Talk, other: Talk) -> Talk:
    """Let the caller continue where the other one is."""
    talk.session_id, talk.token, talk.cursor = other.session_id, other.token, other.cursor
    return talk
