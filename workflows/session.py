"""The driver: one long-lived workflow per session."""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any, TypeAlias, cast

from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError, WorkflowAlreadyStartedError

from perdure.errors import PerdureError, UnreadableState
from perdure.protocol import names
from perdure.protocol.actions import DispatchCodeModeRuntimeActions, DispatchRuntimeActions, Done, Park
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Attention, CloseSession, Failure, RebuildSession, TurnRequest, TurnResult
from perdure.protocol.wire import JsonObject
from perdure.session import children, decisions, queue
from perdure.session.state import (
    OPERATOR_CANCELLED,
    OPERATOR_FAILED,
    REMEMBERED_DELIVERIES,
    SESSION_DEADLINE,
    SESSION_IDLE,
    WAS_UNREADABLE,
    Rebuild,
    SessionState,
    can_be_kept,
    load_session,
    read_repair,
    read_turn_number,
)
from perdure.session.turn import ContinueAsNew

from . import family, inbox, versions
from .outcomes import conclude, execute_until_success, failure_of_error, failure_of_turn
from .turn import InlineTurn

TurnHandle: TypeAlias = "workflow.ChildWorkflowHandle[Any, TurnResult] | InlineTurn"

#: A driver continues as new once its history has this many events, about fifteen turns, and nothing has come for some
#: seconds; at the latest with twice as many. So the cost of a replay does not grow with the age of the session.
_LONG_RUN = 200

_QUIET = 5.0
_UNREADABLE_PAUSE = timedelta(minutes=1)

#: How long the driver waits for a turn to stop when an operator ends its session.
_STOP_TIMEOUT = timedelta(seconds=30)


@workflow.defn(name=names.SESSION_WORKFLOW)
class SessionWorkflow:
    """Reads deliveries in order and runs a turn for them; in between it waits without using any compute."""

    @workflow.init
    def __init__(self, data: JsonObject) -> None:
        # Signals may be handled before `run` starts, so the state must be loaded here; and nothing here may raise.
        self._data = data
        self._unreadable: UnreadableState | None = None
        try:
            self._state = load_session(data, versions.reads, versions.reads_version)
        except UnreadableState as unreadable:
            self._unreadable = unreadable
            self._state = SessionState(session_id=workflow.info().workflow_id, agent="", token_hash="")
        # Signals that arrived while the state was unreadable; they are carried over to a build that can read it.
        self._unread_signals: list[Any] = []
        self._retry_read = False
        self._in_turn = False
        # The driver waits for work; all that it began has ended and is in the state.
        self._idle = False
        # Something came for which a driver that waits already may have to wait less long.
        self._must_look_again = False
        # The ids of the deliveries of the running turn.
        self._turn_deliveries: list[str] = []
        self._turn_begin: tuple[DeliveryRef, ...] = ()
        self._turn_handle: TurnHandle | None = None
        # The failure with which the session ends, once an operator or its deadline has ended it.
        self._ending: Failure | None = None
        self._turn_ended = False
        self._renews_when_parked = True
        # When to continue as new, unless something comes before.
        self._renews_at: float | None = None
        self._longest = 2 * _LONG_RUN
        # Whether this run heeds the bounds of its session.
        self._bounded = False

    @workflow.signal(name=names.DELIVER)
    def deliver(self, *data: Any) -> None:
        # Any number of arguments: a handler that does not accept them would fail the workflow task for ever.
        if not data:
            # `perdure deploy drain` wakes a parked driver, which then notices that another build is current.
            return
        if self._unreadable is not None:
            self._unread_signals.extend(each for each in data if can_be_kept(each) and each not in self._unread_signals)
        heard = inbox.hear(self._state, data, in_turn=self._in_turn)
        self._state = heard.state.active(workflow.time()) if heard.is_new and self._bounded else heard.state
        self._must_look_again = self._must_look_again or heard.looks_again

    @workflow.signal(name=names.CANCEL)
    def cancel(self, *data: Any) -> None:
        """Cancel the turn that runs or is about to run, or withdraw the open requests. An idle driver does nothing."""
        state = self._state
        if not (self._in_turn or state.open or state.inbox or state.held or state.awaited):
            return
        turn = read_turn_number(data[0] if data else None)
        if decisions.has_ended(state, turn):
            # The signal is late: the turn that it names has ended, and the next one must not be cancelled.
            return
        replaced = queue.is_of_earlier(data[0] if data else None, self._begin_of(turn))
        if replaced and workflow.patched("cancel-names-what-waits"):
            # What was to begin the turn that it names is gone, and a later message has taken its place. Older runs
            # cancelled the turn of that one.
            return
        if self._in_turn and decisions.is_next_turn(state, turn):
            # The signal is early: readers have seen the end of the running turn, and the driver has not yet.
            self._state = state.cancelled("next")
            return
        if not self._in_turn and decisions.starts_after_park(state, turn) and workflow.patched("spare-what-is-parked"):
            # The signal arrived before the answer that begins this turn. The parked turn is not meant; the turn that
            # is meant finds the cancel request in the store. Older runs withdrew the parked turn's requests.
            return
        self._state = state.cancelled("this")
        # The sweeper repeats the signal. Older runs repeated the request to the turn, too.
        repeated = self._in_turn and state.cancel == "this"
        if self._turn_handle is not None and not (repeated and workflow.patched("cancel-turn-once")):
            self._turn_handle.cancel()

    def _begin_of(self, turn: int | None) -> tuple[DeliveryRef, ...]:
        """What has begun the turn that a cancel names, or is to begin it; nothing if the driver does not know that."""
        if self._in_turn and not decisions.is_next_turn(self._state, turn):
            return self._turn_begin
        if self._state.held is not None or self._state.awaited is not None:
            return ()
        return decisions.next_batch(self._state)

    @workflow.signal(name=names.REPAIR)
    def repair(self, *data: Any) -> None:
        """Carry out an operator's order for a session that cannot continue by itself."""
        repair = read_repair(data[0] if data else None)
        if repair is None:
            workflow.logger.warning("A repair of unknown kind was ignored")
            return
        match repair.how:
            case "retry":
                self._state = self._state.due()
                self._retry_read = True
            case "rebuild":
                self._state = self._state.model_copy(update={"rebuild": Rebuild(reason=repair.reason), "held": None})
                self._unreadable = None
            case "fail":
                self._ending = OPERATOR_FAILED

    @workflow.query(name=names.DESCRIBE)
    def describe(self) -> JsonObject:
        state = self._state.model_dump(mode="json", exclude={"snapshot"})
        return {**state, "inTurn": self._turn_deliveries, "idle": self._idle and not self._state.awaits_children}

    @workflow.run
    async def run(self, data: JsonObject) -> None:
        self._heed_bounds()
        if self._state.collecting is None and any(map(queue.is_collected, self._state.inbox)):
            self._state = inbox.collecting(self._state)
        drive = asyncio.create_task(self._drive())
        try:
            await self._until_end(drive)
        except asyncio.CancelledError:
            if workflow.cancellation_reason() is None:
                raise
            self._ending = OPERATOR_CANCELLED
        if self._ending is None:
            await drive
            await family.leave(self._state)
            return
        drive.cancel()
        # A running turn is stopped and recorded before the session ends, unless no worker serves it within the time.
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(drive.done, timeout=_STOP_TIMEOUT)
        close = CloseSession(session_id=self._state.session_id, failure=self._ending)
        await execute_until_success(names.CLOSE_SESSION, close, summary=self._ending.code)
        await family.leave(self._state)
        if self._ending is OPERATOR_CANCELLED:
            raise asyncio.CancelledError

    async def _until_end(self, drive: asyncio.Task[None]) -> None:
        """Wait until the session has ended, or has to end: by an operator, or at its deadline."""

        def ends() -> bool:
            return drive.done() or self._ending is not None

        while not ends():
            if (deadline := self._deadline) is None:
                await workflow.wait_condition(lambda: ends() or self._deadline is not None)
                continue
            try:
                await workflow.wait_condition(ends, timeout=timedelta(seconds=max(0.0, deadline - workflow.time())))
            except TimeoutError:
                self._ending = SESSION_DEADLINE

    @property
    def _deadline(self) -> float | None:
        return self._state.bounds.deadline if self._bounded and self._state.bounds else None

    def _heed_bounds(self) -> None:
        # Runs of builds that did not know bounds have them in their state, too.
        self._bounded = self._state.bounds is not None and workflow.patched("session-bounds")
        if self._bounded and self._state.idle_since is None:
            self._state = self._state.active(workflow.time())

    async def _drive(self) -> None:
        """Make one move after another until the session has ended."""
        if self._data.get(WAS_UNREADABLE) and self._unreadable is None:
            await inbox.attend(self._state.session_id, None)
        while self._ending is None:
            if self._unreadable is not None:
                await self._wait_for_reader(self._unreadable)
                continue
            if await self._make_move(self._next_move()):
                return

    def _next_move(self) -> decisions.Move:
        renew, now = self._renewal_is_due(), workflow.time()
        # Earlier runs let everything wait until they had continued as new.
        if renew and not self._must_renew() and workflow.patched("turns-before-renewal"):
            move = decisions.next_move(self._state, now, bounded=self._bounded)
            if not isinstance(move, decisions.Wait):
                self._renews_at = None
                return move
            # A signal that arrives while it continues as new costs a replay, and messages often follow one another.
            self._renews_at = self._renews_at or now + _QUIET
            if now < self._renews_at:
                return decisions.Wait(min(self._renews_at, move.until or self._renews_at))
        return decisions.next_move(self._state, now, renew=renew, bounded=self._bounded)

    async def _make_move(self, move: decisions.Move) -> bool:
        """Make one move; returns whether the session has ended."""
        match move:
            case decisions.RebuildState(rebuild=rebuild):
                return await self._rebuild_state(rebuild)
            case decisions.Withdraw():
                if self._state.awaited is not None and workflow.patched("children-end-first"):
                    # A control ends the parked turn: the sessions that work for it end first.
                    self._state = self._state.cancelled("this")
                    return False
                await self._withdraw()
                # A cancelled task has no next message.
                return self._state.mode == "task"
            case decisions.Refuse():
                await self._refuse(move)
            case decisions.Remind(request=request):
                await inbox.remind(self._state.session_id, request)
                self._state = self._state.reminded(request)
            case decisions.RunTurn():
                return await self._run_turn(move)
            case decisions.ForgetCancel():
                self._state = self._state.cancelled(None)
            case decisions.EndIdle():
                return await self._end_idle()
            case decisions.Renew():
                versions.continue_as_new(decisions.renewed(self._state, workflow.time()).model_dump(mode="json"))
            case decisions.Wait(until=until):
                await self._wait(until)
            case _:
                done = await family.make_move(self._state, move)
                self._state = done(self._state)
        return False

    async def _wait(self, until: float | None) -> None:
        """Wait until there is another move than to wait."""
        timeout = None if until is None else timedelta(seconds=max(0.0, until - workflow.time()))

        def has_work() -> bool:
            move = decisions.next_move(self._state, workflow.time(), bounded=self._bounded)
            renews = self._must_renew() if self._renews_at else self._renews_when_parked and self._should_renew()
            return not isinstance(move, decisions.Wait) or renews or self._must_look_again

        self._idle, self._must_look_again = True, False
        try:
            with contextlib.suppress(TimeoutError):
                await workflow.wait_condition(has_work, timeout=timeout)
        finally:
            self._idle = False

    # --- turns ----------------------------------------------------------------------------------------------

    async def _run_turn(self, move: decisions.RunTurn) -> bool:
        """Run one turn; returns whether the session has ended."""
        request = decisions.turn_request(self._state, move)
        self._state = self._state.without(*move.deliveries)
        self._turn_deliveries = [each.id for each in request.deliveries]
        self._turn_begin = decisions.heard(request)
        result = await self._result_of(request, move.held or request)
        self._turn_deliveries = []
        if result is None:
            return True
        self._turn_ended = True
        if result.joined and workflow.patched("forget-what-joined"):
            # Older runs began a turn for each of them, which found nothing to read.
            self._state = queue.joined(self._state, result.joined)
        if result.retired and not workflow.patched("tokens-in-between"):
            # Older runs knew the last token only, and refused what came with one before it.
            result = result.model_copy(update={"retired": ()})
        if result.held is not None:
            await self._hold(request, result.held, result)
            return False
        before = self._state.open
        if isinstance(result.action, DispatchRuntimeActions | DispatchCodeModeRuntimeActions) and result.awaited:
            self._state = children.awaiting(self._state, result)
            await self._report_inputs(before)
            return False
        counts_silent = result.silent and not workflow.patched("silent-turns-keep-their-number")
        self._state = self._state.after_turn(result, counts_silent=counts_silent)
        self._state = self._state.active(workflow.time()) if self._bounded else self._state
        await self._report_inputs(before)
        match result.action:
            case Done():
                return True
            case Park():
                return False
            case DispatchRuntimeActions() | DispatchCodeModeRuntimeActions():
                # A turn of a newer build asks for child workflows. The workflow task fails and is retried until
                # a build that supports them takes over; nothing is lost meanwhile.
                raise RuntimeError(f"This driver cannot carry out {result.action.kind}")

    async def _result_of(self, request: TurnRequest, argument: TurnRequest | JsonObject) -> TurnResult | None:
        """The result of the turn; None if an operator has ended the session meanwhile."""
        if self._state.cancel == "this":
            # Cancelled before it began: the child workflow is not started.
            return await conclude(request, decisions.CANCELLED, "cancelled")
        try:
            # A held turn begins as a child workflow: there it may find a newer build.
            # A turn that has waited for its children continues where it began.
            if (argument is request or self._state.tries == 0) and self._is_inline():
                end = await self._run_inline(request)
                if isinstance(end, TurnResult):
                    return end
                # The rest of a long turn gets a history of its own.
                argument = end.request
            return await self._run_child(request, argument)
        except PerdureError as error:
            return await conclude(request, failure_of_error(error))
        except WorkflowAlreadyStartedError:
            failure = Failure(code="TURN_RUNS_ALREADY", message="Another workflow runs this turn.")
            result = TurnResult(snapshot=request.snapshot, action=Park(), failure=failure)
            if isinstance(argument, dict):
                return result.model_copy(update={"held": argument})
            # The inline part of the turn may have set tokens.
            tokens = {"token_hash": argument.token_hash, "retired": argument.retired}
            return result.model_copy(update={"held": argument.model_dump(mode="json"), **tokens})
        except ChildWorkflowError as error:
            if self._ending is not None or workflow.cancellation_reason() is not None:
                return None
            return await conclude(request, failure_of_turn(error))

    def _is_inline(self) -> bool:
        return self._state.turns == "inline" and workflow.patched("inline-turns")

    async def _run_inline(self, request: TurnRequest) -> TurnResult | ContinueAsNew:
        self._in_turn = True
        self._turn_handle = turn = InlineTurn(request, lambda: self._ending is not None)
        try:
            return await turn.end()
        finally:
            self._in_turn = False
            self._turn_handle = None

    async def _run_child(self, request: TurnRequest, argument: TurnRequest | JsonObject) -> TurnResult:
        self._in_turn = True
        try:
            self._turn_handle = await workflow.start_child_workflow(
                names.TURN_WORKFLOW,
                argument,
                id=names.turn_workflow(request.session_id, request.turn),
                task_queue=names.sibling(workflow.info().task_queue, names.TURNS_QUEUE),
                result_type=TurnResult,
                task_timeout=timedelta(seconds=names.TURN_DECISION_SECONDS),
                static_summary=" · ".join(filter(None, (f"turn {request.turn}", request.agent, request.model))),
            )
            if self._state.cancel == "this":
                self._turn_handle.cancel()
            return await self._turn_handle
        finally:
            self._in_turn = False
            self._turn_handle = None

    async def _hold(self, request: TurnRequest, held: JsonObject, result: TurnResult) -> None:
        """Keep a turn that no worker could serve, and set the session's attention."""
        self._state = self._state.holding(held, result.token_hash, workflow.time(), result.retired)
        if result.failure is not None:
            attention = Attention(code=result.failure.code, message=result.failure.message)
            await inbox.attend(self._state.session_id, attention, request.turn)

    async def _report_inputs(self, before: tuple[OpenInput, ...]) -> None:
        if self._state.parent is not None:
            await family.report_inputs(self._state, self._state.parent, before)

    # --- beside turns ---------------------------------------------------------------------------------------

    async def _withdraw(self) -> None:
        """Cancel the parked turn and withdraw its open requests."""
        before = self._state.open
        await inbox.withdraw(self._state)
        self._state = self._state.withdrawn()
        await self._report_inputs(before)

    async def _refuse(self, move: decisions.Refuse) -> None:
        await inbox.refuse(self._state.session_id, move)
        self._state = self._state.without(move.delivery)
        if move.ends_cancel:
            self._state = self._state.cancelled(None)

    async def _end_idle(self) -> bool:
        """End the session, unless a delivery waits in the store whose signal has not arrived yet."""
        close = CloseSession(session_id=self._state.session_id, failure=SESSION_IDLE, if_idle=True)
        result = cast("type[bool | None]", bool | None)
        closed = await execute_until_success(names.CLOSE_SESSION, close, summary=SESSION_IDLE.code, result=result)
        # Older workers return None, and have closed it in any case.
        self._state = self._state.active(workflow.time())
        return closed is not False

    async def _rebuild_state(self, rebuild: Rebuild) -> bool:
        """Derive the state from the store; returns whether the session has ended."""
        argument = RebuildSession(session_id=self._state.session_id, reason=rebuild.reason)
        result = cast("type[JsonObject | None]", JsonObject | None)
        found = await execute_until_success(
            names.REBUILD_SESSION, argument, summary=f"rebuild: {rebuild.reason}", result=result
        )
        if found is None:
            return True
        # An operator may have ended the session meanwhile.
        self._ending = self._ending or rebuild.ends
        try:
            self._state = self._state.rebuilt(load_session(found, versions.reads, versions.reads_version))
        except UnreadableState as unreadable:
            # The activity ran on a newer build than the driver: the state is kept until such a build reads it.
            self._data, self._unreadable = found, unreadable
        self._heed_bounds()
        return False

    # --- renewal --------------------------------------------------------------------------------------------

    def _renewal_is_due(self) -> bool:
        """Whether to continue as new. Only between turns: a running child would be terminated with this run."""
        ended, self._turn_ended = self._turn_ended, False
        if workflow.info().get_current_history_length() >= _LONG_RUN and workflow.patched("shorter-runs"):
            self._longest = _LONG_RUN
        if not self._should_renew():
            return False
        if ended and versions.is_suggested():
            return True
        # Runs that began before this rule continued as new only after a turn, and only when Temporal suggested it.
        self._renews_when_parked = self._renews_when_parked and workflow.patched("renew-when-parked")
        return self._renews_when_parked

    def _must_renew(self) -> bool:
        return versions.is_suggested() or workflow.info().get_current_history_length() >= 2 * _LONG_RUN

    def _should_renew(self) -> bool:
        return versions.is_suggested() or workflow.info().get_current_history_length() >= self._longest

    async def _wait_for_reader(self, unreadable: UnreadableState) -> None:
        """Keep a state that this build cannot read, and the signals that arrive, until another build can read it."""
        attention = Attention(code=unreadable.code, message=unreadable.message)
        await inbox.attend(self._state.session_id, attention)
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self._unreadable is None or self._retry_read, timeout=_UNREADABLE_PAUSE
            )
        if self._unreadable is not None and self._ending is None:
            queued = self._data.get("inbox")
            known = cast("list[Any]", queued) if isinstance(queued, list) else []
            more = [each for each in self._unread_signals if each not in known]
            # All deliveries are in the store as well; those dropped here are signalled again.
            versions.continue_as_new(
                {**self._data, "inbox": [*known, *more][:REMEMBERED_DELIVERIES], WAS_UNREADABLE: True}
            )
