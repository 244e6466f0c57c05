"""A turn that failed, and its message that is read again once the provider answers."""

import pytest

from tests.support import commands
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import text, types


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def stack(request: pytest.FixtureRequest, make_stack: StackFactory) -> Stack:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else None
    return make_stack(provider=True, agents="tests.runtime.served:chat", database_url=url)


def perdure(stack: Stack, *words: str) -> str:
    done = commands.perdure("dead-letters", *words, environment=stack.environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_requeued_message_is_answered_once(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("fail 400 once; say at last")
        failed = await talk.until_boundary()
        (letter,) = (await talk.http.get("/v1/dead-letters")).json()["deadLetters"]
        requeued = await talk.http.post(f"/v1/dead-letters/{talk.session_id}/{letter['turnId']}/requeue")
        answered = await talk.until_boundary()
        repeated = perdure(stack, "requeue", talk.session_id, letter["turnId"])
        after = await talk.say("say after")

    assert "turn.failed" in types(failed)
    assert letter["code"] == "MODEL_CALL_FAILED"
    assert requeued.status_code == 200, requeued.text
    assert text(answered) == "at last"
    assert "requeued before" in repeated
    assert after == "after"
    assert perdure(stack) == ""
    assert letter["turnId"] in perdure(stack, "--requeued")
