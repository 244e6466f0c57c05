"""Requests without an answer in time, and what is approved for the rest of the session."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

from perdure.harness.tools.approvals import REMEMBERED_APPROVALS, remembered
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import Calls, Resumed
from perdure.store.base import Store
from perdure.store.checkpoints import Rollback
from perdure.store.lifecycle import Restoration
from perdure.store.values import Commit, Committed, NewCheckpoint, SlotWrite
from perdure.testing import ScriptedModel, call
from tests.support.lab import NO, SESSION, YES, lab

from .till import Till, asked, last_parts


async def test_silence_denies() -> None:
    till = Till()
    async with asked(till, 5, expires=60) as (it, model, open):
        assert await it.resume(open=open, expired=open) == Resumed()
        await it.model(turn=1)

        assert till.paid == []
        assert await it.status_of(open[0]) == "expired"
        (resolved,) = await it.emitted("input.resolved")
        assert (resolved["status"], resolved["turnId"]) == ("expired", "turn_0")
        assert last_parts(model)[0]["message"] == "Tool execution was denied. Reason: expired"
        types = await it.types()
        assert types[types.index("input.resolved") + 1] == "turn.started"
        assert types[-2:] == ["turn.completed", "session.waiting"]


async def test_silence_may_approve_but_is_not_remembered() -> None:
    till = Till()
    async with asked(till, 5, approval="once", expires=60, on_expiry="approve") as (it, _, open):
        resumed = await it.resume(open=open, expired=open)
        await it.run_approved(resumed.calls[0])

        assert till.paid == [5]
        assert await it.store.slots(SESSION, [REMEMBERED_APPROVALS]) == {}


async def test_an_answer_in_the_last_moment_counts() -> None:
    till = Till()
    async with asked(till, 5, expires=60) as (it, _, open):
        answer = await it.answer((open[0], YES))

        resumed = await it.resume(open=open, expired=open)
        await it.run_approved(resumed.calls[0])

        assert till.paid == [5]
        assert (await it.model(answer, turn=2)).kind == "unheard", "its delivery was heard by the turn that expired"


class _AnsweredJustNow:
    """A store in which an answer comes between the look at what is due and the moment in which it is closed."""

    def __init__(self, store: Store, answer: Callable[[], Awaitable[object]]) -> None:
        self._store = store
        self._answer: Callable[[], Awaitable[object]] | None = answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, commit: Commit) -> Committed:
        if commit.inputs.expires and (answer := self._answer):
            self._answer = None
            await answer()
        return await self._store.commit(commit)


async def test_an_answer_between_the_read_and_the_expiry_is_executed_by_that_turn_and_emits_nothing_more() -> None:
    till = Till()
    async with asked(till, 5, then=("Paid.", "never"), expires=60) as (it, model, open):
        answers: list[DeliveryRef] = []

        async def answer() -> None:
            answers.append(await it.answer((open[0], YES)))

        it.store = cast("Store", _AnsweredJustNow(it.store, answer))
        it.harness = it.worker()
        resumed = await it.resume(open=open, expired=open)
        await it.run_approved(resumed.calls[0])
        await it.model(turn=1)

        assert till.paid == [5]
        assert (await it.resume(*answers, turn=2)).silent
        assert "It changed nothing" not in str(model.prompts[-1].messages)
        (started,) = [event for event in await it.events() if event.type == "turn.started" and event.turn == 1]
        assert started.delivery_ids == (answers[0].id,)


NOTE = "The state of this session was set back"


async def test_what_a_rollback_left_for_the_model_is_told_once_also_by_a_turn_without_a_delivery() -> None:
    till = Till()
    async with asked(till, 5, then=("Denied.", "Yes."), expires=60) as (it, model, open):
        await it.store.commit(Commit(SESSION, checkpoint=NewCheckpoint("chk_1", 0, 0)))
        await it.store.checkpoints.roll_back(Rollback(SESSION, "chk_1"))

        await it.resume(open=open, expired=open)
        await it.model(turn=1)
        await it.model(await it.deliver("And?"), turn=2)

        assert [str(prompt.messages).count(NOTE) for prompt in model.prompts] == [0, 1, 1]


async def test_a_rollback_right_before_an_expiry_is_told_with_the_answer_that_came_then() -> None:
    till = Till()
    async with asked(till, 5, then=("Paid.",), expires=60) as (it, model, open):
        await it.store.commit(Commit(SESSION, checkpoint=NewCheckpoint("chk_1", 0, 0)))

        async def roll_back_and_answer() -> None:
            await it.store.checkpoints.roll_back(Rollback(SESSION, "chk_1"))
            await it.answer((open[0], YES))

        it.store = cast("Store", _AnsweredJustNow(it.store, roll_back_and_answer))
        it.harness = it.worker()
        resumed = await it.resume(open=open, expired=open)
        await it.run_approved(resumed.calls[0])
        await it.model(turn=1)

        assert str(model.prompts[-1].messages).count(NOTE) == 1


async def test_silence_may_fail_the_turn_and_take_the_others_along() -> None:
    till = Till()
    async with asked(till, 5, 6, then=("Sorry.",), expires=60, on_expiry="fail") as (it, model, open):
        resumed = await it.resume(open=open, expired=open[:1])
        assert resumed.failure is not None
        assert (resumed.failure.code, resumed.calls, resumed.open) == ("INPUT_EXPIRED", (), ())
        before = await it.events()
        assert await it.resume(open=open, expired=open[:1], generation=2) == resumed
        assert await it.events() == before

        assert [await it.status_of(each) for each in open] == ["expired", "withdrawn"]
        assert (await it.types())[-7:] == [
            "input.resolved",
            "input.resolved",
            "turn.started",
            "action.result",
            "action.result",
            "turn.failed",
            "session.waiting",
        ]
        await it.model(await it.deliver("And?"), turn=2)
        assert (till.paid, len(last_parts(model))) == ([], 3)


async def test_a_failed_task_ends_the_session() -> None:
    till = Till()
    model = ScriptedModel([call("pay", amount=5)])
    async with lab(model, till.tool(expires=60, on_expiry="fail"), can_ask=True, mode="task") as it:
        open = await it.parked(await it.deliver("Pay"))
        assert (await it.types())[-2:] == ["turn.completed", "session.waiting"]

        await it.resume(open=open, expired=open)

        assert (await it.types())[-1] == "session.failed"
        assert await it.session_status() == "failed"


async def test_once_is_remembered_for_the_session() -> None:
    till = Till()
    async with asked(till, 5, then=(call("pay", amount=6), "Done."), approval="once") as (it, _, open):
        answer = await it.answer((open[0], YES))
        resumed = await it.resume(answer, open=open)
        await it.run_approved(resumed.calls[0])

        outcome = await it.model(answer, turn=1)

        assert isinstance(outcome, Calls)
        assert [each.tool for each in outcome.calls] == ["pay"]
        await it.tool(outcome.calls[0], turn=1)
        assert till.paid == [5, 6]


async def test_once_may_be_for_a_key() -> None:
    till = Till()
    small = {"approval": "once", "approval_key": lambda given: "small" if given["amount"] < 10 else "large"}  # type: ignore
    more = [call("pay", amount=6), call("pay", amount=60)]
    async with asked(till, 5, then=(more,), **small) as (it, _, open):
        answer = await it.answer((open[0], YES))
        resumed = await it.resume(answer, open=open)
        await it.run_approved(resumed.calls[0])

        outcome = await it.model(answer, turn=1)

        assert isinstance(outcome, Calls)
        assert (len(outcome.calls), len(outcome.open)) == (1, 1)
        slots = await it.store.slots(SESSION, [REMEMBERED_APPROVALS])
        assert slots[REMEMBERED_APPROVALS].value == {"keys": ["pay/small"]}


async def test_a_denial_is_not_remembered() -> None:
    till = Till()
    async with asked(till, 5, then=(call("pay", amount=6),), approval="once") as (it, _, open):
        answer = await it.answer((open[0], NO))
        await it.resume(answer, open=open)

        assert len(await it.parked(answer, turn=1)) == 1


async def test_a_restore_to_before_the_first_approval_forgets_it() -> None:
    async with lab(["One", "Two"]) as it:
        for turn in (0, 1):
            await it.model(await it.deliver("Hi"), turn=turn)
        await it.store.commit(Commit(SESSION, slots=[SlotWrite(REMEMBERED_APPROVALS, {"keys": ["pay"]})]))

        await it.store.restore(Restoration(SESSION, "OPERATOR", kept=0))

        assert await remembered(it.store, SESSION) == (frozenset(), 2)
