"""One turn: the deliveries it hears and all the steps that they trigger.

`run_turn` is plain code over a `Steps` port. The turn workflow drives it with activities; a test, or a host that
prefers throughput to rolling turn code forward, drives it directly.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

from perdure.errors import PerdureError, UnreadableState
from perdure.protocol.actions import Park
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import (
    CallRef,
    Calls,
    Concluded,
    Conclusion,
    Coordinates,
    Failure,
    Finished,
    ModelCall,
    ModelOutcome,
    Parked,
    ParkTurn,
    Resumed,
    ResumeTurn,
    ToolCall,
    ToolOutcome,
    TurnRequest,
    TurnResult,
    Unheard,
)
from perdure.protocol.wire import Wire

from . import decisions
from .state import TurnState, dump_turn, load_turn


class StepFailed(PerdureError):
    """A step could not be done, and nobody has told the readers yet.

    `held`: no worker could serve the session. The turn can go on as it is once one can.
    """

    # Its failure came through Temporal.
    plain = True

    def __init__(self, failure: Failure, *, held: bool = False) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.held = held


class Steps(Protocol):
    """The work of a turn.

    Each method raises `StepFailed` when all its attempts are spent, and `asyncio.CancelledError` when it was stopped,
    or found that somebody wants the turn stopped.
    """

    async def call_model(self, call: ModelCall, *, label: str | None) -> ModelOutcome:
        """`label` names the model for people who watch; the call itself does not depend on it."""
        ...

    async def call_tool(self, call: ToolCall) -> ToolOutcome: ...

    async def resume(self, resumption: ResumeTurn) -> Resumed: ...

    async def park(self, park: ParkTurn) -> None: ...

    async def conclude(self, conclusion: Conclusion) -> Concluded | None: ...

    def parallel(self, limit: int | None, calls: int) -> int:
        """How many of these calls run at the same time; `limit` is what their step says, if it says anything."""
        ...

    def should_continue_as_new(self) -> bool:
        """Whether the turn should go on in a fresh run before it takes the next step."""
        ...

    def cancelled(self, *, early: bool = False) -> bool:
        """Whether somebody has asked to stop: work that was just ending may have ended well all the same.

        `early`: before the calls of a step begin.
        """
        ...


class ContinueAsNew(Wire):
    """The turn goes on in a fresh run, with this request."""

    request: TurnRequest


async def run_turn(request: TurnRequest, steps: Steps) -> TurnResult | ContinueAsNew:
    try:
        state = load_turn(request.snapshot)
    except UnreadableState as unreadable:
        return await _unreadable(request, steps, unreadable)
    return await _Turn(request, steps, state).run()


async def _unreadable(request: TurnRequest, steps: Steps, unreadable: UnreadableState) -> TurnResult:
    """What cannot be read is handed back untouched: other code may still read it."""
    failure = Failure(code=unreadable.code, message=unreadable.message)
    result = TurnResult(
        snapshot=request.snapshot,
        action=Park(),
        failure=failure,
        token_hash=request.token_hash,
        retired=request.retired,
        head=request.head,
    )
    if request.holds:
        return result.model_copy(update={"held": request.model_dump(mode="json")})
    concluded = await steps.conclude(conclusion(request, request.step, failure)) or Concluded()
    ended = {
        "action": Park() if concluded.open else decisions.after_conclusion(request.mode, failure, concluded),
        "token_hash": concluded.token_hash or request.token_hash,
        "head": concluded.head or request.head,
        "open": concluded.open,
        "silent": concluded.silent,
    }
    return result.model_copy(update=ended)


class _Turn:
    def __init__(self, request: TurnRequest, steps: Steps, state: TurnState) -> None:
        self._request = request
        self._steps = steps
        self._state = state
        self._step = request.step
        self._token_hash = request.token_hash
        # When that was recorded, as far as calls have said, and the tokens that it has replaced.
        self._token_head = 0
        self._retired = request.retired
        self._model = request.model
        self._head = request.head
        self._concluded = Concluded()

    async def run(self) -> TurnResult | ContinueAsNew:
        try:
            try:
                if decisions.resumes(self._request) and (parked := await self._resume()):
                    return parked
                return await self._go_on()
            except StepFailed as failed:
                if failed.held and self._request.holds:
                    raise
                await self._conclude(conclusion(self._request, self._step, failed.failure))
                return self._result(failed.failure)
            except asyncio.CancelledError:
                # Everything that ran has stopped by now; only then is it said.
                await self._conclude(_cancellation(self._request, self._step))
                return self._result(CANCELLED, cancelled=True)
        except StepFailed as failed:
            if not (failed.held and self._request.holds):
                raise
            return self._held(failed.failure)

    async def _conclude(self, conclusion: Conclusion) -> None:
        concluded = await self._steps.conclude(conclusion)
        if concluded is not None:
            # A tool may have changed the token although the turn never heard of it.
            self._own(concluded.token_hash or self._token_hash)
            self._head = max(concluded.head or 0, self._head or 0)
            self._concluded = concluded

    async def _resume(self) -> TurnResult | None:
        """Carry out what people decided. A result means that the turn ends here."""
        request = self._request
        resumed = await self._steps.resume(
            ResumeTurn(
                at=self._at,
                agent=request.agent,
                mode=request.mode,
                capabilities=request.capabilities,
                deliveries=request.deliveries,
                expired=request.expired,
                open=request.open,
                head=self._head,
            )
        )
        if resumed.failure:
            return self._result(resumed.failure)
        await self._call([self._tool_call(approved.at, approved.call) for approved in resumed.calls], resumed.parallel)
        return await self._park(resumed.open, silent=resumed.silent) if resumed.open else None

    async def _go_on(self) -> TurnResult | ContinueAsNew:
        while True:
            outcome = await self._steps.call_model(self._model_call(), label=self._model)
            if isinstance(outcome, Unheard):
                return self._result(None, silent=True)
            self._state = self._state.after_step(outcome.usage)
            self._model = outcome.model or self._model
            self._head = outcome.head or self._head
            match outcome:
                case Finished(failure=failure):
                    return self._result(failure)
                case Parked(open=open):
                    return self._result(None, open=open)
                case Calls(calls=calls, parallel=parallel, open=open):
                    await self._call([self._tool_call(self._at, call) for call in calls], parallel)
                    if open:
                        return await self._park(open)
            self._step += 1
            if self._steps.should_continue_as_new():
                return ContinueAsNew(request=self._rest())

    @property
    def _at(self) -> Coordinates:
        return Coordinates(session_id=self._request.session_id, turn=self._request.turn, step=self._step)

    def _model_call(self) -> ModelCall:
        request = self._request
        return ModelCall(
            at=self._at,
            agent=request.agent,
            mode=request.mode,
            capabilities=request.capabilities,
            deliveries=request.deliveries if self._step == 0 else (),
            head=self._head,
        )

    def _tool_call(self, at: Coordinates, call: CallRef) -> ToolCall:
        return ToolCall(at=at, told_at=self._at if at != self._at else None, agent=self._request.agent, call=call)

    async def _call(self, calls: Sequence[ToolCall], limit: int | None) -> None:
        """Run calls side by side, some at a time; all that begin end, and every outcome is read, before it goes on.

        None begins after another one has failed for good, or after a cancellation.
        """
        if self._steps.cancelled(early=True):
            raise asyncio.CancelledError
        waiting = deque(calls)
        failures: list[BaseException] = []

        async def run_some() -> None:
            while waiting:
                try:
                    outcome = await self._steps.call_tool(waiting.popleft())
                except (Exception, asyncio.CancelledError) as failure:
                    failures.append(failure)
                else:
                    self._rekey(outcome)
                if failures or self._steps.cancelled():
                    return

        parallel = min(len(calls), self._steps.parallel(limit, len(calls)))
        await asyncio.gather(*(run_some() for _ in range(parallel)))
        if failures:
            raise failures[0]
        if self._steps.cancelled():
            raise asyncio.CancelledError

    def _rekey(self, outcome: ToolOutcome) -> None:
        """Take over the session's new token, unless another call has set a later one. Older workers do not say when."""
        if outcome.token_hash is None:
            return
        if outcome.head is not None and outcome.head < self._token_head:
            self._retired = (*self._retired, outcome.token_hash)
            return
        self._own(outcome.token_hash)
        self._token_head = outcome.head or 0

    def _own(self, token_hash: str | None) -> None:
        """The session owns this token now. What was accepted with the one before may still be on its way."""
        if self._token_hash is not None and self._token_hash != token_hash:
            self._retired = (*self._retired, self._token_hash)
        self._token_hash = token_hash

    async def _park(self, open: tuple[OpenInput, ...], *, silent: bool = False) -> TurnResult:
        request = self._request
        await self._steps.park(ParkTurn(at=self._at, agent=request.agent, mode=request.mode, open=open))
        return self._result(None, open=open, silent=silent)

    def _held(self, failure: Failure) -> TurnResult:
        """The turn cannot go on now; it goes on from here once some worker can serve it."""
        # Before the first step has ended, the people's answers may still have to be looked at.
        rest = self._rest() if self._step > 0 else self._request.model_copy(update=self._kept())
        return TurnResult(
            snapshot=rest.snapshot,
            action=Park(),
            token_hash=self._token_hash,
            retired=self._retired,
            failure=failure,
            model=self._model,
            held=rest.model_copy(update={"head": self._head}).model_dump(mode="json"),
            head=self._head,
        )

    def _rest(self) -> TurnRequest:
        done: dict[str, object] = {"expired": (), "open": (), "step": self._step}
        return self._request.model_copy(update={**done, **self._kept()})

    def _kept(self) -> dict[str, object]:
        tokens = {"token_hash": self._token_hash, "retired": self._retired}
        return {"snapshot": dump_turn(self._state), "model": self._model, **tokens}

    def _result(
        self,
        failure: Failure | None,
        *,
        open: tuple[OpenInput, ...] = (),
        cancelled: bool = False,
        silent: bool = False,
    ) -> TurnResult:
        state = self._state.after_failure() if failure and not cancelled else self._state
        open = open or self._concluded.open
        # A turn that told nothing has ended nothing: a task neither.
        waits = open or silent
        return TurnResult(
            snapshot=dump_turn(state),
            action=Park() if waits else decisions.after_conclusion(self._request.mode, failure, self._concluded),
            token_hash=self._token_hash,
            retired=self._retired,
            failure=failure,
            open=open,
            cancelled=cancelled,
            silent=silent or self._concluded.silent,
            model=self._model,
            head=self._head,
        )


CANCELLED = Failure(code="TURN_CANCELLED", message="The turn was cancelled.")


def conclusion(
    request: TurnRequest, step: int, failure: Failure, kind: Literal["failed", "cancelled"] = "failed"
) -> Conclusion:
    """The end of a turn that no step could tell, as it is to be told."""
    return Conclusion(
        kind=kind,
        at=Coordinates(session_id=request.session_id, turn=request.turn, step=step),
        mode=request.mode,
        failure=failure,
        deliveries=request.deliveries,
    )


def _cancellation(request: TurnRequest, step: int) -> Conclusion:
    return conclusion(request, step, CANCELLED, "cancelled")
