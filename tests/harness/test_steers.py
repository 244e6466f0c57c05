"""Messages that enter a running turn: at which step, exactly once, and with a result for each call."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from pydantic_ai.messages import ModelRequest, ToolReturnPart, UserPromptPart

from perdure import Limits, tool
from perdure.errors import ModelFailed, UnreadableState
from perdure.harness.journal import INTENT, STEERED, read_journal, written
from perdure.harness.tools.records import Intent
from perdure.models.base import Delta, Prompt, Reply
from perdure.protocol import names
from perdure.protocol.deliveries import LOCAL, DeliveryBody
from perdure.protocol.events import delivery_refused
from perdure.protocol.requests import Calls, Finished, NothingToRead
from perdure.store.base import Store
from perdure.store.deliveries import Change, NewDelivery
from perdure.store.values import Attempt, Commit, Fence, Hold
from perdure.testing import ScriptedModel, call
from tests.support.lab import SESSION, Lab, lab

RAN: list[int] = []


@pytest.fixture(autouse=True)
def forget() -> None:
    RAN.clear()


@tool
def work(number: int) -> str:
    """Do something once."""
    RAN.append(number)
    return f"done {number}"


class Interrupted(ScriptedModel):
    """Something happens while it gives its first reply."""

    meanwhile: Callable[[], Awaitable[Any]] | None = None

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        async for each in super().stream(prompt):
            if self.meanwhile is not None:
                happens, self.meanwhile = self.meanwhile, None
                await happens()
            yield each


def prompts(it: Lab) -> list[Prompt]:
    assert isinstance(it.models.now, ScriptedModel)
    return it.models.now.prompts


def said(it: Lab, request: int) -> list[str]:
    """What one request to the model holds: the texts of people, and the results of calls in brackets."""
    found: list[str] = []
    for message in prompts(it)[request].messages:
        for part in message.parts if isinstance(message, ModelRequest) else ():
            if isinstance(part, ToolReturnPart):
                found.append(f"[{part.content}]")
            elif isinstance(part, UserPromptPart):
                found.append(str(part.content))
    return found


async def types(store: Store) -> list[str]:
    return [event.type for event in await store.events(SESSION)]


async def test_a_call_that_has_not_begun_is_skipped_and_the_next_request_has_the_messages_in_order() -> None:
    async with lab([[call("work", number=1), call("work", number=2)], "Done."], work) as it:
        first, second = await it.calls(await it.deliver("Go"))
        await it.tool(first)
        one, two = await it.steer("Stop"), await it.steer("Really")

        skipped = await it.tool(second)
        outcome = await it.model(step=1)

        assert RAN == [1]
        assert skipped.status == "rejected"
        assert said(it, 1) == ["Go", "[done 1]", "[Skipped: the user said something else.]", "Stop", "Really"]
        assert isinstance(outcome, Finished)
        assert outcome.joined == (one.id, two.id)
        assert (await types(it.store)).count("steer.applied") == 1


async def test_a_call_that_has_begun_before_is_not_skipped_by_a_later_attempt() -> None:
    async with lab([call("work", number=1), "Done."], work) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        intent = written(0, 0, names.intent_key(ref.call_id), INTENT, Intent(tool="work", attempt=1, generation=1))
        fence = Fence(0, 0, names.call_scope(ref.call_id), Attempt(1, 1), Hold.RAISE)
        await it.store.commit(Commit(SESSION, fence=fence, records=(intent,)))
        await it.steer("Stop")

        outcome = await it.tool(ref, generation=2)

        assert outcome.status == "unknown"


async def test_a_reply_without_calls_goes_on_with_a_message_that_waits() -> None:
    async with lab(model := Interrupted(["One.", "Two."])) as it:
        delivery = await it.deliver("Go")
        model.meanwhile = lambda: it.steer("More")

        first = await it.model(delivery)
        second = await it.model(step=1)

        assert isinstance(first, Calls)
        assert first.calls == ()
        assert isinstance(second, Finished)
        assert said(it, 1) == ["Go", "More"]
        assert (await types(it.store)).count("turn.completed") == 1
        journal = await read_journal(it.store, SESSION, 0)
        assert STEERED.includes(journal.records[[each.key for each in journal.records].index(names.REPLY)])


async def test_a_repeated_attempt_has_the_message_once() -> None:
    async with lab(model := Interrupted(["One.", ModelFailed("No.", transient=True), "Two."])) as it:
        delivery = await it.deliver("Go")
        model.meanwhile = lambda: it.steer("More")
        await it.model(delivery)
        with pytest.raises(ModelFailed):
            await it.model(step=1)

        outcome = await it.model(step=1, generation=2)
        again = await it.model(step=1, generation=3)

        assert said(it, 2) == ["Go", "More"]
        assert isinstance(outcome, Finished)
        assert isinstance(again, Finished)
        assert again == outcome.model_copy(update={"head": again.head})
        assert (await types(it.store)).count("steer.applied") == 1


async def test_the_turn_ends_with_its_last_step_and_the_message_waits() -> None:
    async with lab(model := Interrupted(["One."]), limits=Limits(steps_per_turn=1)) as it:
        delivery = await it.deliver("Go")
        model.meanwhile = lambda: it.steer("More")

        outcome = await it.model(delivery)

        assert isinstance(outcome, Finished)
        assert [row.delivery_id for row in await it.store.unread(SESSION)] == ["d1"]


async def test_a_turn_that_may_not_call_the_model_again_leaves_the_message_in_the_inbox() -> None:
    async with lab([call("work", number=1)], work, limits=Limits(steps_per_turn=1)) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        await it.steer("More")
        await it.tool(ref)

        outcome = await it.model(step=1)

        assert isinstance(outcome, Finished)
        assert outcome.failure is not None
        assert [row.delivery_id for row in await it.store.unread(SESSION)] == ["d1"]
        assert "steer.applied" not in await types(it.store)


async def test_a_turn_for_a_message_that_has_entered_another_one_finds_nothing() -> None:
    async with lab(["One.", "Two."]) as it:
        delivery = await it.deliver("Go")
        steering = await it.steer("More")
        await it.model(delivery)

        assert isinstance(await it.model(steering, turn=1), NothingToRead)
        assert said(it, 0) == ["Go", "More"]


async def test_later_turns_see_the_message_where_it_has_entered() -> None:
    async with lab([call("work", number=1), "Done.", "Yes."], work) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        await it.tool(ref)
        await it.steer("Stop")
        await it.model(step=1)

        await it.model(await it.deliver("Well?"), turn=1)

        assert said(it, 2) == ["Go", "[done 1]", "Stop", "Well?"]


async def test_the_mark_of_a_message_that_is_gone_is_cleared_by_who_looks() -> None:
    async with lab(["One.", "Two."]) as it:
        delivery = await it.deliver("Go")
        steering = await it.steer("More")
        await it.store.refuse(SESSION, steering.id, "withdrawn", delivery_refused(steering.id, "withdrawn", "Back."))

        await it.model(delivery)

        row = await it.store.session(SESSION)
        assert row is not None
        assert not row.steered


async def test_a_message_that_only_a_newer_build_can_read_is_not_asked_for_again_and_again() -> None:
    async with lab(model := Interrupted(["One.", "Two."])) as it:
        delivery = await it.deliver("Go")
        model.meanwhile = lambda: it.steer("More")
        await it.model(delivery)
        newer = (await it.store.queue(SESSION))[0]
        await it.store.edit_delivery(newer, Change({"version": 99, "message": "More"}))

        with pytest.raises(UnreadableState):
            await it.model(step=1)

        assert len(prompts(it)) == 1
        assert (await it.store.queue(SESSION))[0].unread


async def test_a_message_steers_the_session_that_is_a_lane() -> None:
    async with lab(model := Interrupted(["One.", "Two.", "Three."])) as it:
        delivery = await it.deliver("Go")
        body = DeliveryBody(message="More").model_dump(mode="json")
        more = NewDelivery(SESSION, "more", body, LOCAL.owner, mode="steer", lane="background")
        model.meanwhile = lambda: it.store.accept(more)

        await it.model(delivery)
        await it.model(step=1)

        assert said(it, 1) == ["Go", "More"]


@pytest.mark.parametrize("limits", [Limits(output_tokens=1), Limits(input_tokens=1)])
async def test_a_reply_that_uses_up_the_tokens_ends_the_turn_and_the_message_waits(limits: Limits) -> None:
    async with lab(model := Interrupted(["One."]), limits=limits) as it:
        delivery = await it.deliver("Go")
        model.meanwhile = lambda: it.steer("More")

        outcome = await it.model(delivery)

        assert isinstance(outcome, Finished)
        assert outcome.failure is None
        assert [row.delivery_id for row in await it.store.unread(SESSION)] == ["d1"]


async def test_messages_that_were_moved_steer_in_the_order_in_which_they_wait() -> None:
    async with lab(["One."]) as it:
        delivery = await it.deliver("Go")
        await it.steer("two")
        await it.steer("one")
        last = (await it.store.queue(SESSION))[-1]
        read = (await it.store.deliveries(SESSION, [last.delivery_id]))[0]
        await it.store.edit_delivery(read, Change(read.body or {}, None, 2))

        await it.model(delivery)

        assert said(it, 0) == ["Go", "one", "two"]


async def test_a_turn_ends_with_its_reply_if_the_message_that_it_goes_on_with_is_withdrawn() -> None:
    async with lab(model := Interrupted(["One.", "Two."])) as it:
        delivery = await it.deliver("Go")
        model.meanwhile = lambda: it.steer("More")
        await it.model(delivery)
        await it.store.refuse(SESSION, "d1", "withdrawn", delivery_refused("d1", "withdrawn", "Back."))

        outcome = await it.model(step=1)
        again = await it.model(step=1)

        assert isinstance(outcome, Finished)
        assert outcome.failure is None
        assert isinstance(again, Finished)
        assert again.failure is None
        assert len(prompts(it)) == 1
        assert (await types(it.store))[-2:] == ["turn.completed", "session.waiting"]
        assert (await it.store.deliveries(SESSION, ["d0"]))[0].outcome == "completed"


async def test_a_turn_ends_with_its_reply_if_its_budget_has_no_room_for_the_message() -> None:
    async with lab(model := Interrupted(["One."]), limits=Limits(turn_tokens=1_014)) as it:
        delivery = await it.deliver("Go")
        model.meanwhile = lambda: it.steer("More")
        await it.model(delivery)

        outcome = await it.model(step=1)

        assert isinstance(outcome, Finished)
        assert outcome.failure is None
        assert [row.delivery_id for row in await it.store.unread(SESSION)] == ["d1"]
        assert "turn.failed" not in await types(it.store)
