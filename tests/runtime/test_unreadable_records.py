"""Records that nobody can read any more: the session waits, loses nothing, and goes on when somebody decides."""

import sqlite3
from subprocess import CompletedProcess
from typing import Any

import psycopg
import pytest

from tests.support import commands
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Talk, text

AGENTS = "tests.runtime.served:kept,tests.runtime.served:hasty"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def stack(request: pytest.FixtureRequest, make_stack: StackFactory) -> Stack:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else None
    return make_stack(provider=True, agents=AGENTS, database_url=url)


def spoil(stack: Stack, session_id: str, turn: int) -> None:
    """Cut the record of a turn's reply, and let a worker read it that has not yet."""
    statement = (
        "UPDATE records SET body = '{\"response' "
        f"WHERE session_id = '{session_id}' AND turn = {turn} AND slot = 'reply'"
    )
    url = stack.settings.database
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
            changed = database.execute(statement).rowcount
        database.close()
    else:
        with psycopg.connect(url) as database:
            changed = database.execute(statement.encode()).rowcount
    assert changed == 1
    assert stack.workers[-1].terminate() == 0
    stack.start_worker()


def repair(stack: Stack, *words: str) -> "CompletedProcess[str]":
    return commands.perdure("sessions", "repair", *words, environment=stack.environment)


async def heard_by_the_model(stack: Stack, talk: Talk) -> Any:
    return (await talk.http.get(f"{stack.provider_url}/requests")).json()["requests"][-1]["texts"]


async def test_the_session_waits_until_an_operator_restores_it(stack: Stack) -> None:
    async with stack.talk() as talk:
        for message in ("say one", "say two", "say three"):
            await talk.say(message)
        before = talk.cursor
        spoil(stack, talk.session_id, 1)

        await talk.send("say four")
        attention = await talk.until("session.attention", before)
        shown = (await talk.http.get(f"/v1/sessions/{talk.session_id}")).json()
        too_late = repair(stack, talk.session_id, "--restore", "turn_3")
        restored = repair(stack, talk.session_id, "--restore", "turn_0")
        answered = await talk.until_boundary()
        heard = await heard_by_the_model(stack, talk)
        after = await talk.say("say five")

    assert attention[-1]["data"]["code"] == "UNREADABLE_STATE"
    assert shown["status"] == "needs_attention"
    assert (too_late.returncode, "has not ended" in too_late.stderr) == (1, True)
    assert restored.returncode == 0, restored.stderr
    assert text(answered) == "four"
    assert [event["data"] for event in answered if event["type"] == "session.reset"] == [
        {"reason": "OPERATOR", "restoredTurn": "turn_0", "keptFromTurn": "turn_3"}
    ]
    assert heard == ["say one", "say four"]
    assert after == "five"


async def test_an_agent_that_prefers_a_fresh_start_continues_by_itself(stack: Stack) -> None:
    async with Talk(f"{stack.url}/agents/hasty") as talk:
        await talk.say("say one")
        await talk.say("say two")
        spoil(stack, talk.session_id, 0)

        await talk.send("say three")
        answered = await talk.until_boundary()
        heard = await heard_by_the_model(stack, talk)

    assert text(answered) == "three"
    assert [event["data"] for event in answered if event["type"] == "session.reset"] == [
        {"reason": "UNREADABLE_STATE", "keptFromTurn": "turn_2"}
    ]
    assert heard == ["say three"]
