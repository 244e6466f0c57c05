from typing import Any, cast

import pytest

from perdure import tool
from perdure.errors import ModelFailed
from perdure.protocol.events import delivery_refused
from perdure.protocol.requests import CloseSession, Failure, Finished, Refusal
from perdure.session.state import SESSION_IDLE
from perdure.store.base import Store
from perdure.testing import ScriptedModel, call
from tests.support.lab import SESSION, Lab, lab

CRASHED = Failure(code="STEP_FAILED", message="The step could not be done.")


@tool
def act() -> str:
    return "done"


async def test_a_turn_that_never_began_emits_all_its_events() -> None:
    async with lab([]) as it:
        await it.conclude(CRASHED, await it.deliver("Hi"))

        assert await it.types() == [
            "session.started",
            "turn.started",
            "message.received",
            "step.started",
            "step.failed",
            "turn.failed",
            "session.waiting",
        ]
        assert (await it.emitted("turn.failed"))[0]["code"] == "STEP_FAILED"


async def test_concluding_twice_is_concluding_once() -> None:
    async with lab([]) as it:
        delivery = await it.deliver("Hi")
        await it.conclude(CRASHED, delivery)
        before = await it.events()

        await it.conclude(CRASHED, delivery)

        assert await it.events() == before


async def test_a_turn_that_went_well_is_not_failed_afterwards() -> None:
    async with lab(["Hello"]) as it:
        delivery = await it.deliver("Hi")
        await it.model(delivery)

        await it.conclude(CRASHED, delivery)

        assert (await it.types())[-2:] == ["turn.completed", "session.waiting"]
        assert "turn.failed" not in await it.types()


async def test_what_was_shown_stays_and_the_message_stays_in_history() -> None:
    model = ScriptedModel([ModelFailed("Busy.", transient=True), "Hello"])
    async with lab(model) as it:
        delivery = await it.deliver("First")
        with pytest.raises(ModelFailed):
            await it.model(delivery)
        await it.conclude(CRASHED, delivery)

        await it.model(await it.deliver("Second"), turn=1)

        (request,) = model.prompts[1].messages
        assert [part.content for part in request.parts] == ["First", "Second"]  # type: ignore[union-attr]


async def test_a_late_attempt_finds_the_turn_ended() -> None:
    model = ScriptedModel(["Hello"])
    async with lab(model) as it:
        delivery = await it.deliver("Hi")
        await it.conclude(CRASHED, delivery)

        outcome = await it.model(delivery, generation=9)

        assert isinstance(outcome, Finished)
        assert outcome.failure == CRASHED
        assert model.prompts == []


async def test_calls_that_were_lost_get_a_truthful_result() -> None:
    model = ScriptedModel([[call("act"), call("act")], "Sorry"])
    async with lab(model, act) as it:
        delivery = await it.deliver("Go")
        done, lost = await it.calls(delivery)
        await it.tool(done)
        await it.conclude(CRASHED, delivery)

        late = await it.tool(lost, generation=9)
        await it.model(await it.deliver("And?"), turn=1)

        assert late.status == "unknown"
        results = model.prompts[1].messages[2].parts
        assert [part.content for part in results[:2]] == ["done", "This call was not executed."]  # type: ignore
        assert len(await it.emitted("action.result")) == 2


async def test_the_driver_need_not_know_how_far_the_turn_came() -> None:
    async with lab([call("act"), call("act")], act) as it:
        delivery = await it.deliver("Go")
        await it.tool((await it.calls(delivery))[0])
        await it.calls(delivery, step=1)

        await it.conclude(CRASHED, delivery, step=0)

        assert (await it.emitted("step.failed"))[0]["stepIndex"] == 1


async def test_a_structural_failure_ends_the_session() -> None:
    gone = Failure(code="AGENT_GONE", message="No longer served.", structural=True)
    async with lab([]) as it:
        await it.conclude(gone, await it.deliver("Hi"))

        (emitted,) = await it.emitted("session.failed")
        assert emitted == {"code": "AGENT_GONE", "message": "No longer served.", "sessionId": SESSION}
        row = await it.store.session(SESSION)
        assert row is not None
        assert (row.status, row.error) == ("failed", {"code": "AGENT_GONE", "message": "No longer served."})
        assert await it.store.route("first-token") is None


async def test_a_failed_task_ends_its_session() -> None:
    async with lab([], mode="task") as it:
        await it.conclude(CRASHED, await it.deliver("Do it"))

        assert (await it.types())[-1] == "session.failed"


async def test_a_turn_without_a_waiting_reader_gets_no_boundary() -> None:
    async with lab([]) as it:
        delivery = await it.deliver("Hi")
        await it.store.refuse(SESSION, delivery.id, "stale", delivery_refused(delivery.id, "stale", "Too late."))

        await it.conclude(CRASHED, delivery)

        assert await it.types() == ["delivery.refused"]


async def test_a_refused_delivery_is_emitted_once() -> None:
    async with lab([]) as it:
        delivery = await it.deliver("Hi")
        refusal = Refusal(session_id=SESSION, delivery_id=delivery.id, code="STALE_TOKEN", message="Too late.")

        await it.harness.refuse_delivery(refusal)
        await it.harness.refuse_delivery(refusal)

        assert await it.emitted("delivery.refused") == [
            {"deliveryId": delivery.id, "code": "STALE_TOKEN", "message": "Too late."}
        ]


class LateDelivery:
    """A message is accepted after the look for unread deliveries, and before the commit that ends the session."""

    def __init__(self, it: Lab) -> None:
        self._it = it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._it.store, name)

    async def count_unread(self, session_id: str) -> int:
        count = await self._it.store.count_unread(session_id)
        await self._it.deliver("at the last moment")
        return count


async def test_a_message_that_is_accepted_while_an_idle_session_ends_is_read() -> None:
    async with lab(["zero", "one"]) as it:
        await it.model(await it.deliver("m0"))
        close = CloseSession(session_id=SESSION, failure=SESSION_IDLE, if_idle=True)

        closed = await it.worker(cast(Store, LateDelivery(it))).close_session(close)

        assert closed is False
        assert "delivery.refused" not in await it.types()
