"""One model call, from the records to a reply in the records."""

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from uuid import uuid4

from perdure.agents.agent import DEMO, FINAL_OUTPUT, Agent
from perdure.agents.approval import result_of
from perdure.agents.registry import AgentRegistry
from perdure.errors import Invalid, ModelFailed, PerdureError, TurnCancelled
from perdure.faults import reach
from perdure.models.base import Delta, ModelSource, Prompt, Reply
from perdure.protocol.events import NewEvent, Usage
from perdure.protocol.names import MODEL_SCOPE, REPLY
from perdure.protocol.requests import Failure, Finished, ModelCall, ModelOutcome, Unheard
from perdure.settings import Settings
from perdure.store.base import Store, commit_with_retries
from perdure.store.values import Attempt, Commit, Committed, DeliveryTaken, Fence, Hold, SessionRow
from perdure.telemetry import spans

from .deltas import DeltaWriter
from .events import EventFactory
from .journal import HeardDelivery, Result, TurnJournal, model_outcome, readable
from .lookup import find_agent, find_session, view_of
from .prompt import Histories, Past, call_ids_of, joined, messages_of, new_mark
from .reply import (
    CallNames,
    ModelAnswer,
    ReplyReader,
    RequestedCalls,
    Settlement,
    settle_cancelled,
    settle_failure,
    settle_reply,
    settle_result,
    settle_stopped,
    settle_unfulfilled,
)
from .tools.approvals import Approvals, Clock, remembered
from .tools.builtin import TRIES, FinalOutput, Offer, SchemaFailed, open_offer, wanted_output
from .turn_begin import Files, Opening, hear, open_step, previous_step

log = logging.getLogger("perdure.model")

#: Attempts at a provider that refuses or breaks off: with the pauses between them, a quarter of a minute. Then the turn
#: fails and the session goes on. Attempts that died with their worker have more (workflows/policies.py).
_PATIENCE = 6

UNUSABLE = "MODEL_REPLY_UNUSABLE"


@dataclass(frozen=True)
class _ModelContext:
    """What an attempt knows before it asks."""

    call: ModelCall
    attempt: Attempt
    row: SessionRow
    agent: Agent
    past: Past
    turn: TurnJournal

    @property
    def facts(self) -> EventFactory:
        return EventFactory(self.call.at, self.attempt.number)

    @property
    def recorded(self) -> ModelOutcome | None:
        """How this step, or its whole turn, has ended already."""
        record = self.turn.at(self.call.at.step, REPLY) or self.turn.over
        return model_outcome(record) if record else None

    @property
    def handed_over(self) -> Result | None:
        """The result that the step before has handed over; its other calls have ended by now."""
        before = self.turn.reply(self.call.at.step - 1)
        return before.result if before else None

    @property
    def mark(self) -> str | None:
        """What notes to the model are marked with; sessions of old have none before their next step."""
        return self.past.mark or self.turn.mark

    @property
    def output(self) -> FinalOutput | None:
        return wanted_output(self.agent, self.call.mode, self.turn)


class ModelCaller:
    """Asks the model once for each step, and never twice for an answer that was recorded."""

    def __init__(
        self,
        store: Store,
        agents: AgentRegistry,
        models: ModelSource,
        settings: Settings,
        histories: Histories | None = None,
        clock: Clock = time.time,
    ) -> None:
        self._store = store
        self._agents = agents
        self._models = models
        self._settings = settings
        self._histories = histories or Histories(store)
        self._clock = clock
        self._files = Files(settings)

    async def run(self, call: ModelCall, attempt: Attempt) -> ModelOutcome:
        ctx = await self._read_context(call, attempt)
        if ctx.recorded:
            return ctx.recorded.model_copy(update={"head": ctx.row.events})
        if ctx.handed_over:
            return await self._finish(ctx, ctx.handed_over)
        reach("model_before_begin")
        begun = await self._begin(ctx)
        reach("model_after_begin")
        if not isinstance(begun, _ModelContext):
            return begun
        outcome = await self._answer(begun)
        reach("model_after_settle")
        return outcome

    async def _read_context(self, call: ModelCall, attempt: Attempt) -> _ModelContext:
        row = await find_session(self._store, call.at.session_id, call.head)
        agent = find_agent(self._agents, call.agent)
        past, turn = await self._histories.load(call.at.session_id, call.at.turn)
        return _ModelContext(call, attempt, row, agent, past, turn)

    # --- before the model is asked ---

    async def _begin(self, ctx: _ModelContext) -> "_ModelContext | ModelOutcome":
        """Take the step over, hear its deliveries, tell the readers; all in one commit."""
        call = ctx.call
        while True:
            heard: tuple[HeardDelivery, ...] = ()
            if call.at.step == 0:
                heard, turn = await hear(
                    self._store, call.at, [each.id for each in call.deliveries], ctx.turn, self._files
                )
                if not heard and not turn.resumption:
                    return Unheard()
                ctx = replace(ctx, turn=turn)
            opening = open_step(call.at, ctx.attempt.number, heard, ctx.turn, ctx.agent.name, self._model(ctx))
            try:
                return await self._open(ctx, opening)
            except DeliveryTaken:
                # Withdrawn or refused since it was read: look again at what is left.
                continue

    async def _open(self, ctx: _ModelContext, opening: Opening) -> "_ModelContext | ModelOutcome":
        records = (*opening.records, *(() if ctx.mark else (new_mark(ctx.call.at.turn),)))
        ctx = replace(ctx, turn=ctx.turn.plus(records))
        limit = self._limit(ctx)
        settlement = settle_failure(ctx.facts, ctx.call.mode, limit, Usage()) if limit else Settlement()
        at = ctx.call.at
        done = await self._store.commit(
            Commit(
                at.session_id,
                head=ctx.call.head,
                unless_cancelled=at.turn,
                unless=(at.turn, at.step, REPLY),
                fence=self._fence(ctx, Hold.RAISE),
                superseding=ctx.facts.superseded(ctx.attempt.generation),
                records=(*records, *settlement.records),
                events=(*opening.events, *settlement.events),
                consume=opening.consume,
                consume_turn=at.turn,
                close=settlement.close,
                close_turn=at.turn if limit else None,
                change=settlement.changing(opening.change),
            )
        )
        if done.existing:
            return model_outcome(done.existing).model_copy(update={"head": done.session.events})
        if limit:
            return Finished(failure=limit, head=done.session.events)
        return ctx

    def _limit(self, ctx: _ModelContext) -> Failure | None:
        if ctx.output and ctx.output.problem:
            return ctx.output.problem
        limits, used = ctx.agent.limits, ctx.row.usage
        if ctx.call.at.step >= limits.steps_per_turn:
            return Failure(
                code="STEP_LIMIT_REACHED",
                message=f"The turn was stopped after {limits.steps_per_turn} steps.",
            )
        for name, limit, count in (
            ("input", limits.input_tokens, used.input_tokens),
            ("output", limits.output_tokens, used.output_tokens),
        ):
            if limit is not None and count >= limit:
                return Failure(
                    code="SESSION_TOKEN_LIMIT_REACHED",
                    message=f"The session has used {count} {name} tokens; its limit is {limit}.",
                )
        return None

    async def _finish(self, ctx: _ModelContext, result: Result) -> ModelOutcome:
        """End the turn with a result that has waited for the calls beside it; the model is not asked again."""
        at, number = ctx.call.at, ctx.attempt.number
        before = EventFactory(at.model_copy(update={"step": at.step - 1}), number)
        settlement = settle_result(before, ctx.call.mode, result)
        done = await commit_with_retries(
            self._store,
            Commit(
                at.session_id,
                unless_cancelled=at.turn,
                unless=(at.turn, at.step, REPLY),
                records=settlement.records,
                events=(*previous_step(at, number, ctx.turn), *settlement.events),
                close=settlement.close,
                close_turn=at.turn,
                change=settlement.change,
            ),
        )
        return _outcome(done, settlement)

    # --- the model ---

    async def _answer(self, ctx: _ModelContext) -> ModelOutcome:
        facts, mode = ctx.facts, ctx.call.mode
        offer = await open_offer(ctx.agent, can_ask=ctx.call.capabilities.request_input, output=ctx.output)
        sorter = await self._sorter(ctx, offer)
        calls = CallNames(ctx.call.at, ctx.past.call_ids | call_ids_of(ctx.turn), offer.names)
        telling = DeltaWriter(self._store, facts, ctx.attempt, calls, offer.hidden)
        prompt = await self._prompt(ctx, offer)
        # What each answer has cost, also one that cannot be used.
        paid: list[Usage] = []
        try:
            reply = await self._ask(ctx, telling, prompt, paid)
            response = calls.applied(readable(reply.response))
            wanted = await sorter.sort(response)
            answered = ModelAnswer(response, reply.finish_reason, sum(paid, Usage()), wanted, ctx.turn.principal)
            settle = settle_unfulfilled if _has_failed(offer, ctx.turn, wanted) else settle_reply
            return await self._settle(
                ctx, telling, settle(facts, mode, answered), settle_cancelled(facts, mode, answered)
            )
        except SchemaFailed as failed:
            failure = failed.failure
        except ModelFailed as failed:
            _report(ctx, failed)
            if failed.transient and ctx.attempt.number < _PATIENCE:
                raise
            failure = _failure(failed)
        except (Exception, SystemExit) as error:
            if isinstance(error, PerdureError) and not isinstance(error, Invalid):
                raise
            # It is paid for, and another one would be no better: that is said once.
            log.error("%s: the reply of the model cannot be used: %s", ctx.call.at.session_id, type(error).__name__)
            failure = _failure(ModelFailed(f"The reply of the model cannot be used ({type(error).__name__})."))
            failure = failure.model_copy(update={"code": UNUSABLE})
            telling.drop()
        return await self._settle(ctx, telling, settle_failure(facts, mode, failure, sum(paid, Usage())))

    async def _sorter(self, ctx: _ModelContext, offer: Offer) -> ReplyReader:
        at = ctx.call.at
        remembers = any(tool.gate.approval == "once" for tool in offer.tools.values())
        gates = Approvals(
            at=at,
            view=view_of(ctx.row, at, ctx.turn.principal),
            can_ask=ctx.call.capabilities.request_input,
            remembered=(await remembered(self._store, at.session_id))[0] if remembers else frozenset(),
            clock=self._clock,
        )
        return ReplyReader(offer, gates, self._settings, ctx.agent.limits)

    async def _ask(self, ctx: _ModelContext, telling: DeltaWriter, prompt: Prompt, paid: list[Usage]) -> Reply:
        """The model's answer, asked for a second time when the first one is empty."""
        model = self._models.model(self._model(ctx))
        for number in range(2):
            if number > 0 and await self._is_stopped(ctx):
                break
            with spans.model_call(ctx.call.at, ctx.agent.name, self._model(ctx), ctx.attempt.number) as spanned:
                reply = await telling.follow(_failing_once(model.stream(prompt)))
                spans.model_replied(spanned, reply.usage, reply.finish_reason)
            paid.append(reply.usage)
            if reply.response.tool_calls or (reply.response.text or "").strip():
                return reply
        raise ModelFailed("Empty model response", name="Empty model response")

    async def _is_stopped(self, ctx: _ModelContext) -> bool:
        row = await find_session(self._store, ctx.call.at.session_id)
        return row.cancel_turn is not None and row.cancel_turn <= ctx.call.at.turn

    async def _prompt(self, ctx: _ModelContext, offer: Offer) -> Prompt:
        assert ctx.mark is not None
        messages = [*ctx.past.messages, *messages_of(ctx.turn, ctx.mark)]
        return Prompt(
            messages=joined(messages, await self._instructions(ctx), ctx.mark),
            tools=offer.definitions,
            settings=ctx.agent.settings,
        )

    async def _instructions(self, ctx: _ModelContext) -> str:
        instructions = ctx.agent.instructions
        if isinstance(instructions, str):
            return instructions
        return await result_of(instructions, view_of(ctx.row, ctx.call.at, ctx.turn.principal))

    # --- after it has answered ---

    async def _settle(
        self, ctx: _ModelContext, telling: DeltaWriter, settlement: Settlement, cancelled: Settlement | None = None
    ) -> ModelOutcome:
        """Record the answer, tell it, and leave the step; all in one commit.

        `cancelled` is what the answer comes to when its turn is to be stopped: it is paid for, so it is kept.
        """
        reach("model_before_settle")
        if settlement.opens:
            reach("park_before_commit")
        rest = telling.rest()
        try:
            done = await self._commit(ctx, settlement, rest)
        except TurnCancelled:
            spent = (settlement.change and settlement.change.usage) or Usage()
            if cancelled is None and spent == Usage():
                raise
            settlement = cancelled or settle_stopped(ctx.facts, ctx.call.mode, spent)
            done = await self._commit(ctx, settlement, rest)
        if settlement.opens:
            reach("park_after_commit")
        if done.existing is None and (ended := settlement.ended):
            spans.turn_ended(ctx.agent.name, ended)
        return _outcome(done, settlement)

    async def _commit(self, ctx: _ModelContext, settlement: Settlement, rest: tuple[NewEvent, ...]) -> Committed:
        at = ctx.call.at
        return await commit_with_retries(
            self._store,
            Commit(
                at.session_id,
                # An answer that asks for calls goes through: the calls look for themselves.
                unless_cancelled=at.turn if settlement.ended not in (None, "cancelled") else None,
                unless=(at.turn, at.step, REPLY),
                fence=self._fence(ctx, Hold.RELEASE),
                records=settlement.records,
                events=(*rest, *settlement.events),
                close=settlement.close,
                opens=settlement.opens,
                change=settlement.counted,
            ),
        )

    def _fence(self, ctx: _ModelContext, hold: Hold) -> Fence:
        return Fence(ctx.call.at.turn, ctx.call.at.step, MODEL_SCOPE, ctx.attempt, hold)

    def _model(self, ctx: _ModelContext) -> str:
        return ctx.agent.model or self._settings.model or DEMO


async def _failing_once(stream: AsyncGenerator[Delta | Reply, None]) -> AsyncGenerator[Delta | Reply, None]:
    """The stream of a model, of which a surprise is its failure: to ask again would be to pay again for it."""
    async with aclosing(stream):
        try:
            async for item in stream:
                yield item
        except PerdureError:
            raise
        except Exception as error:
            log.error("a model failed in a way that it should not: %s", type(error).__name__)
            raise ModelFailed(f"The model failed ({type(error).__name__}).") from error


def _outcome(done: Committed, settlement: Settlement) -> ModelOutcome:
    outcome = model_outcome(done.existing or settlement.records[0])
    return outcome.model_copy(update={"head": done.session.events})


def _has_failed(offer: Offer, turn: TurnJournal, wanted: RequestedCalls) -> bool:
    """Whether the model had to hand over a result, and has not, or not in as many tries as it has."""
    if offer.output is None or wanted.result:
        return False
    tries = [call for reply in turn.replies() for call in reply.calls if call.tool == FINAL_OUTPUT]
    tries += [call for call in wanted.calls if call.tool == FINAL_OUTPUT]
    goes_on = wanted.requests or wanted.runs
    return not wanted.calls or (len(tries) >= TRIES and not goes_on)


def _report(ctx: _ModelContext, failed: ModelFailed) -> None:
    """Say in the log what readers are not told, under the id that they are."""
    error_id, at = failed.details.setdefault("errorId", str(uuid4())), ctx.call.at
    log.warning(
        "the model call of %s, turn %d, step %d, attempt %d failed, error id %s: %s",
        *(at.session_id, at.turn, at.step, ctx.attempt.number, error_id),
        " ".join(filter(None, (failed.message, failed.reason))),
    )


def _failure(failed: ModelFailed) -> Failure:
    details = {"message": failed.message, "name": "ModelFailed", **failed.details}
    return Failure(code=failed.code, message=failed.message, details=details)
