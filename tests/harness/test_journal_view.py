"""How far each step of a turn has come, in the words of Flue, and what a takeover is told to have found."""

import asyncio
from typing import Any

import pytest

from perdure import tool
from perdure.errors import ModelFailed
from perdure.protocol.requests import Failure
from perdure.runtime.reports.journal import TurnNotFound, journal
from perdure.testing import ScriptedModel, call
from tests.harness.test_attempts import BUSY
from tests.harness.test_usage import Breaking, half_told
from tests.support.given import read_session
from tests.support.lab import SESSION, Lab, lab


@tool(effects="pure")
def look() -> str:
    return "seen"


async def steps(it: Lab, turn: int | None = None) -> list[dict[str, Any]]:
    return [*await journal(it.store, await read_session(it.store, SESSION), turn)]


async def phases(it: Lab) -> list[str]:
    return [each["phase"] for each in await steps(it)]


async def test_a_text_turn_is_one_committed_step() -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))

        [step] = await steps(it)

        assert {name: value for name, value in step.items() if name not in ("attemptId", "createdAt", "updatedAt")} == {
            "submissionIds": ["d0"],
            "sessionId": SESSION,
            "turnId": "turn_0",
            "step": 0,
            "phase": "committed",
            "revision": 1,
            "checkpointLeafId": "0/0/delivery/0",
            "streamKey": "t0/s0",
            "committed": True,
            "committedLeafId": "0/0/reply",
        }
        assert step["attemptId"].startswith("att_")
        assert step["createdAt"] <= step["updatedAt"]


async def test_a_step_with_calls_is_committed_when_all_of_them_have_ended() -> None:
    async with lab([call("look"), "Done"], look) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        assert await phases(it) == ["tool_request_recorded"]
        [step] = await steps(it)
        assert step["toolRequest"] == {"toolCalls": [{"type": "toolCall", "id": ref.call_id, "name": "look"}]}
        assert (step["committed"], "committedLeafId" in step) == (False, False)

        await it.tool(ref)
        assert await phases(it) == ["committed"]
        await it.model(step=1)

        first, second = await steps(it)
        assert (first["phase"], second["phase"]) == ("committed", "committed")
        assert first["committedLeafId"] == second["checkpointLeafId"] == f"0/0/call/{ref.call_id}"


async def test_a_takeover_before_anything_was_said_asks_and_its_revision_grows() -> None:
    async with lab([BUSY, "Hello"]) as it:
        delivery = await it.deliver("Hi")
        with pytest.raises(ModelFailed):
            await it.model(delivery, generation=1)
        assert await phases(it) == ["before_provider"]

        await it.model(delivery, generation=2)

        [told] = await it.emitted("step.superseded")
        assert (told["phase"], told["decision"]) == ("before_provider", "ask")
        [step] = await steps(it)
        assert (step["phase"], step["revision"]) == ("committed", 2)


async def test_a_takeover_after_a_part_of_a_reply_retracts_it() -> None:
    model = Breaking()
    async with lab(model) as it:
        delivery, zombie = await half_told(it, model)
        assert await phases(it) == ["provider_started"]
        it.models.now = ScriptedModel(["Hello"])

        await it.model(delivery, generation=2)

        zombie.cancel()
        await asyncio.gather(zombie, return_exceptions=True)
        [told] = await it.emitted("step.superseded")
        assert (told["phase"], told["decision"]) == ("provider_started", "retract")
        assert await phases(it) == ["committed"]


async def test_the_failure_of_a_turn_commits_its_last_step() -> None:
    async with lab([BUSY]) as it:
        delivery = await it.deliver("Hi")
        with pytest.raises(ModelFailed):
            await it.model(delivery)

        await it.conclude(Failure(code="STEP_TIMEOUT", message="It took too long."))

        assert await phases(it) == ["committed"]


async def test_a_turn_that_has_begun_nothing_has_no_journal() -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))

        with pytest.raises(TurnNotFound):
            await steps(it, 7)
