"""Controls between two turns, with every part real."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos.world import dies_at
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types
from tests.support.waiting import until

AGENT = "tests.conformance.agents:concierge"
ASK = 'call pay {"amount": 3} then say settled'


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents=AGENT)


async def control(talk: Talk, kind: str) -> Json:
    answer = await talk.http.post(f"/eve/v1/session/{talk.session_id}/{kind}")
    assert answer.is_success, answer.text
    return answer.json()


async def test_a_compaction_waits_for_the_turn_before_it_and_the_next_turn_for_it(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("drip 20 words delay 20")
        await control(talk, "compact")
        await talk.send("say after")

        first, compacted, second = [await talk.until_boundary() for _ in range(3)]

    assert "turn.completed" in types(first)
    assert types(compacted) == ["compaction.requested", "compaction.completed", "session.waiting"]
    assert text(second) == "after"
    assert [event["data"]["sequence"] for event in second if event["type"] == "turn.started"] == [1]


async def test_a_clear_withdraws_what_people_are_asked(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create(ASK)
        await talk.until_boundary()
        await control(talk, "clear")

        withdrawn, cleared = [await talk.until_boundary() for _ in range(2)]
        answer = await talk.say("say fresh")

    assert [each for each in types(withdrawn) if each != "action.result"] == [
        "input.resolved",
        "turn.cancelled",
        "session.waiting",
    ]
    assert types(cleared) == ["context.cleared", "session.waiting"]
    assert cleared[0]["data"]["sequence"] == 1
    assert answer == "fresh"


async def test_a_reset_ends_the_session_and_its_workflow(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say("say hello")
        before = talk.cursor

        assert (await control(talk, "reset"))["status"] == "reset"
        # The stream ends with the session.
        events = [event async for event in talk.events(before)]

        assert types(events) == ["session.completed"]
        assert await control(talk, "compact") == {"ok": True, "status": "no_active_session"}
        handle = (await stack.client()).get_workflow_handle(talk.session_id)
        await handle.result()


@pytest.mark.parametrize(("point", "summaries"), [("compaction_mid_call", 2), ("compaction_after_record", 1)])
async def test_a_worker_that_dies_in_a_compaction_pays_once_for_what_is_recorded(
    make_stack: StackFactory, tmp_path: Path, point: str, summaries: int
) -> None:
    environment = {"PERDURE_HEARTBEAT_TIMEOUT": "2"}
    stack = make_stack(agents=AGENT, workers=0, provider=True, environment=environment)
    doomed = stack.start_worker(dies_at(point, tmp_path / "once"))
    async with stack.talk() as talk:
        await talk.say("say hello")
        await control(talk, "compact")
        await until(lambda: not doomed.alive, "the worker to die")
        stack.start_worker()
        events = await talk.until_boundary()
        answer = await talk.say("say after")
        requests: list[Any] = (await talk.http.get(f"{stack.provider_url}/requests")).json()["requests"]

    assert types(events) == ["compaction.requested", "compaction.completed", "session.waiting"]
    assert answer == "after"
    assert sum("replaced by a summary" in each["said"] for each in requests) == summaries
