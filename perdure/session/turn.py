"""One turn: the deliveries it hears and all the steps that they trigger.

`run_turn` is plain code over a `Steps` port. The turn workflow drives it with activities; a test, or a host that
prefers throughput to rolling turn code forward, drives it directly.
"""

import asyncio
from typing import Protocol

from perdure.errors import PerdureError, Structural
from perdure.protocol.requests import (
    CallRef,
    Calls,
    Conclusion,
    Coordinates,
    Failure,
    Finished,
    ModelCall,
    ModelOutcome,
    Snapshot,
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

    async def call_model(self, call: ModelCall) -> ModelOutcome: ...

    async def call_tool(self, call: ToolCall) -> ToolOutcome: ...

    async def conclude(self, conclusion: Conclusion) -> None: ...

    def out_of_breath(self) -> bool:
        """Whether the turn should go on in a fresh run before it takes the next step."""
        ...


class Breath(Wire):
    """The turn goes on in a fresh run, with this request."""

    request: TurnRequest


async def run_turn(request: TurnRequest, steps: Steps) -> TurnResult | Breath:
    try:
        turn = _Turn(request, steps, load_turn(request.snapshot))
    except Structural as unreadable:
        failure = Failure(code=unreadable.code, message=unreadable.message, structural=True)
        await steps.conclude(_conclusion(request, request.step, failure))
        # What cannot be read is handed back untouched: newer code may still read it.
        return _result(request, request.snapshot, failure, request.token_hash)
    return await turn.run()


class _Turn:
    def __init__(self, request: TurnRequest, steps: Steps, state: TurnState) -> None:
        self._request = request
        self._steps = steps
        self._state = state
        self._step = request.step
        self._token_hash = request.token_hash

    async def run(self) -> TurnResult | Breath:
        try:
            while True:
                outcome = await self._steps.call_model(self._model_call())
                match outcome:
                    case Unheard():
                        return self._result(None)
                    case Finished(usage=usage, failure=failure):
                        self._state = self._state.after_step(usage)
                        return self._result(failure)
                    case Calls(calls=calls, usage=usage):
                        self._state = self._state.after_step(usage)
                        await self._call(calls)
                self._step += 1
                if self._steps.out_of_breath():
                    return Breath(request=self._rest())
        except StepFailed as failed:
            await self._steps.conclude(_conclusion(self._request, self._step, failed.failure))
            return self._result(failed.failure)

    def _model_call(self) -> ModelCall:
        request = self._request
        return ModelCall(
            at=Coordinates(session_id=request.session_id, turn=request.turn, step=self._step),
            agent=request.agent,
            mode=request.mode,
            capabilities=request.capabilities,
            deliveries=request.deliveries if self._step == 0 else (),
            traceparent=request.traceparent,
        )

    async def _call(self, calls: tuple[CallRef, ...]) -> None:
        """Run the calls of one step side by side; all of them end before the next step begins."""
        at = Coordinates(session_id=self._request.session_id, turn=self._request.turn, step=self._step)
        ended = await asyncio.gather(
            *(
                self._steps.call_tool(
                    ToolCall(at=at, agent=self._request.agent, call=call, traceparent=self._request.traceparent)
                )
                for call in calls
            ),
            return_exceptions=True,
        )
        failures = [end for end in ended if isinstance(end, BaseException)]
        if failures:
            raise failures[0]
        for end in ended:
            if isinstance(end, ToolOutcome) and end.token_hash is not None:
                self._token_hash = end.token_hash

    def _rest(self) -> TurnRequest:
        return self._request.model_copy(
            update={"step": self._step, "snapshot": dump_turn(self._state), "token_hash": self._token_hash}
        )

    def _result(self, failure: Failure | None) -> TurnResult:
        state = self._state.after_failure() if failure else self._state
        return _result(self._request, dump_turn(state), failure, self._token_hash)


def _result(request: TurnRequest, snapshot: Snapshot, failure: Failure | None, token_hash: str | None) -> TurnResult:
    return TurnResult(
        snapshot=snapshot,
        action=decisions.after_turn(request.mode, failure),
        token_hash=token_hash,
        failure=failure,
    )


def _conclusion(request: TurnRequest, step: int, failure: Failure) -> Conclusion:
    return Conclusion(
        at=Coordinates(session_id=request.session_id, turn=request.turn, step=step),
        mode=request.mode,
        failure=failure,
        deliveries=request.deliveries,
    )
