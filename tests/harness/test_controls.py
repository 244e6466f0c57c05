"""Controls between two turns: the history is summarised or dropped, or the session ends."""

from collections.abc import AsyncGenerator, Sequence

import pytest
from pydantic_ai.messages import TextPart, UserPromptPart

from perdure import Limits
from perdure.errors import ModelFailed, TurnCancelled
from perdure.harness.journal import COMPACTION, StoredCompaction, read
from perdure.models.base import Delta, Prompt, Reply
from perdure.protocol.deliveries import CLEAR, COMPACT, RESET, DeliveryBody, DeliveryRef
from perdure.protocol.requests import NothingToRead
from perdure.settings import Settings
from perdure.store.checkpoints import Rollback
from perdure.store.deliveries import NewDelivery
from perdure.store.lifecycle import NewFork, Restoration
from perdure.store.values import Commit, NewCheckpoint
from perdure.testing import ScriptedModel
from tests.support.given import read_session
from tests.support.lab import SESSION, TEXT_TURN, Lab, lab


def said(prompt: Prompt) -> list[str]:
    """The texts of a prompt."""
    parts = [part for message in prompt.messages for part in message.parts]
    return [str(part.content) for part in parts if isinstance(part, UserPromptPart | TextPart)]


async def one_turn(it: Lab, turn: int = 0, message: str = "Hi") -> None:
    await it.model(await it.deliver(message), turn=turn)


async def after(it: Lab, count: int) -> Sequence[str]:
    return (await it.types())[count:]


async def refused_or_read(it: Lab, ref: DeliveryRef) -> tuple[int | None, str | None]:
    (row,) = await it.store.deliveries(SESSION, [ref.id])
    return row.turn, row.refused


async def test_a_compaction_summarises_all_of_the_history() -> None:
    model = ScriptedModel(["Hello", "They greeted.", "Two"])
    async with lab(model) as it:
        await one_turn(it)
        ref = await it.deliver(None, kind=COMPACT)

        assert await it.model(ref, turn=1) == NothingToRead()

        assert await after(it, len(TEXT_TURN)) == ["compaction.requested", "compaction.completed", "session.waiting"]
        assert {event.delivery_ids for event in (await it.events())[len(TEXT_TURN) :]} == {(ref.id,)}
        assert await refused_or_read(it, ref) == (1, None)
        await one_turn(it, 1, "Next")
        summary, asked = said(model.prompts[-1])
        assert summary.startswith("<summary ")
        assert "They greeted." in summary
        assert asked == "Next"
        assert (await it.types()).count("turn.started") == 2
        assert (await read_session(it.store, SESSION)).usage.input_tokens == 30


async def test_what_a_rollback_left_for_the_model_is_told_after_a_control() -> None:
    model = ScriptedModel(["Hello", "Two"])
    async with lab(model) as it:
        await one_turn(it)
        await it.store.commit(Commit(SESSION, checkpoint=NewCheckpoint("chk_1", 0, 0)))
        await it.store.checkpoints.roll_back(Rollback(SESSION, "chk_1"))

        await it.control(CLEAR, 1)
        await one_turn(it, 1, "Next")

        assert str(model.prompts[-1].messages).count("The state of this session was set back") == 1


async def test_the_next_turn_has_the_number_that_its_events_name() -> None:
    async with lab(["Hello", "Summary", "Two"]) as it:
        await one_turn(it)
        await it.control(COMPACT, 1)
        await one_turn(it, 1)

        assert (await it.emitted("compaction.requested"))[0]["turnId"] == "turn_1"
        assert [data["turnId"] for data in await it.emitted("turn.started")] == ["turn_0", "turn_1"]
        assert (await read_session(it.store, SESSION)).turns == 2


async def test_a_history_that_is_cleared_is_sent_no_more_and_kept() -> None:
    model = ScriptedModel(["Hello", "Two"])
    async with lab(model) as it:
        await one_turn(it, message="My name is Ada")
        records = len(await it.store.records(SESSION))

        await it.control(CLEAR, 1)

        assert await after(it, len(TEXT_TURN)) == ["context.cleared", "session.waiting"]
        assert await it.emitted("context.cleared") == [{"sequence": 1, "turnId": "turn_1", "sessionId": SESSION}]
        assert len(await it.store.records(SESSION)) == records + 1
        await one_turn(it, 1, "Who am I?")
        assert said(model.prompts[-1]) == ["Who am I?"]


async def test_controls_add_up_and_another_worker_reads_them_alike() -> None:
    model = ScriptedModel(["One", "Summary of one", "Summary of both", "Two", "Three"])
    async with lab(model) as it:
        await one_turn(it, message="first")
        await it.control(COMPACT, 1)
        await it.control(CLEAR, 1)
        await one_turn(it, 1, "second")
        await it.control(COMPACT, 2)
        it.harness = it.worker()
        await one_turn(it, 2, "third")

        assert said(model.prompts[2]) == ["second"]
        assert "second" in said(model.prompts[3])[0]
        summary, asked = said(model.prompts[4])
        assert "Two" in summary
        assert asked == "third"


async def test_a_compaction_that_fails_ends_visibly_and_leaves_history_as_it_was() -> None:
    model = ScriptedModel(["Hello", ModelFailed("No."), "Two"])
    async with lab(model) as it:
        await one_turn(it)
        await it.control(COMPACT, 1)

        assert await after(it, len(TEXT_TURN)) == ["compaction.requested", "compaction.failed", "session.waiting"]
        await one_turn(it, 1, "Next")
        assert said(model.prompts[-1]) == ["Hi", "Hello", "Next"]


async def test_what_is_summarised_already_is_not_paid_for_again() -> None:
    model = ScriptedModel(["Hello", "Summary"])
    async with lab(model) as it:
        await one_turn(it)
        await it.control(COMPACT, 1)
        await it.control(COMPACT, 1)

        (failed,) = await it.emitted("compaction.failed")
        assert failed["code"] == "NOTHING_TO_SUMMARISE"
        assert len(model.prompts) == 2


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(input_tokens=10), "SESSION_TOKEN_LIMIT_REACHED"),
        (Limits(session_tokens=1_020), "SESSION_BUDGET_REACHED"),
    ],
)
async def test_a_session_that_has_used_its_tokens_pays_for_no_summary(limits: Limits, code: str) -> None:
    model = ScriptedModel(["Hello"])
    async with lab(model, limits=limits) as it:
        await one_turn(it)
        await it.control(COMPACT, 1)

        (failed,) = await it.emitted("compaction.failed")
        assert failed["code"] == code
        assert len(model.prompts) == 1


async def test_a_principal_without_a_budget_left_pays_for_no_summary() -> None:
    model = ScriptedModel(["Hello"])
    async with lab(model, settings=Settings(agents="", principal_tokens=1_020)) as it:
        await one_turn(it)
        await it.control(COMPACT, 1)

        (failed,) = await it.emitted("compaction.failed")
        assert failed["code"] == "PRINCIPAL_BUDGET_REACHED"
        assert len(model.prompts) == 1


@pytest.mark.parametrize("kind", [COMPACT, CLEAR])
async def test_a_restored_session_gets_its_history_back(kind: str) -> None:
    replies = ["Hello", "One", *(["Summary"] if kind == COMPACT else []), "Two", "Three"]
    model = ScriptedModel(replies)
    async with lab(model) as it:
        await one_turn(it)
        await one_turn(it, 1)
        await it.control(kind, 2)
        await it.store.restore(Restoration(SESSION, "OPERATOR", 0))
        await one_turn(it, 2, "Next")
        await it.control(CLEAR, 3)
        await one_turn(it, 3, "Last")

        assert said(model.prompts[-2]) == ["Hi", "Hello", "Next"]
        assert said(model.prompts[-1]) == ["Last"]


async def test_a_fork_continues_with_the_summary_of_its_parent() -> None:
    model = ScriptedModel(["Hello", "Summary", "Two", "Three", "Three"])
    async with lab(model) as it:
        await one_turn(it)
        await it.control(COMPACT, 1)
        await one_turn(it, 1)
        await it.store.fork(NewFork("fork", "token of fork", SESSION, 1))
        await one_turn(it, 2, "Next")
        here = model.prompts[-1]
        fork = Lab(it.store, it.agent, model, "conversation", it.settings, session="fork")
        await it.store.accept(NewDelivery("fork", "d", DeliveryBody(message="Next").model_dump(mode="json"), "owner"))

        await fork.model(DeliveryRef(id="d", token_hash="token of fork"), turn=2)

        assert said(model.prompts[-1]) == said(here)
        assert "Summary" in said(here)[0]


@pytest.mark.parametrize("kind", [COMPACT, CLEAR, RESET])
async def test_a_control_that_is_attempted_again_changes_nothing(kind: str) -> None:
    model = ScriptedModel(["Hello", "Summary"])
    async with lab(model) as it:
        await one_turn(it)
        ref = await it.deliver(None, kind=kind)
        first = await it.model(ref, turn=1)
        before = await it.events()

        assert await it.model(ref, turn=1, generation=2) == first
        assert await it.events() == before


class Dying(ScriptedModel):
    """Its worker dies with the second request."""

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        async for item in super().stream(prompt):
            if len(self.prompts) == 2:
                raise KeyboardInterrupt
            yield item


async def test_a_crash_before_the_summary_is_recorded_pays_again_and_is_seen_once() -> None:
    model = Dying(["Hello", "lost", "Summary"])
    async with lab(model) as it:
        await one_turn(it)
        ref = await it.deliver(None, kind=COMPACT)
        with pytest.raises(KeyboardInterrupt):
            await it.model(ref, turn=1)

        it.harness = it.worker()
        await it.model(ref, turn=1, generation=2)

        assert len(model.prompts) == 3
        assert await after(it, len(TEXT_TURN)) == ["compaction.requested", "compaction.completed", "session.waiting"]


async def test_a_reset_ends_the_session_and_refuses_what_waits() -> None:
    async with lab(["Hello"]) as it:
        await one_turn(it)
        ref = await it.deliver(None, kind=RESET)
        late = await it.deliver("Too late")

        assert await it.model(ref, turn=1) == NothingToRead(over=True)

        assert await after(it, len(TEXT_TURN)) == ["delivery.refused", "session.completed"]
        assert await it.session_status() == "completed"
        assert await refused_or_read(it, late) == (None, "session_not_active")


@pytest.mark.parametrize("kind", [COMPACT, CLEAR, RESET])
async def test_a_control_that_is_cancelled_ends_in_a_cancelled_turn(kind: str) -> None:
    model = ScriptedModel(["Hello", "Two"])
    async with lab(model) as it:
        await one_turn(it)
        ref = await it.deliver(None, kind=kind)
        await it.request_cancel()

        with pytest.raises(TurnCancelled):
            await it.model(ref, turn=1)
        await it.cancel(ref, turn=1)

        types = ["cancel.requested", "turn.started", "turn.cancelled", "session.waiting"]
        assert await after(it, len(TEXT_TURN)) == types
        await one_turn(it, 2, "Next")
        assert said(model.prompts[-1]) == ["Hi", "Hello", "Next"]


async def test_the_first_control_marks_its_summary_like_every_other() -> None:
    model = ScriptedModel(["Hello", "Summary", "Two"])
    async with lab(model) as it:
        await one_turn(it)
        await it.control(COMPACT, 1)
        await one_turn(it, 1)

        marks = [each.body["mark"] for each in await it.store.records(SESSION) if each.key == "mark"]
        assert len(marks) == 1
        assert said(model.prompts[-1])[0].startswith(f"<summary {marks[0]}>")
        found = [each for each in await it.store.records(SESSION) if COMPACTION.includes(each)]
        assert [read(each, COMPACTION, StoredCompaction).until for each in found] == [(1, 0)]
