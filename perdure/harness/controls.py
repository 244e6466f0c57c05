"""Controls: between two turns the model's history is summarised or dropped, or the session ends.

A control is a delivery, so it is accepted once, read after those before it, and never lost. It takes a turn's time and
no number: the next turn has the one that its events name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perdure.errors import BudgetReached
from perdure.models.base import ModelSource
from perdure.protocol import deliveries, names
from perdure.protocol.events import EventType, NewEvent, turn_coordinates
from perdure.protocol.names import MODEL_SCOPE
from perdure.protocol.requests import Coordinates, Failure, NothingToRead
from perdure.store.base import Store, commit_with_retries
from perdure.store.values import Commit, Consumption, DeliveryTaken, Fence, Hold, SessionChange

from .compaction import Plan, Summariser, Summary, failed_at, requested
from .events import work_of
from .journal import COMPACTION, StoredCompaction, view_of, written
from .prompt import instructions_of, new_mark, prompts_for
from .tools.budget import Budget, principal_failure
from .tools.builtin import open_offer
from .tools.limits import limit_reached
from .turn_begin import read_deliveries

if TYPE_CHECKING:
    from .turn_begin import ModelContext

_NOTHING = Failure(code="NOTHING_TO_SUMMARISE", message="There is no history that is not summarised already.")


@dataclass(frozen=True)
class Control:
    """A control, and the session that it is for. The journal is that of the next turn."""

    ctx: "ModelContext"
    #: The model that writes summaries.
    model: str

    @property
    def at(self) -> Coordinates:
        return self.ctx.call.at

    @property
    def delivery_id(self) -> str:
        return self.ctx.call.deliveries[0].id

    @property
    def key(self) -> str:
        """The key of the record of this control; the turn may have records of earlier ones."""
        earlier = sum(record.key.startswith(names.BETWEEN_TURNS) for record in self.ctx.turn.records)
        return f"{names.BETWEEN_TURNS}/{earlier:04}"

    @property
    def compaction(self) -> StoredCompaction:
        """What later prompts leave out: all that came before. A restored session gets it back."""
        return StoredCompaction(until=(self.at.turn, 0), left_out=tuple(self.ctx.row.left_out))

    def commit(self, *events: NewEvent) -> Commit:
        """The commit that carries the control out; the session waits for its next delivery then."""
        waiting = NewEvent(
            type=EventType.SESSION_WAITING,
            key=names.step_key(self.at.turn, 0, f"{self.key}/boundary"),
            data={"wait": "next-user-message"},
        )
        return Commit(
            self.at.session_id,
            head=self.ctx.call.head,
            unless_cancelled=self.at.turn,
            unless=(self.at.turn, 0, self.key),
            events=self.stamped((*events, waiting)),
            consume=Consumption(self.at.turn, (self.delivery_id,)),
            recovers=True,
        )

    def stamped(self, events: Sequence[NewEvent]) -> tuple[NewEvent, ...]:
        return tuple(event.model_copy(update={"delivery_ids": (self.delivery_id,)}) for event in events)


class Controls:
    """Carries controls out. Repeating one changes nothing."""

    def __init__(self, store: Store, models: ModelSource, budget: Budget | None = None) -> None:
        self._store = store
        self._models = models
        self._budget = budget

    async def run(self, control: Control) -> NothingToRead:
        if control.ctx.row.ended:
            return NothingToRead(over=True)
        unread, _ = await read_deliveries(self._store, control.at, [control.delivery_id], control.ctx.turn)
        try:
            match [each.kind for each in unread]:
                case [deliveries.COMPACT]:
                    await self._compact(control)
                case [deliveries.CLEAR]:
                    await self._clear(control)
                case [deliveries.RESET]:
                    await self._reset(control)
                    return NothingToRead(over=True)
                case _:
                    # Another attempt has read it, or it was refused.
                    pass
        except BudgetReached as reached:
            await self._fail(control, principal_failure(reached))
        except DeliveryTaken:
            pass
        return NothingToRead()

    async def _clear(self, control: Control) -> None:
        """Drop the model's history. The records stay."""
        at = control.at
        cleared = NewEvent(
            type=EventType.CONTEXT_CLEARED,
            key=names.step_key(at.turn, 0, f"{control.key}/cleared"),
            data={"sessionId": at.session_id, **turn_coordinates(at.turn)},
        )
        record = written(at.turn, 0, control.key, COMPACTION, control.compaction)
        await commit_with_retries(self._store, replace(control.commit(cleared), records=(record,)))

    async def _reset(self, control: Control) -> None:
        """End the session."""
        at = control.at
        ended = NewEvent(type=EventType.SESSION_COMPLETED, key=names.session_key(f"reset/{control.delivery_id}"))
        commit = Commit(
            at.session_id,
            head=control.ctx.call.head,
            unless_cancelled=at.turn,
            events=control.stamped((ended,)),
            consume=Consumption(at.turn, (control.delivery_id,)),
            close=True,
            change=SessionChange(status="completed"),
        )
        await commit_with_retries(self._store, commit)

    async def _compact(self, control: Control) -> None:
        """Summarise all of the model's history."""
        ctx, at, key = control.ctx, control.at, control.key
        conversation = ctx.conversation
        asked = requested(ctx.factory, key, control.model, conversation.tokens or None)
        left_out = tuple(ctx.row.left_out)
        plan = Plan((at.turn, 0), conversation.tokens, key, summarises=True, left_out=left_out)
        failure = limit_reached(ctx.agent.limits, 0, ctx.row.spent)
        if failure is None and self._budget is not None:
            failure = await self._budget.failure(ctx.turn)
        if all(each.turn < 0 for each in conversation.messages):
            failure = _NOTHING
        if failure is not None:
            await self._fail(control, failure)
            return
        mark = ctx.mark or new_mark(at.turn)
        opening = Commit(
            at.session_id,
            head=ctx.call.head,
            unless_cancelled=at.turn,
            unless=(at.turn, 0, key),
            fence=self._fence(control, Hold.RAISE),
            records=() if isinstance(mark, str) else (mark,),
            events=control.stamped((asked,)),
        )
        done = await self._store.commit(opening)
        if done.existing is not None:
            return
        text = mark if isinstance(mark, str) else str(mark.body["mark"])
        offer = await open_offer(ctx.agent, can_ask=ctx.call.capabilities.request_input, output=None)
        instructions = await instructions_of(self._store, ctx.agent, view_of(ctx.row, at, None))
        prompt_of = prompts_for(ctx.agent, instructions, text, offer.definitions)

        def complete(commit: Commit) -> Commit:
            ending = control.commit(*commit.events)
            ending = replace(ending, fence=commit.fence, report=commit.report)
            return replace(ending, records=commit.records, change=commit.change)

        work = work_of(ctx.row, ctx.call.at, ctx.agent.name, ctx.attempt, ctx.turn.principal)
        summary = Summary(ctx.factory, work, control.model, conversation, text, plan, prompt_of, complete)
        await Summariser(self._store, self._models, summary, self._fence(control, Hold.RELEASE)).run()

    async def _fail(self, control: Control, failure: Failure) -> None:
        """End a compaction for which no model is called."""
        ctx, key = control.ctx, control.key
        plan = Plan((control.at.turn, 0), ctx.conversation.tokens, key, summarises=True)
        asked = requested(ctx.factory, key, control.model, plan.tokens or None)
        record, failed = failed_at(ctx.factory, control.model, plan, failure)
        await commit_with_retries(self._store, replace(control.commit(asked, failed), records=(record,)))

    def _fence(self, control: Control, hold: Hold) -> Fence:
        return Fence(control.at.turn, 0, MODEL_SCOPE, control.ctx.attempt, hold)
