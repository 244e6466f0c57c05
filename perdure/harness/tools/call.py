"""One tool call: the intent is recorded before the effect, the outcome after it."""

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from perdure.agents.agent import Agent
from perdure.agents.context import Cancellation, Dispatch, Log, SessionView, Signal, Staging, ToolContext, ToolSession
from perdure.agents.registry import AgentRegistry
from perdure.agents.state import check_readable, declared_names
from perdure.bounds import described, seconds_until
from perdure.errors import Invalid, PerdureError, ToolFailed, Unavailable, UnreadableState
from perdure.faults import reach
from perdure.harness.events import EventFactory, action_key, work_of
from perdure.harness.journal import (
    INTENT,
    OUTCOME,
    REPLY,
    RESUME,
    STAGE,
    StoredReply,
    find_agent,
    find_session,
    read,
    read_journal,
    view_of,
    written,
)
from perdure.harness.prompt import INTERRUPTED
from perdure.harness.tools.limits import refuse_killer
from perdure.protocol import names
from perdure.protocol.deliveries import Principal
from perdure.protocol.requests import Coordinates, ToolCall, ToolOutcome
from perdure.protocol.wire import JsonObject
from perdure.session.inputs import refuse_newer
from perdure.session.state import hash_token
from perdure.settings import Settings
from perdure.store.base import Store, commit_with_retries, with_retries
from perdure.store.inputs import InputRow
from perdure.store.values import Attempt, Commit, Fence, Hold, Record, SessionChange, SlotConflict, SlotWrite, Steered
from perdure.telemetry import spans

from . import outcomes
from .approvals import approval_problem, arguments_of, log_of
from .progress import discard_unreadable, plan_events, with_checkpoint
from .records import Intent, Outcome, RequestedCall, StoredStage
from .toolbox import InvalidArguments, Usable, open_toolbox


@dataclass(frozen=True)
class _Work:
    """One attempt at one call."""

    call: ToolCall
    attempt: Attempt
    requested: RequestedCall
    agent: Agent
    #: The input request of the call, if it needed one.
    request: InputRow | None
    #: None: the agent no longer has the tool.
    tool: Usable | None
    view: SessionView
    #: What its span says of it.
    observed: spans.Work
    #: Whether an older attempt has recorded its intent.
    begun: bool
    #: When the turn fails, in seconds since the epoch.
    deadline: float | None = None
    #: Whether it is skipped if a message waits that is to enter the turn: the model is called next.
    skippable: bool = False

    @property
    def at(self) -> Coordinates:
        return self.call.at

    @property
    def event_at(self) -> Coordinates:
        return self.call.told_at or self.at

    @property
    def arguments(self) -> JsonObject:
        """The arguments of the model, or those that were approved."""
        row = self.request
        return arguments_of(row.request, row.answer) if row else self.requested.input

    @property
    def call_id(self) -> str:
        return self.call.call.call_id

    def fence(self, hold: Hold) -> Fence:
        return Fence(self.at.turn, self.at.step, names.call_scope(self.call_id), self.attempt, hold)

    @property
    def outcome_key(self) -> tuple[int, int, str]:
        return self.at.turn, self.at.step, names.outcome_key(self.call_id)


class ToolCaller:
    """Runs tool calls. Each call gets exactly one outcome, even if the process that runs it dies."""

    def __init__(
        self,
        store: Store,
        agents: AgentRegistry,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        dispatch: Dispatch | None = None,
    ) -> None:
        self._dispatch = dispatch
        self._store = store
        self._agents = agents
        self._settings = settings
        self._clock = clock

    async def run(
        self, call: ToolCall, attempt: Attempt, cancelled: Signal, stopping: Callable[[], bool] = lambda: False
    ) -> ToolOutcome:
        """`stopping` says whether this process shuts down: then it does not wait for a tool that cannot be stopped."""
        work = await self._prepare(call, attempt)
        reach("tool_before_intent")
        settled = await self._record_intent(work)
        reach("tool_after_intent")
        if settled is not None:
            return settled
        refuse_killer(attempt, find_agent(self._agents, call.agent).limits)
        context = self._context(work, cancelled)
        with spans.tool_call(work.observed, call.call) as spanned:
            done = await self._outcome(work, context, stopping)
            if done.is_error:
                spanned.fail(done.status)
            if spans.chosen().choices.content:
                from perdure.telemetry.content import show_call

                show_call(spanned, work.arguments, done.output)
        outcome = await self._settle(work, done, context)
        reach("tool_after_settle")
        return outcome

    async def _prepare(self, call: ToolCall, attempt: Attempt) -> _Work:
        """Read all that the call needs, so that nothing can fail between the intent and the effect."""
        at, call_id = call.at, call.call.call_id
        agent = find_agent(self._agents, call.agent)
        await discard_unreadable(self._store, agent, at.session_id)
        stage_key = call.call.stage
        row, reply, intent, _ = await asyncio.gather(
            find_session(self._store, at.session_id),
            self._store.record(at.session_id, at.turn, at.step, names.REPLY),
            self._store.record(at.session_id, at.turn, at.step, names.intent_key(call_id)),
            self._check_slots(call),
        )
        stage = await self._store.record(at.session_id, at.turn, at.step, stage_key) if stage_key else None
        if reply is None:
            raise UnreadableState("There is no record of the reply that asks for this call.")
        stored = read(reply, REPLY, StoredReply)
        requested = _called_in(stage, call_id) if stage else stored.call(call_id)
        request = await self._store.input(requested.ask.request.request_id) if requested.ask else None
        if request is not None:
            refuse_newer(request.request, request.answer)
        speaker = await speaker_of(self._store, at, stored)
        return _Work(
            call=call,
            attempt=attempt,
            requested=requested,
            agent=agent,
            request=request,
            tool=(await open_toolbox(agent)).get(call.call.tool),
            view=view_of(row, at, speaker),
            observed=work_of(row, at, call.agent, attempt, speaker),
            begun=_is_from_other_attempt(intent, attempt),
            deadline=await deadline_of(self._store, agent, call, stored),
            # What people have approved runs, and so does what a program or the end of the turn waits for.
            skippable=not (stored.asks or stored.result or call.told_at or call.call.stage),
        )

    async def _check_slots(self, call: ToolCall) -> None:
        """Refuse the call before its intent if this build cannot read the author's state: another one may."""
        if declared := declared_names():
            for name, slot in (await self._store.slots(call.at.session_id, declared)).items():
                try:
                    check_readable(name, slot.value)
                except UnreadableState as unreadable:
                    log_of(call.at, call.call.tool, call.call.call_id).error("%s", unreadable, exc_info=unreadable)
                    raise

    def _left(self, work: _Work) -> float:
        """Seconds until the deadline of the turn."""
        return math.inf if work.deadline is None else seconds_until(work.deadline, self._clock())

    # --- before the effect ---

    async def _record_intent(self, work: _Work) -> ToolOutcome | None:
        """Raise the fence and record the intent; returns the outcome if the call must not run."""
        refusal = _refusal(work)
        late = refusal is None and self._left(work) == 0
        intent = Intent(tool=work.call.call.tool, attempt=work.attempt.number, generation=work.attempt.generation)
        intent_key = (work.at.turn, work.at.step, names.intent_key(work.call_id))
        commit = Commit(
            work.at.session_id,
            unless_cancelled=work.event_at.turn,
            unless=work.outcome_key,
            fence=work.fence(Hold.RAISE),
            records=() if refusal or late else (written(*intent_key, INTENT, intent),),
        )
        steerable = work.skippable and not (refusal or late or work.begun)
        skipped = False
        try:
            try:
                done = await self._store.commit(replace(commit, unless_steered=steerable))
            except Steered:
                # If an older attempt holds the fence, the call may have begun.
                skipped = True
                done = await self._store.commit(replace(commit, records=()))
        except Unavailable:
            # The commit may have succeeded. Then a repeated one finds our own fence and cannot report an older
            # attempt, so the intent is read to find out.
            done = await commit_with_retries(self._store, commit)
            stored = await self._store.record(work.at.session_id, *intent_key)
            work = replace(work, begun=_is_from_other_attempt(stored, work.attempt))
        if done.existing:
            return await self._recorded(work, done.existing)
        if skipped and not (work.begun or done.superseded):
            return await self._settle(work, outcomes.skipped(), None)
        if skipped:
            await self._store.commit(commit)
        if refusal:
            return await self._settle(work, refusal, None)
        if late and not (work.begun or done.superseded):
            return await self._settle(work, outcomes.failed(_TOO_LATE, outcomes.DEADLINE), None)
        if late:
            return await self._settle(work, outcomes.failed(INTERRUPTED, outcomes.UNKNOWN, "unknown"), None)
        # An older attempt may have begun after the records were read; then it held the fence.
        if work.tool and work.tool.effects == "at_most_once" and (work.begun or done.superseded):
            unknown = outcomes.failed(INTERRUPTED, outcomes.UNKNOWN, "unknown")
            return await self._settle(work, unknown, None)
        return None

    def _context(self, work: _Work, cancelled: Signal) -> ToolContext:
        at = work.at

        async def read_slot(name: str) -> tuple[JsonObject | None, int]:
            slot = (await self._store.slots(at.session_id, [name])).get(name)
            return (slot.value, slot.version) if slot else (None, 0)

        return ToolContext(
            session=ToolSession(work.view),
            call_id=work.call_id,
            tool=work.call.call.tool,
            idempotency_key=idempotency_key(at, work.call_id),
            cancelled=Cancellation(cancelled),
            staging=Staging(read_slot),
            loop=asyncio.get_running_loop(),
            dispatch=self._dispatch,
        )

    # --- the effect ---

    async def _outcome(self, work: _Work, context: ToolContext, stopping: Callable[[], bool]) -> Outcome:
        assert work.tool is not None
        try:
            result = await self._call(work.tool, work.arguments, context, self._left(work))
        except InvalidArguments as refused:
            return outcomes.failed(str(refused))
        except _TimeLimitExceeded as late:
            self._log(work).warning("%s", late)
            return outcomes.failed(str(late))
        except asyncio.CancelledError:
            context.cancelled.set()
            task = asyncio.current_task()
            if task is None or task.cancelling():
                await _wait_for_thread(context, work.tool.timeout, stopping)
                raise
            return outcomes.failed("CancelledError: the tool cancelled itself.")
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._raise_unreadable(work, context)
            return self._handle_error(work, error)
        reach("tool_after_effect")
        self._raise_unreadable(work, context)
        try:
            return outcomes.completed(result, self._settings.max_tool_output_bytes)
        except Invalid as unsendable:
            self._log(work).error("%s", unsendable.message)
            return outcomes.failed(unsendable.message)

    def _raise_unreadable(self, work: _Work, context: ToolContext | None) -> None:
        """Hand the call back if it could not read the author's state. One that runs at most once has failed."""
        assert work.tool is not None
        assert context is not None
        if context.staging.unreadable and work.tool.effects != "at_most_once":
            self._log(work).error("%s", context.staging.unreadable, exc_info=context.staging.unreadable)
            raise context.staging.unreadable

    def _log(self, work: _Work) -> Log:
        return log_of(work.at, work.call.call.tool, work.call_id)

    async def _call(self, tool: Usable, arguments: JsonObject, context: ToolContext, left: float) -> Any:
        limit = asyncio.timeout(min(tool.timeout, left))
        try:
            async with limit:
                return await tool.call(arguments, context)
        except TimeoutError:
            if not limit.expired():
                raise
            # A tool in a thread cannot be stopped; it can only check this flag.
            context.cancelled.set()
            if left < tool.timeout:
                raise _TimeLimitExceeded("The tool did not finish before the deadline of its turn.") from None
            raise _TimeLimitExceeded(f"The tool did not finish within {tool.timeout:g} seconds.") from None

    def _handle_error(self, work: _Work, error: BaseException) -> Outcome:
        assert work.tool is not None
        # The traceback may hold content: it is for the tool's author, and only in this log.
        self._log(work).error("the tool raised, in attempt %d", work.attempt.number, exc_info=error)
        message = outcomes.cut(described(error), self._settings.max_tool_output_bytes)
        again = work.tool.effects != "at_most_once" and work.attempt.number <= work.tool.retries
        most = work.call.call.attempts or math.inf
        if again and self._left(work) > 0 and work.attempt.number < most:
            # Temporal stores and shows the texts of failures, so this one has only the type.
            sentence = f"The tool raised {type(error).__name__}."
            raise ToolFailed(sentence, reason=message, attempt=work.attempt.number) from None
        return outcomes.failed(message)

    # --- after the effect ---

    async def _settle(self, work: _Work, outcome: Outcome, context: ToolContext | None) -> ToolOutcome:
        """Record the outcome and the tool's writes in one commit."""
        completed = outcome.status == "completed"
        # The staged writes of a failed tool are dropped, except for those of slices that keep a log.
        kept = None if context is None else context.staging if completed else context.staging.kept_on_failure()
        token = context.session.requested_token if context and completed else None
        outcome = outcome.model_copy(update={"token_hash": hash_token(token) if token else None})
        while True:
            reach("tool_before_settle")
            try:
                done = await commit_with_retries(self._store, self._settlement(work, outcome, kept))
            except SlotConflict:
                assert kept is not None
                try:
                    await with_retries(kept.rebase)
                    outcome = await self._late_outcome(work, outcome, context)
                except Unavailable:
                    # The tool has not failed. As with the commit below, another attempt goes on.
                    raise
                except (Exception, SystemExit, KeyboardInterrupt) as error:
                    self._raise_unreadable(work, context)
                    self._log(work).error("the tool's update of its state raised", exc_info=error)
                    outcome, kept = outcomes.failed(described(error)), await self._kept_log(work, kept)
                continue
            except Exception as error:
                if outcome.status == "unknown" or (isinstance(error, PerdureError) and not isinstance(error, Invalid)):
                    raise
                # The effect has happened: the call must not be retried because its outcome cannot be recorded.
                self._log(work).error("the result of the tool could not be recorded", exc_info=error)
                message = _UNWRITABLE.format(type(error).__name__)
                outcome, kept = outcomes.failed(message, outcomes.UNKNOWN, "unknown"), None
                continue
            if done.existing:
                return await self._recorded(work, done.existing)
            spans.tool_settled(work.call.call.tool, outcome.status)
            head = done.session.events if outcome.token_hash else None
            return ToolOutcome(call_id=work.call_id, status=outcome.status, token_hash=outcome.token_hash, head=head)

    async def _kept_log(self, work: _Work, staging: Staging) -> Staging | None:
        """The writes that stay when the others cannot be made again."""
        kept = staging.kept_on_failure()
        try:
            await with_retries(kept.rebase)
        except Unavailable:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._log(work).error("the tool's update of its log raised", exc_info=error)
            return None
        return kept

    async def _recorded(self, work: _Work, record: Record) -> ToolOutcome:
        """The outcome of an earlier attempt, with its position: its token may have been replaced since."""
        outcome = _tool_outcome(work.call_id, record)
        if outcome.token_hash is None:
            return outcome
        index = await self._store.index_of(work.at.session_id, action_key(work.at, work.call_id))
        return outcome.model_copy(update={"head": None if index is None else index + 1})

    async def _late_outcome(self, work: _Work, outcome: Outcome, context: ToolContext | None) -> Outcome:
        """The outcome after others have changed the state that the result shows."""
        if context is None or outcome.status != "completed" or work.tool is None or work.tool.late_result is None:
            return outcome
        late = outcomes.completed(await work.tool.late_result(context), self._settings.max_tool_output_bytes)
        return late.model_copy(update={"token_hash": outcome.token_hash})

    def _settlement(self, work: _Work, outcome: Outcome, staging: Staging | None) -> Commit:
        at = work.at
        factory = EventFactory(work.event_at, work.attempt.number)
        writes = staging.writes() if staging else ()
        commit = Commit(
            at.session_id,
            unless=work.outcome_key,
            fence=work.fence(Hold.RELEASE),
            report=work.fence(Hold.RELEASE).report(*outcomes.end_of(outcome)),
            records=(written(*work.outcome_key, OUTCOME, outcome),),
            events=(
                factory.action_result(work.call_id, work.call.call.tool, outcome, at),
                *plan_events(factory, work.call_id, staging),
            ),
            slots=tuple(SlotWrite(write.name, write.value, write.expected) for write in writes),
            route=outcome.token_hash,
            change=SessionChange(tool_calls=1),
        )
        if outcome.status != "completed":
            return commit
        key = names.outcome_key(work.call_id)
        return with_checkpoint(commit, work.agent, work.event_at, key, tool=work.call.call.tool, staging=staging)


async def deadline_of(store: Store, agent: Agent, call: ToolCall, reply: StoredReply) -> float | None:
    """When the turn fails that runs the call, in seconds since the epoch."""
    seconds, at = agent.limits.turn_seconds, call.told_at
    if seconds is None or at is None:
        return reply.deadline
    # The call was approved: it runs in a later turn than the one that asked.
    resumed = await store.record(at.session_id, at.turn, 0, RESUME)
    return None if resumed is None else datetime.fromisoformat(resumed.at).timestamp() + seconds


async def speaker_of(store: Store, at: Coordinates, reply: StoredReply) -> Principal | None:
    """The principal for whom the reply acts. Reading it from the deliveries is slow: they may hold files."""
    if "speaker" in reply.model_fields_set:
        return reply.speaker
    return (await read_journal(store, at.session_id, at.turn)).principal


async def _wait_for_thread(context: ToolContext, limit: float, stopping: Callable[[], bool]) -> None:
    """Wait for a tool in a thread: the call may not be reported as cancelled while the thread still runs."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit):
            while not context.thread_ended.is_set() and not stopping():
                await asyncio.sleep(0.02)


_TOO_LATE = "This call was not executed: the deadline of the turn has passed."
_UNWRITABLE = "The tool has returned, but what it returned or wrote could not be recorded ({})."


class _TimeLimitExceeded(Exception):
    """The tool's own time limit has passed; a `TimeoutError` that the tool raised is another error."""


def _is_from_other_attempt(intent: Record | None, attempt: Attempt) -> bool:
    """Whether the intent is that of another attempt."""
    return intent is not None and read(intent, INTENT, Intent).generation != attempt.generation


def _refusal(work: _Work) -> Outcome | None:
    """The outcome if the call must not run. A call that needed an approval runs only as approved."""
    if work.requested.ask:
        if refused := approval_problem(work.request, work.arguments):
            return refused
    elif work.tool and work.tool.approval_policy.approval == "always":
        # The approval was declared after the model had requested the call.
        message = "This tool needs an approval by now, and nobody was asked; it was not executed."
        return outcomes.failed(message, outcomes.APPROVAL_UNAVAILABLE, "rejected")
    return None if work.tool else outcomes.failed(f"The tool {work.call.call.tool!r} no longer exists.")


def idempotency_key(at: Coordinates, call_id: str) -> str:
    """A key that is the same for every attempt at one call, and different for every other call."""
    place = f"{at.session_id}/{at.turn}/{at.step}/{call_id}"
    return hashlib.sha256(b"perdure/call/" + place.encode()).hexdigest()[:32]


def _called_in(record: Record, call_id: str) -> RequestedCall:
    """The call that a program has made in this stage."""
    for call in read(record, STAGE, StoredStage).calls:
        if call.call_id == call_id:
            return call
    raise UnreadableState(f"The records of this step do not ask for the call {call_id!r}.")


def _tool_outcome(call_id: str, record: Record) -> ToolOutcome:
    outcome = read(record, OUTCOME, Outcome)
    return ToolOutcome(call_id=call_id, status=outcome.status, token_hash=outcome.token_hash)
