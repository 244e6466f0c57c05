"""One model call: from the records of the session to the record of the reply."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from perdure.agents.agent import DEMO
from perdure.agents.registry import AgentRegistry
from perdure.bounds import seconds_until
from perdure.errors import BudgetReached, DeadlineExceeded, Invalid, ModelFailed, PerdureError, TurnCancelled
from perdure.faults import reach
from perdure.harness.events import CallNames
from perdure.models.base import ModelSource, Prompt, Reply, ask, context_window
from perdure.protocol.deliveries import CONTROLS
from perdure.protocol.events import NewEvent, Usage
from perdure.protocol.names import MODEL_SCOPE, REPLY
from perdure.protocol.requests import Failure, ModelCall, ModelOutcome, NothingToRead
from perdure.settings import Settings
from perdure.store.base import Store, commit_with_retries, write_at_last
from perdure.store.values import Attempt, Commit, Committed, DeliveryTaken, Fence, Hold, InputChanges, Steered
from perdure.telemetry import spans

from .events import DeltaWriter, EventFactory, work_of
from .journal import ConsumedDelivery, find_agent, find_session, model_outcome, readable, view_of
from .lanes.news import with_news, with_notes
from .prompt import PromptOf, call_ids_of, continued, instructions_of, new_mark, prompts_for
from .reply import (
    ReplyReader,
    Settlement,
    UsableReply,
    failure_of,
    is_unfulfilled,
    log_failure,
    outcome_after,
    settle_answered,
    settle_cancelled,
    settle_failure,
    settle_reply,
    settle_result,
    settle_steered,
    settle_stopped,
    settle_unfulfilled,
)
from .tools.approvals import Approvals, Clock, remembered
from .tools.builtin import Offer, SchemaFailed, open_offer
from .tools.limits import add_usage, deadline_failure, limit_reached, provider_attempts, refuse_killer, until_deadline
from .tools.progress import with_checkpoint
from .turn_begin import (
    FileFetcher,
    HistoryCache,
    ModelContext,
    Opening,
    completed_step,
    is_stopped,
    open_step,
    read_deliveries,
    read_steers,
    with_joined,
    with_steers,
)

if TYPE_CHECKING:
    from .compaction import Plan
    from .tools.budget import Budget

log = logging.getLogger("perdure.model")

#: Seconds after the first attempt; they double with each one, as in the policy of the activity.
_FIRST_PAUSE = 0.5

UNUSABLE = "MODEL_REPLY_UNUSABLE"


class ModelCaller:
    """Calls the model for a step, unless its reply is recorded already."""

    def __init__(
        self,
        store: Store,
        agents: AgentRegistry,
        models: ModelSource,
        settings: Settings,
        histories: HistoryCache | None = None,
        clock: Clock = time.time,
        budget: "Budget | None" = None,
    ) -> None:
        self._budget = budget
        self._shares_budget = settings.has_principal_budget
        self._store = budget.billed if budget else store
        self._agents = agents
        self._models = models
        self._settings = settings
        self._histories = histories or HistoryCache(store)
        self._clock = clock
        self._files = FileFetcher(settings)

    async def run(self, call: ModelCall, attempt: Attempt) -> ModelOutcome:
        row = await find_session(self._store, call.at.session_id, call.head)
        agent = find_agent(self._agents, call.agent)
        row, history, turn = await self._histories.load_for(agent, row, call.at.turn)
        ctx = ModelContext(call, attempt, row, agent, history, turn, self._clock())
        has_budget = agent.limits.has_budget or self._shares_budget or row.parent is not None
        if ctx.recorded or not has_budget:
            return await self._run(ctx)
        from .tools.budget import Budget

        tokens = ctx.conversation.tokens
        budget = Budget.of(self._store, self._agents, agent, row, call.at, attempt, self._settings, tokens, ctx.now)
        caller = ModelCaller(
            self._store, self._agents, self._models, self._settings, self._histories, self._clock, budget
        )
        async with budget.held():
            return await caller._run(ctx)

    async def _run(self, ctx: ModelContext) -> ModelOutcome:
        call = ctx.call
        if ctx.recorded:
            recorded = ctx.turn.counted(call.at.step, ctx.recorded.model_copy(update={"head": ctx.row.events}))
            return with_joined(recorded, ctx)
        if ctx.pending_result:
            return await self._complete_turn(ctx, settle_result(_before(ctx), call.mode, ctx.pending_result))
        refuse_killer(ctx.attempt, ctx.agent.limits)
        if call.deliveries and call.deliveries[0].kind in CONTROLS:
            from .controls import Control, Controls

            return await Controls(self._store, self._models, self._budget).run(Control(ctx, self._summary_model(ctx)))
        reach("model_before_begin")
        opened = await self._begin(ctx)
        reach("model_after_begin")
        if not isinstance(opened, ModelContext):
            return opened
        outcome = await self._call_and_settle(opened)
        reach("model_after_settle")
        return with_joined(outcome, opened)

    # --- before the model call ---

    async def _begin(self, ctx: ModelContext) -> "ModelContext | ModelOutcome":
        """Raise the fence, consume the deliveries and emit the first events of the step, in one commit."""
        call = ctx.call
        while True:
            deliveries: tuple[ConsumedDelivery, ...] = ()
            if call.at.step == 0:
                deliveries, turn = await read_deliveries(
                    self._store, call.at, [each.id for each in call.deliveries], ctx.turn, self._files
                )
                if not deliveries and not turn.resumption:
                    return NothingToRead()
                ctx = replace(ctx, turn=turn)
                if (ctx.row.lane is not None or ctx.row.notes) and not turn.deliveries():
                    deliveries = with_notes(ctx.row, deliveries)
                    deliveries = await with_news(self._store, ctx.row, call.at.turn, deliveries)
            opening = open_step(ctx.factory, deliveries, ctx.turn, ctx.agent.name, self._model(ctx))
            known = {each.delivery_id for each in deliveries}
            found = await read_steers(self._store, call.at, self._files) if ctx.row.steered else ()
            steers = [each for each in found if each.delivery_id not in known]
            if ctx.has_answered and not steers:
                return await self._complete_answered(ctx)
            try:
                return await self._commit_opening(ctx, opening, steers=steers)
            except DeliveryTaken:
                # A delivery was withdrawn or refused since it was read: read the others again.
                continue
            except BudgetReached as reached:
                from .tools.budget import principal_failure

                return await self._commit_opening(ctx, opening, principal_failure(reached))

    async def _commit_opening(
        self,
        ctx: ModelContext,
        opening: Opening,
        failure: Failure | None = None,
        steers: Sequence[ConsumedDelivery] = (),
    ) -> "ModelContext | ModelOutcome":
        read = replace(ctx, turn=ctx.turn.with_records(opening.records))
        settlement = await self._stopped(read, failure)
        if settlement is not None and ctx.has_answered:
            return await self._complete_answered(ctx)
        if settlement is None:
            # Only a request to the model takes them in. Otherwise they wait for a turn of their own.
            opening = with_steers(opening, ctx.factory, ctx.turn, steers)
        records = (*opening.records, *(() if ctx.mark else (new_mark(ctx.call.at.turn),)))
        ctx = replace(ctx, turn=ctx.turn.with_records(records))
        at = ctx.call.at
        # A structured result is given as a whole. A message that enters the turn here is to be answered by all of it.
        wanted = ctx.agent.on_interrupted_reply == "continue" and not (ctx.output or steers)
        continues = wanted and settlement is None
        continuing = ctx.factory.recovered(ctx.attempt.generation) if continues else None
        commit = Commit(
            at.session_id,
            head=ctx.call.head,
            left_out=ctx.row.left_out,
            unless_cancelled=at.turn,
            unless=(at.turn, at.step, REPLY),
            fence=self._fence(ctx, Hold.RAISE),
            superseding=ctx.factory.superseded(ctx.attempt.generation),
            continuing=continuing,
            records=records,
            events=opening.events,
            consume=opening.consume,
            change=opening.change,
        )
        if settlement is None:
            window = context_window(self._models, self._model(ctx))
            if plan := ctx.conversation.plan(ctx.agent.compaction, window):
                from .compaction import opening_with

                commit, record = opening_with(plan, commit, ctx.factory, self._summary_model(ctx))
                ctx = replace(ctx, plan=plan, turn=ctx.turn.with_records([record] if record else []))
            done = await self._store.commit(commit)
            if done.existing is None:
                return replace(ctx, partial=done.partial)
            return model_outcome(done.existing).model_copy(update={"head": done.session.events})
        ended = replace(
            commit,
            records=(*records, *settlement.records),
            events=(*opening.events, *settlement.events),
            close=settlement.close,
            close_turn=at.turn,
            change=replace(settlement.change, turns=opening.change.turns),
            inputs=InputChanges(opens=settlement.opens),
        )
        return outcome_after(await self._store.commit(ended), settlement.outcome)

    async def _stopped(self, ctx: ModelContext, failure: Failure | None) -> Settlement | None:
        """How the turn ends because the model may not be called."""
        limits, output = ctx.agent.limits, ctx.output
        if output and output.problem:
            failure = output.problem
        elif self._left(ctx) == 0:
            failure = deadline_failure(limits)
        failure = failure or limit_reached(limits, ctx.call.at.step, ctx.row.spent, ctx.turn)
        if failure is None and self._budget is not None:
            can_ask = ctx.call.capabilities.request_input
            return await self._budget.stopped(ctx.factory, ctx.call.mode, ctx.turn, can_ask=can_ask)
        return settle_failure(ctx.factory, ctx.call.mode, failure, Usage()) if failure else None

    async def _complete_answered(self, ctx: ModelContext) -> ModelOutcome:
        # With a fence: a newer attempt may have taken in a message that has come since.
        return await self._complete_turn(
            ctx, settle_answered(_before(ctx), ctx.call.mode), self._fence(ctx, Hold.RAISE)
        )

    async def _complete_turn(
        self, ctx: ModelContext, settlement: Settlement, fence: Fence | None = None
    ) -> ModelOutcome:
        """End the turn with what was recorded in the previous step. The model is not called again."""
        at = ctx.call.at
        commit = Commit(
            at.session_id,
            unless_cancelled=at.turn,
            unless=(at.turn, at.step, REPLY),
            fence=fence,
            records=settlement.records,
            events=(*completed_step(_before(ctx), ctx.turn), *settlement.events),
            close=settlement.close,
            close_turn=at.turn,
            change=settlement.change,
        )
        done = await commit_with_retries(self._store, with_checkpoint(commit, ctx.agent, at, REPLY))
        return outcome_after(done, settlement.outcome)

    # --- the model call ---

    async def _call_and_settle(self, ctx: ModelContext) -> ModelOutcome:
        offer = await open_offer(ctx.agent, can_ask=ctx.call.capabilities.request_input, output=ctx.output)
        reader = await self._reply_reader(ctx, offer)
        calls = CallNames(ctx.call.at, ctx.history.call_ids | call_ids_of(ctx.turn), offer.names)
        buffer_ms = self._settings.stream_buffer_ms
        deltas = DeltaWriter(self._store, ctx.factory, ctx.attempt, calls, buffer_ms, offer.hidden)
        if ctx.partial:
            deltas.go_on_from(ctx.partial)
        async with self._counted(ctx, deltas):
            try:
                async with until_deadline(self._left(ctx)):
                    view = view_of(ctx.row, ctx.call.at, ctx.turn.principal)
                    instructions = await instructions_of(self._store, ctx.agent, view, self._left(ctx))
                    ctx = replace(ctx, instructions=instructions)
                    prompt_of = prompts_for(ctx.agent, instructions, ctx.mark or "", offer.definitions)
                    if ctx.plan and ctx.plan.summarises:
                        ctx = await self._summarised(ctx, ctx.plan, prompt_of)
                return await self._reply_and_settle(ctx, offer, reader, calls, deltas, prompt_of)
            except DeadlineExceeded:
                failure = deadline_failure(ctx.agent.limits)
                return await self._settle(
                    ctx, deltas, settle_failure(ctx.factory, ctx.call.mode, failure, deltas.usage)
                )

    async def _summarised(self, ctx: ModelContext, plan: "Plan", prompt_of: PromptOf) -> ModelContext:
        """Leave older history out of the prompt, in favour of a summary if there can be one."""
        from .compaction import Summariser, Summary

        model = self._summary_model(ctx)
        summary = Summary(ctx.factory, self._work(ctx), model, ctx.conversation, ctx.mark or "", plan, prompt_of)
        record = await Summariser(self._store, self._models, summary, self._fence(ctx, Hold.KEEP)).run()
        return replace(ctx, turn=ctx.turn.with_records([record]), plan=None)

    async def _shortened(self, ctx: ModelContext, prompt_of: PromptOf, refused: ModelFailed) -> ModelContext:
        """A shorter conversation for a request that the model has refused as too long, once in a step."""
        window = context_window(self._models, self._model(ctx))
        plan = ctx.conversation.plan(ctx.agent.compaction, window, refused=True) if refused.too_long else None
        if plan is None or ctx.turn.at(ctx.call.at.step, plan.key):
            raise refused
        shorter = await self._summarised(ctx, plan, prompt_of)
        if shorter.conversation.compacted != ctx.call.at.place:
            raise refused
        return shorter

    async def _reply_and_settle(
        self,
        ctx: ModelContext,
        offer: Offer,
        reader: ReplyReader,
        calls: CallNames,
        deltas: DeltaWriter,
        prompt_of: PromptOf,
    ) -> ModelOutcome:
        factory, mode = ctx.factory, ctx.call.mode
        try:
            async with until_deadline(self._left(ctx)):
                try:
                    reply = await self._reply(ctx, deltas, prompt_of(ctx.conversation.begun_with(ctx.partial)))
                except ModelFailed as refused:
                    ctx = await self._shortened(ctx, prompt_of, refused)
                    reply = await self._reply(ctx, deltas, prompt_of(ctx.conversation.begun_with(ctx.partial)))
                response = calls.applied(readable(continued(reply.response, ctx.partial)))
                requested = await reader.read(response)
            speaker, deadline = ctx.turn.principal, ctx.deadline
            about = (speaker, deadline, ctx.partial, ctx.instructions)
            answer = UsableReply(response, reply.finish_reason, deltas.usage, requested, *about)
            settle = settle_unfulfilled if is_unfulfilled(offer, ctx.turn, requested) else settle_reply
            settlement = settle(factory, mode, answer)
            # A result is final, and so is a reply after which the session's limits allow no other one.
            may_go_on = settlement.ended == "completed" and requested.result is None
            last = limit_reached(ctx.agent.limits, ctx.call.at.step + 1, ctx.row.spent + deltas.usage)
            steered = None if last or not may_go_on else lambda: settle_steered(factory, answer)
            return await self._settle(ctx, deltas, settlement, lambda: settle_cancelled(factory, mode, answer), steered)
        except SchemaFailed as failed:
            failure = failed.failure
        except ModelFailed as failed:
            log_failure(ctx.call.at, ctx.attempt, failed)
            if failed.transient and ctx.attempt.number < provider_attempts(ctx.agent.limits):
                # The next attempt comes at the deadline at the latest, and ends the turn.
                if (left := self._left(ctx)) is not None:
                    pause = _FIRST_PAUSE * 2 ** (ctx.attempt.number - 1)
                    failed.retry_after = min(failed.retry_after or pause, left)
                raise
            failure = failure_of(failed)
        except (Exception, SystemExit) as error:
            if isinstance(error, PerdureError) and not isinstance(error, Invalid):
                raise
            # The reply is paid for, and a retry would hardly give a better one: the step fails at once.
            log.error("%s: the reply of the model cannot be used: %s", ctx.call.at.session_id, type(error).__name__)
            failure = failure_of(ModelFailed(f"The reply of the model cannot be used ({type(error).__name__})."))
            failure = failure.model_copy(update={"code": UNUSABLE})
            deltas.discard()
        return await self._settle(ctx, deltas, settle_failure(factory, mode, failure, deltas.usage))

    def _left(self, ctx: ModelContext) -> float | None:
        """Seconds until the deadline of the turn."""
        return None if ctx.deadline is None else seconds_until(ctx.deadline, self._clock())

    @asynccontextmanager
    async def _counted(self, ctx: ModelContext, deltas: DeltaWriter) -> AsyncGenerator[None]:
        """Count what this attempt was charged for also when its reply is not recorded."""
        try:
            yield
        except (Exception, asyncio.CancelledError, SystemExit):
            session_id = ctx.call.at.session_id
            await write_at_last(self._count(ctx, deltas.usage), log, f"usage of {session_id} was not counted")
            raise

    async def _count(self, ctx: ModelContext, usage: Usage) -> None:
        at, attempt = ctx.call.at, ctx.attempt
        if usage == Usage():
            return
        recorded = await self._store.record(at.session_id, at.turn, at.step, REPLY)
        # The attempt may have recorded its reply, with its usage, before it failed.
        if recorded is None or recorded.attempt != attempt.number:
            report = self._fence(ctx, Hold.KEEP).report()
            await add_usage(self._store, at, f"{attempt.generation}", "attempt", usage, report)

    async def _reply_reader(self, ctx: ModelContext, offer: Offer) -> ReplyReader:
        at = ctx.call.at
        remembers = any(tool.approval_policy.approval == "once" for tool in offer.tools.values())
        approvals = Approvals(
            at=at,
            view=view_of(ctx.row, at, ctx.turn.principal),
            can_ask=ctx.call.capabilities.request_input,
            remembered=(await remembered(self._store, at.session_id))[0] if remembers else frozenset(),
            clock=self._clock,
        )
        return ReplyReader(offer, approvals, self._settings, ctx.agent.limits, ctx.row.depth)

    async def _reply(self, ctx: ModelContext, deltas: DeltaWriter, prompt: Prompt) -> Reply:
        """The model's reply; the model is called a second time if the first reply is empty."""
        model = self._models.model(self._model(ctx))
        reply: Reply | None = None
        for number in range(2):
            if number > 0 and await is_stopped(self._store, ctx.call.at):
                break
            with spans.model_call(self._work(ctx), self._model(ctx)) as span:
                reply = await deltas.follow(ask(model, prompt, span))
            text = reply.response.text or ""
            # Behind the beginning of a reply a blank is no less than a word: readers have seen it grow by it.
            if reply.response.tool_calls or (text if ctx.partial else text.strip()):
                return reply
        if reply and ctx.partial:
            # Nothing was missing, as the model has said twice.
            return reply
        raise ModelFailed("Empty model response", name="Empty model response")

    # --- after the model call ---

    async def _settle(
        self,
        ctx: ModelContext,
        deltas: DeltaWriter,
        settlement: Settlement,
        cancelled: Callable[[], Settlement] | None = None,
        steered: Callable[[], Settlement] | None = None,
    ) -> ModelOutcome:
        """Record the reply, emit its events and release the fence, in one commit.

        `cancelled` is written instead if the turn is to be cancelled: the reply is kept with its usage. `steered` is
        written if a message waits that is to enter the turn before it ends.
        """
        reach("model_before_settle")
        if settlement.opens:
            reach("park_before_commit")
        unwritten = deltas.unwritten()
        try:
            try:
                done = await self._commit(ctx, settlement, unwritten, steerable=steered is not None)
            except Steered:
                assert steered is not None
                settlement = steered()
                done = await self._commit(ctx, settlement, unwritten)
        except TurnCancelled:
            spent = settlement.change.usage or Usage()
            if cancelled is None and spent == Usage():
                raise
            settlement = cancelled() if cancelled else settle_stopped(ctx.factory, ctx.call.mode, spent)
            done = await self._commit(ctx, settlement, unwritten)
        if settlement.opens:
            reach("park_after_commit")
        if done.existing is None and (ended := settlement.ended):
            spans.turn_ended(ctx.agent.name, ended)
        if done.existing is not None:
            await self._count(ctx, deltas.usage)
        return ctx.turn.counted(ctx.call.at.step, outcome_after(done, settlement.outcome))

    async def _commit(
        self, ctx: ModelContext, settlement: Settlement, unwritten: tuple[NewEvent, ...], *, steerable: bool = False
    ) -> Committed:
        at, fence = ctx.call.at, self._fence(ctx, Hold.RELEASE)
        commit = Commit(
            at.session_id,
            # A reply with calls is committed despite a cancel request: each call checks for one itself.
            unless_cancelled=at.turn if settlement.ended not in (None, "cancelled") else None,
            unless_steered=steerable,
            unless=(at.turn, at.step, REPLY),
            fence=fence,
            report=fence.report(*settlement.end),
            records=settlement.records,
            events=(*unwritten, *settlement.events),
            close=settlement.close,
            inputs=InputChanges(opens=settlement.opens),
            change=settlement.change,
        )
        return await commit_with_retries(self._store, with_checkpoint(commit, ctx.agent, at, REPLY))

    def _fence(self, ctx: ModelContext, hold: Hold) -> Fence:
        return Fence(ctx.call.at.turn, ctx.call.at.step, MODEL_SCOPE, ctx.attempt, hold)

    def _work(self, ctx: ModelContext) -> spans.Work:
        return work_of(ctx.row, ctx.call.at, ctx.agent.name, ctx.attempt, ctx.turn.principal)

    def _model(self, ctx: ModelContext) -> str:
        return ctx.agent.model or self._settings.model or DEMO

    def _summary_model(self, ctx: ModelContext) -> str:
        return (ctx.agent.compaction and ctx.agent.compaction.model) or self._model(ctx)


def _before(ctx: ModelContext) -> EventFactory:
    return ctx.factory.of_another_step(ctx.call.at.step - 1)
