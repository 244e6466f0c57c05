"""One turn: the deliveries it hears and all the steps that they trigger.

`run_turn` is plain code over a `Steps` port. The turn workflow drives it with activities; a test, or a host that
prefers throughput to rolling turn code forward, drives it directly.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal, Protocol

from perdure.errors import PerdureError, Structural
from perdure.protocol.actions import Park
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import (
    CallRef,
    Calls,
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
    """A step could not be done, and nobody has told the readers yet."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Steps(Protocol):
    """The work of a turn. Each method raises `StepFailed` when all its attempts are spent."""

    async def call_model(self, call: ModelCall, *, label: str | None) -> ModelOutcome:
        """`label` names the model for people who watch; the call itself does not depend on it."""
        ...

    async def call_tool(self, call: ToolCall) -> ToolOutcome: ...

    async def resume(self, resumption: ResumeTurn) -> Resumed: ...

    async def park(self, park: ParkTurn) -> None: ...

    async def conclude(self, conclusion: Conclusion) -> None: ...

    def out_of_breath(self) -> bool:
        """Whether the turn should go on in a fresh run before it takes the next step."""
        ...

    def cancelled(self) -> bool:
        """Whether somebody has asked to stop: work that was just ending may have ended well all the same."""
        ...


class Breath(Wire):
    """The turn goes on in a fresh run, with this request."""

    request: TurnRequest


async def run_turn(request: TurnRequest, steps: Steps) -> TurnResult | Breath:
    try:
        turn = _Turn(request, steps, load_turn(request.snapshot))
    except Structural as unreadable:
        failure = Failure(code=unreadable.code, message=unreadable.message, structural=True)
        await steps.conclude(conclusion(request, request.step, failure))
        # What cannot be read is handed back untouched: newer code may still read it.
        return TurnResult(
            snapshot=request.snapshot, action=decisions.after_turn(request.mode, failure), failure=failure
        )
    return await turn.run()


class _Turn:
    def __init__(self, request: TurnRequest, steps: Steps, state: TurnState) -> None:
        self._request = request
        self._steps = steps
        self._state = state
        self._step = request.step
        self._token_hash = request.token_hash
        self._model = request.model

    async def run(self) -> TurnResult | Breath:
        try:
            if decisions.resumes(self._request) and (parked := await self._resume()):
                return parked
            return await self._go_on()
        except StepFailed as failed:
            await self._steps.conclude(conclusion(self._request, self._step, failed.failure))
            return self._result(failed.failure)
        except asyncio.CancelledError:
            # Everything that ran has stopped by now; only then is it said.
            await self._steps.conclude(_cancellation(self._request, self._step))
            return self._result(CANCELLED, cancelled=True)

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
            )
        )
        if resumed.failure:
            return self._result(resumed.failure)
        await self._call([self._tool_call(approved.at, approved.call) for approved in resumed.calls])
        self._stop_if_cancelled()
        return await self._park(resumed.open, silent=resumed.silent) if resumed.open else None

    async def _go_on(self) -> TurnResult | Breath:
        while True:
            outcome = await self._steps.call_model(self._model_call(), label=self._model)
            if isinstance(outcome, Unheard):
                return self._result(None, silent=True)
            self._state = self._state.after_step(outcome.usage)
            self._model = outcome.model or self._model
            match outcome:
                case Finished(failure=failure):
                    return self._result(failure)
                case Parked(open=open):
                    return self._result(None, open=open)
                case Calls(calls=calls, open=open):
                    await self._call([self._tool_call(self._at, call) for call in calls])
                    self._stop_if_cancelled()
                    if open:
                        return await self._park(open)
            self._step += 1
            if self._steps.out_of_breath():
                return Breath(request=self._rest())

    def _stop_if_cancelled(self) -> None:
        if self._steps.cancelled():
            raise asyncio.CancelledError

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
        )

    def _tool_call(self, at: Coordinates, call: CallRef) -> ToolCall:
        return ToolCall(at=at, told_at=self._at if at != self._at else None, agent=self._request.agent, call=call)

    async def _call(self, calls: Sequence[ToolCall]) -> None:
        """Run calls side by side; all of them end before anything else happens."""
        ended = await asyncio.gather(*(self._steps.call_tool(call) for call in calls), return_exceptions=True)
        for end in ended:
            match end:
                case BaseException():
                    raise end
                case ToolOutcome(token_hash=str(token_hash)):
                    self._token_hash = token_hash
                case ToolOutcome():
                    pass

    async def _park(self, open: tuple[OpenInput, ...], *, silent: bool = False) -> TurnResult:
        request = self._request
        await self._steps.park(ParkTurn(at=self._at, agent=request.agent, mode=request.mode, open=open))
        return self._result(None, open=open, silent=silent)

    def _rest(self) -> TurnRequest:
        done: dict[str, object] = {"expired": (), "open": (), "step": self._step}
        kept = {"snapshot": dump_turn(self._state), "token_hash": self._token_hash, "model": self._model}
        return self._request.model_copy(update={**done, **kept})

    def _result(
        self,
        failure: Failure | None,
        *,
        open: tuple[OpenInput, ...] = (),
        cancelled: bool = False,
        silent: bool = False,
    ) -> TurnResult:
        state = self._state.after_failure() if failure and not cancelled else self._state
        mode = self._request.mode
        return TurnResult(
            snapshot=dump_turn(state),
            action=decisions.after_turn(mode, failure) if not open else Park(),
            token_hash=self._token_hash,
            failure=failure,
            open=open,
            cancelled=cancelled,
            silent=silent,
            model=self._model,
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
