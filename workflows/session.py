"""The driver: one long-lived workflow per session."""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeVar, cast

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ChildWorkflowError,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)

from perdure.errors import UnreadableState
from perdure.protocol import names
from perdure.protocol.actions import DispatchCodeModeRuntimeActions, DispatchRuntimeActions, Done, Park
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import (
    AttendSession,
    Attention,
    CloseSession,
    Coordinates,
    Failure,
    RebuildSession,
    Refusal,
    Reminder,
    TurnRequest,
    TurnResult,
    Withdrawal,
)
from perdure.protocol.wire import JsonObject
from perdure.session import decisions
from perdure.session.decisions import ForgetCancel, Move, Refuse, Remind, Renew, Restore, RunTurn, Wait, Withdraw
from perdure.session.state import (
    OPERATOR_CANCELLED,
    OPERATOR_FAILED,
    REMEMBERED_DELIVERIES,
    Rebuild,
    SessionState,
    can_be_kept,
    load_session,
    read_delivery,
    read_repair,
    read_turn,
)
from perdure.session.turn import CANCELLED, conclusion

from . import failures
from .steps import CONCLUDED, NOTHING, execute_until_done

T = TypeVar("T")

TurnHandle: TypeAlias = "workflow.ChildWorkflowHandle[Any, TurnResult]"

#: A driver continues as new once its run has this many events, about thirty turns: waking an old session then costs
#: what waking a young one does.
_LONG_RUN = 400

_UNREADABLE_PAUSE = timedelta(minutes=1)
_RETRY_PAUSE = timedelta(seconds=10)

#: How long a turn may take to stop when an operator ends its session.
_STOP_PATIENCE = timedelta(seconds=30)

#: Set in the state of a session that a build could not read: the one that can takes the attention back.
_WAS_UNREADABLE = "wasUnreadable"


@workflow.defn(name=names.SESSION_WORKFLOW)
class SessionWorkflow:
    """Reads deliveries in order, runs a turn for each, and waits in between at no cost."""

    @workflow.init
    def __init__(self, data: JsonObject) -> None:
        # Signals may come before `run` starts, so the state must be there first; and nothing here may raise.
        self._data = data
        self._unreadable: UnreadableState | None = None
        try:
            self._state = load_session(data)
        except UnreadableState as unreadable:
            self._unreadable = unreadable
            self._state = SessionState(session_id=workflow.info().workflow_id, agent="", token_hash="")
        # What came in while the state could not be read, for whoever can read it.
        self._unread: list[Any] = []
        self._reads_again = False
        self._in_turn = False
        # Nothing is to be done: what was begun has ended, and what it came to is in the state.
        self._idle = False
        # The ids of what the turn reads that runs.
        self._turn_reads: list[str] = []
        self._turn_handle: TurnHandle | None = None
        # What the session ends with, because an operator has ended it.
        self._ending: Failure | None = None
        self._turn_ended = False
        self._renews_when_parked = True

    @workflow.signal(name=names.DELIVER)
    def deliver(self, *data: Any) -> None:
        # However many: a handler that is called with the wrong number of arguments fails the task, for ever.
        if self._unreadable is not None:
            self._unread.extend(each for each in data if can_be_kept(each) and each not in self._unread)
        delivery = read_delivery(data[0]) if len(data) == 1 else None
        if delivery is None:
            # Either it is no delivery, or a newer build has accepted it: then it waits in the store, and is told again
            # until a driver has it that can read it.
            workflow.logger.warning("A signal of unknown shape was ignored")
            return
        # Builds of old queued signals as they came, and a run that one of them has begun must do so again.
        in_order = not self._state.is_overtaken(delivery) or workflow.patched("inbox-in-order")
        heard = self._state.hears(delivery, in_order=in_order)
        is_news = heard is not self._state
        # Runs of old tried a held turn again at each signal, and must do so again when they are replayed.
        if is_news or (heard.held is not None and not workflow.patched("only-news-makes-due")):
            heard = heard.due()
        self._state = heard

    @workflow.signal(name=names.CANCEL)
    def cancel(self, *data: Any) -> None:
        """Stop the turn that runs or is about to run, or withdraw what it waits for. Idle: nothing to do."""
        state = self._state
        if not (self._in_turn or state.open or state.inbox or state.held):
            return
        turn = read_turn(data[0] if data else None)
        if decisions.is_over(state, turn):
            # The signal was late: the turn that it meant has ended, and the next one is none of its business.
            return
        if self._in_turn and decisions.is_to_come(state, turn):
            # Or early: readers know that this turn has ended, and only we have not noticed yet.
            self._state = state.cancelled("next")
            return
        if not self._in_turn and decisions.comes_after_park(state, turn) and workflow.patched("spare-what-is-parked"):
            # It has overtaken the answer that begins this turn. The parked turn is not meant, and the one that is finds
            # the wish in the store. Older runs withdrew what was parked.
            return
        self._state = state.cancelled("this")
        if self._turn_handle is not None:
            self._turn_handle.cancel()

    @workflow.signal(name=names.REPAIR)
    def repair(self, *data: Any) -> None:
        """An operator looks after a session that cannot go on by itself."""
        repair = read_repair(data[0] if data else None)
        if repair is None:
            workflow.logger.warning("A repair of unknown kind was ignored")
            return
        match repair.how:
            case "retry":
                self._state = self._state.due()
                self._reads_again = True
            case "rebuild":
                self._state = self._state.model_copy(update={"rebuild": Rebuild(reason=repair.reason), "held": None})
                self._unreadable = None
            case "fail":
                self._ending = OPERATOR_FAILED

    @workflow.query(name=names.DESCRIBE)
    def describe(self) -> JsonObject:
        state = self._state.model_dump(mode="json", exclude={"snapshot"})
        return {**state, "inTurn": self._turn_reads, "idle": self._idle}

    @workflow.run
    async def run(self, data: JsonObject) -> None:
        drive = asyncio.create_task(self._drive())
        try:
            await workflow.wait_condition(lambda: drive.done() or self._ending is not None)
        except asyncio.CancelledError:
            if workflow.cancellation_reason() is None:
                raise
            self._ending = OPERATOR_CANCELLED
        if self._ending is None:
            await drive
            return
        drive.cancel()
        # A turn that runs is stopped, and says so, before the session ends; but perhaps it has no worker any more.
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(drive.done, timeout=_STOP_PATIENCE)
        close = CloseSession(session_id=self._state.session_id, failure=self._ending)
        await self._execute(names.CLOSE_SESSION, close, summary=self._ending.code)
        if self._ending is OPERATOR_CANCELLED:
            raise asyncio.CancelledError

    async def _drive(self) -> None:
        """Make one move after another until the session is over."""
        if self._data.get(_WAS_UNREADABLE) and self._unreadable is None:
            await self._attend(None)
        while self._ending is None:
            if self._unreadable is not None:
                await self._wait_for_reader(self._unreadable)
                continue
            move = decisions.next_move(self._state, workflow.time(), renew=self._renewal_is_due())
            if await self._make(move):
                return

    async def _make(self, move: Move) -> bool:
        """Make one move; whether the session is over."""
        match move:
            case Restore(rebuild=rebuild):
                return await self._restore(rebuild)
            case Withdraw():
                await self._withdraw()
                # A task that was stopped has no next message.
                return self._state.mode == "task"
            case Refuse(delivery=delivery):
                await self._refuse(delivery)
            case Remind(request=request):
                await self._remind(request)
            case RunTurn():
                return await self._run_turn(move)
            case ForgetCancel():
                self._state = self._state.cancelled(None)
            case Renew():
                _continue_as_new(self._state.model_dump(mode="json"))
            case Wait(until=until):
                await self._wait(until)
        return False

    async def _wait(self, until: float | None) -> None:
        """Wait until the next move is another one than to wait."""
        patience = None if until is None else timedelta(seconds=max(0.0, until - workflow.time()))

        def news() -> bool:
            move = decisions.next_move(self._state, workflow.time())
            return not isinstance(move, Wait) or (self._renews_when_parked and _should_renew())

        self._idle = True
        try:
            with contextlib.suppress(TimeoutError):
                await workflow.wait_condition(news, timeout=patience)
        finally:
            self._idle = False

    # --- turns ----------------------------------------------------------------------------------------------

    async def _run_turn(self, move: RunTurn) -> bool:
        """Run one turn; whether the session is over."""
        request = decisions.turn_request(self._state, move)
        self._state = self._state.without(*move.deliveries)
        self._turn_reads = [each.id for each in request.deliveries]
        result = await self._result_of(request, move.held or request)
        self._turn_reads = []
        if result is None:
            return True
        self._turn_ended = True
        if result.held is not None:
            await self._hold(request, result.held, result)
            return False
        counts_silent = result.silent and not workflow.patched("silent-turns-keep-their-number")
        self._state = self._state.after_turn(result, counts_silent=counts_silent)
        match result.action:
            case Done():
                return True
            case Park():
                return False
            case DispatchRuntimeActions() | DispatchCodeModeRuntimeActions():
                # A turn that is newer than this driver asks for children. The task fails, and is tried again
                # until a driver that knows how takes over: nothing is lost meanwhile.
                raise RuntimeError(f"This driver cannot carry out {result.action.kind}")

    async def _result_of(self, request: TurnRequest, order: TurnRequest | JsonObject) -> TurnResult | None:
        """What the turn came to; None when an operator has ended the session meanwhile."""
        if self._state.cancel == "this":
            # Stopped before it began: it does not begin, not even for a moment.
            return await self._conclude(request, CANCELLED, "cancelled")
        try:
            return await self._run_child(request, order)
        except WorkflowAlreadyStartedError:
            failure = Failure(code="TURN_RUNS_ALREADY", message="Another workflow runs this turn.")
            held = order if isinstance(order, dict) else order.model_dump(mode="json")
            return TurnResult(snapshot=request.snapshot, action=Park(), failure=failure, held=held)
        except ChildWorkflowError as error:
            if self._ending is not None or workflow.cancellation_reason() is not None:
                return None
            return await self._conclude(request, failures.of_turn(error))

    async def _run_child(self, request: TurnRequest, order: TurnRequest | JsonObject) -> TurnResult:
        self._in_turn = True
        try:
            self._turn_handle = await workflow.start_child_workflow(
                names.TURN_WORKFLOW,
                order,
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

    async def _conclude(
        self, request: TurnRequest, failure: Failure, kind: Literal["failed", "cancelled"] = "failed"
    ) -> TurnResult:
        end = conclusion(request, request.step, failure, kind)
        concluded = await self._execute(names.CONCLUDE_TURN, end, summary=f"{kind}: {failure.code}", result=CONCLUDED)
        open = concluded.open if concluded else ()
        return TurnResult(
            snapshot=request.snapshot,
            action=Park() if open else decisions.after_conclusion(request.mode, failure, concluded),
            open=open,
            token_hash=concluded.token_hash if concluded else None,
            head=concluded.head if concluded else None,
            failure=failure,
            cancelled=kind == "cancelled",
            silent=bool(concluded and concluded.silent),
        )

    async def _hold(self, request: TurnRequest, held: JsonObject, result: TurnResult) -> None:
        """The turn could not go on: say so, and keep it for another worker or an operator."""
        self._state = self._state.holding(held, result.token_hash, workflow.time(), result.retired)
        if result.failure is not None:
            attention = Attention(code=result.failure.code, message=result.failure.message)
            await self._attend(attention, request.turn)

    # --- beside turns ---------------------------------------------------------------------------------------

    async def _withdraw(self) -> None:
        """The turn that waits is cancelled: nobody needs to answer any more."""
        state = self._state
        parked = Coordinates(session_id=state.session_id, turn=max(0, state.turn - 1))
        withdrawal = Withdrawal(at=parked, mode=state.mode, open=state.open)
        await self._execute(names.WITHDRAW_INPUTS, withdrawal, summary=f"withdraw: {len(state.open)} open")
        self._state = self._state.withdrawn()

    async def _remind(self, request: OpenInput) -> None:
        left = len(request.remind_at) - 1
        reminder = Reminder(session_id=self._state.session_id, request_id=request.request_id, left=left)
        await self._execute(names.REMIND, reminder, summary="remind")
        self._state = self._state.reminded(request)

    async def _refuse(self, delivery: DeliveryRef) -> None:
        """Answer what came with a token that is no longer the session's: with an event, never with silence."""
        refusal = Refusal(
            session_id=self._state.session_id,
            delivery_id=delivery.id,
            code="session_not_active",
            message="The continuation token was replaced before this delivery was read.",
        )
        await self._execute(names.REFUSE_DELIVERY, refusal, summary="stale delivery")
        self._state = self._state.without(delivery)

    async def _attend(self, attention: Attention | None, turn: int | None = None) -> None:
        attend = AttendSession(session_id=self._state.session_id, attention=attention, turn=turn)
        what = f"needs attention: {attention.code}" if attention else "recovered"
        await self._execute(names.ATTEND_SESSION, attend, summary=what)

    async def _restore(self, rebuild: Rebuild) -> bool:
        """Derive the state from the store: it is what Temporal has lost. Whether the session is over."""
        order = RebuildSession(session_id=self._state.session_id, reason=rebuild.reason)
        result = cast("type[JsonObject | None]", JsonObject | None)
        found = await self._execute(names.REBUILD_SESSION, order, summary=f"rebuild: {rebuild.reason}", result=result)
        if found is None:
            return True
        # An operator may have decided meanwhile.
        self._ending = self._ending or rebuild.ends
        try:
            self._state = self._state.rebuilt(load_session(found))
        except UnreadableState as unreadable:
            # Derived by a newer build than this one: it is kept for that.
            self._data, self._unreadable = found, unreadable
        return False

    async def _execute(self, name: str, argument: Any, *, summary: str, result: type[T] = NOTHING) -> T:
        """Say something that must be said in the end. Also a worker that calls it impossible is only one of many."""
        while True:
            try:
                return await execute_until_done(name, argument, summary=summary, result=result)
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise asyncio.CancelledError from error
                await workflow.sleep(_RETRY_PAUSE)

    # --- renewal --------------------------------------------------------------------------------------------

    def _renewal_is_due(self) -> bool:
        """Whether to go on in a fresh run. Only between turns: a running child would be terminated with this run."""
        ended, self._turn_ended = self._turn_ended, False
        if not _should_renew():
            return False
        if ended and _is_suggested():
            return True
        # Runs that began before this rule existed renewed only after a turn, and only when Temporal suggested it.
        self._renews_when_parked = self._renews_when_parked and workflow.patched("renew-when-parked")
        return self._renews_when_parked

    async def _wait_for_reader(self, unreadable: UnreadableState) -> None:
        """Keep a state that this build cannot read, with all that comes in, until another build can."""
        await self._attend(Attention(code=unreadable.code, message=unreadable.message))
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self._unreadable is None or self._reads_again, timeout=_UNREADABLE_PAUSE
            )
        if self._unreadable is not None and self._ending is None:
            inbox = self._data.get("inbox")
            known = cast("list[Any]", inbox) if isinstance(inbox, list) else []
            more = [each for each in self._unread if each not in known]
            # More wait in the store: they are told again to whoever can read them.
            _continue_as_new({**self._data, "inbox": [*known, *more][:REMEMBERED_DELIVERIES], _WAS_UNREADABLE: True})


def _is_suggested() -> bool:
    info = workflow.info()
    return info.is_continue_as_new_suggested() or info.is_target_worker_deployment_version_changed()


def _should_renew() -> bool:
    return _is_suggested() or workflow.info().get_current_history_length() >= _LONG_RUN


def _continue_as_new(data: JsonObject) -> None:
    if workflow.info().is_target_worker_deployment_version_changed():
        # A parked driver moves to the current build.
        behavior = workflow.ContinueAsNewVersioningBehavior.AUTO_UPGRADE
        workflow.continue_as_new(data, initial_versioning_behavior=behavior)
    workflow.continue_as_new(data)
