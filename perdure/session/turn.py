"""One turn: the deliveries it consumes and all the steps that they trigger.

`run_turn` is plain code over the `Steps` protocol: the turn workflow implements it with activities, a test directly.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from perdure.errors import PerdureError, UnreadableState
from perdure.protocol.actions import DispatchCodeModeRuntimeActions, DispatchRuntimeActions, Park
from perdure.protocol.deliveries import AWAITED
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import (
    Awaited,
    CallRef,
    Calls,
    Concluded,
    Conclusion,
    Coordinates,
    Delegated,
    Failure,
    Finished,
    ModelCall,
    ModelOutcome,
    NothingToRead,
    Parked,
    ParkTurn,
    ProgramOutcome,
    Programs,
    Resumed,
    ResumeTurn,
    Snapshot,
    ToolCall,
    ToolOutcome,
    TurnRequest,
    TurnResult,
)
from perdure.protocol.wire import Wire

from . import decisions
from .state import TurnState, dump_turn, is_unknown, load_turn

T = TypeVar("T")


class StepFailed(PerdureError):
    """A step has failed for good, and no event of that was emitted yet.

    `held`: no worker could serve the session. The turn can continue unchanged once one can.
    """

    # The failure was already reduced to codes and ids when it passed through Temporal.
    plain = True

    def __init__(self, failure: Failure, *, held: bool = False) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.held = held


class Steps(Protocol):
    """The work of a turn.

    Each method raises `StepFailed` when all attempts have failed, and `asyncio.CancelledError` when it was cancelled or
    found a cancel request for the turn.
    """

    async def call_model(self, call: ModelCall, *, label: str | None) -> ModelOutcome:
        """`label` names the model in Temporal's UI; the call does not depend on it."""
        ...

    async def call_tool(self, call: ToolCall) -> ToolOutcome: ...

    async def run_program(self, call: ToolCall) -> ProgramOutcome: ...

    async def resume(self, resumption: ResumeTurn) -> Resumed: ...
    async def park(self, park: ParkTurn) -> None: ...
    async def conclude(self, conclusion: Conclusion) -> Concluded | None: ...

    def parallel(self, limit: int | None, calls: int) -> int:
        """How many of these calls run at the same time; `limit` is that of their step, if it has one."""
        ...

    def should_continue_as_new(self) -> bool:
        """Whether the turn should continue as new before its next step."""
        ...

    def cancelled(self, *, early: bool = False) -> bool:
        """Whether the turn is to be cancelled. Work may still have succeeded at the same moment.

        `early`: the calls of the step have not begun yet.
        """
        ...

    def ends_after_children(self) -> bool:
        """Whether a cancelled turn ends after the sessions that work for it, and not before."""
        ...


class ContinueAsNew(Wire):
    """The turn continues as new with this request."""

    request: TurnRequest


@dataclass(frozen=True)
class _Waiting:
    """What the programs of a step wait for, after all that could be done without people and other sessions."""

    at: Coordinates
    open: tuple[OpenInput, ...] = ()
    keys: tuple[str, ...] = ()
    deadline: float | None = None


async def run_turn(request: TurnRequest, steps: Steps) -> TurnResult | ContinueAsNew:
    try:
        state = load_turn(request.snapshot)
        if any(map(is_unknown, request.deliveries)):
            raise UnreadableState("This build cannot read a delivery of this kind.")
    except UnreadableState as unreadable:
        return await _unreadable(request, steps, unreadable)
    return await _Turn(request, steps, state).run()


async def _unreadable(request: TurnRequest, steps: Steps, unreadable: UnreadableState) -> TurnResult:
    """Fail or hold the turn, and return its snapshot unchanged: another build may be able to read it."""
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
    concluded = await steps.conclude(decisions.conclusion(request, request.step, failure)) or Concluded()
    ended = {
        "action": Park() if concluded.open else decisions.action_after_conclusion(request.mode, failure, concluded),
        "token_hash": concluded.token_hash or request.token_hash,
        "head": concluded.head or request.head,
        "open": concluded.open,
        "silent": concluded.silent,
    }
    return result.model_copy(update=ended)


class _Turn:
    def __init__(self, request: TurnRequest, steps: Steps, state: TurnState) -> None:
        # The calls of an earlier turn for whose results this one waits before it calls the model.
        self._awaited = tuple(each for each in request.deliveries if each.kind == AWAITED)
        self._request = request.model_copy(update={"deliveries": decisions.heard(request)})
        self._steps = steps
        self._state = state
        self._step = request.step
        self._token_hash = request.token_hash
        # How many events the session had when the token was set; and the tokens that it has replaced.
        self._token_head = 0
        self._retired = request.retired
        self._model = request.model
        self._head = request.head
        self._turns: str | None = None
        self._joined = request.joined
        self._concluded = Concluded()

    async def run(self) -> TurnResult | ContinueAsNew:
        try:
            try:
                if decisions.resumes(self._request) and (ended := await self._resume()):
                    return ended
                if self._awaited:
                    return self._handed_over(tuple(each.id for each in self._awaited))
                return await self._run_steps()
            except StepFailed as failed:
                if failed.held and self._request.holds:
                    raise
                await self._conclude(decisions.conclusion(self._request, self._step, failed.failure))
                return self._result(failed.failure)
            except asyncio.CancelledError:
                if self._awaited and self._steps.ends_after_children():
                    return self._stopping_result()
                # All activities of the turn have ended by now, so the cancellation may be recorded.
                end = decisions.conclusion(self._request, self._step, decisions.CANCELLED, "cancelled")
                await self._conclude(end)
                return self._result(decisions.CANCELLED, cancelled=True)
        except StepFailed as failed:
            if not (failed.held and self._request.holds):
                raise
            return self._held_result(failed.failure)

    async def _conclude(self, conclusion: Conclusion) -> None:
        concluded = await self._steps.conclude(conclusion)
        if concluded is not None:
            # A tool may have set a new token although its result has never reached the turn.
            self._set_token(concluded.token_hash or self._token_hash)
            self._head = max(concluded.head or 0, self._head or 0)
            self._concluded = concluded

    async def _resume(self) -> TurnResult | ContinueAsNew | None:
        """Process the answers. Returns a result if the turn ends, parks or waits here."""
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
        await self._run_calls(
            [self._tool_call(approved.at, approved.call) for approved in resumed.calls], resumed.parallel
        )
        waiting = _Waiting(self._at)
        if resumed.programs:
            found = await self._run_programs(
                [self._tool_call(program.at, program.call) for program in resumed.programs], resumed.parallel
            )
            if found is None:
                return ContinueAsNew(request=self._request_from_here())
            waiting = found
        open = _merged(resumed.open, waiting.open)
        programs = (waiting.at,) if resumed.programs else ()
        parked = await self._park(open, silent=resumed.silent, programs=programs) if open else None
        return self._waiting_result(waiting, self._request_from_here(), parked) if waiting.keys else parked

    async def _run_steps(self) -> TurnResult | ContinueAsNew:
        while True:
            outcome = await self._steps.call_model(self._model_call(), label=self._model)
            if isinstance(outcome, NothingToRead):
                self._concluded = Concluded(over=True) if outcome.over else self._concluded
                return self._result(None, silent=not outcome.over)
            before, self._state = self._state, self._state.after_step(outcome.usage)
            self._model = outcome.model or self._model
            self._head = outcome.head or self._head
            self._turns = outcome.turns or self._turns
            self._joined = (*self._joined, *outcome.joined)
            match outcome:
                case Finished(failure=failure):
                    return self._result(failure)
                case Parked(open=open):
                    return self._result(None, open=self._shown(open))
                case Calls(calls=calls, parallel=parallel, open=open):
                    await self._run_calls([self._tool_call(self._at, call) for call in calls], parallel)
                    if open:
                        return await self._park(open)
                case Delegated(calls=calls, parallel=parallel, open=open, keys=keys, deadline=deadline):
                    await self._run_calls([self._tool_call(self._at, call) for call in calls], parallel)
                    parked = await self._park(open) if open else None
                    asked = self._at
                    self._step += 1
                    return self._handed_over(keys, asked, deadline, parked)
                case Programs():
                    if ended := await self._run_step_of_programs(outcome, dump_turn(before)):
                        return ended
            self._step += 1
            if self._steps.should_continue_as_new():
                return ContinueAsNew(request=self._remaining_request())

    async def _run_step_of_programs(self, step: Programs, before: Snapshot) -> TurnResult | ContinueAsNew | None:
        """Run the calls and programs of a step; `before`: the snapshot before it. None: the turn has its next step."""
        parallel = step.parallel
        await self._run_calls([self._tool_call(self._at, call) for call in step.calls], parallel)
        waiting = await self._run_programs([self._tool_call(self._at, each) for each in step.programs], parallel)
        # The recorded reply leads the turn back to here, and counts again.
        here = self._remaining_request().model_copy(update={"snapshot": before, "deliveries": ()})
        if waiting is None:
            return ContinueAsNew(request=here)
        open = _merged(step.open, waiting.open)
        parked = await self._park(open, programs=(self._at,)) if open else None
        return self._waiting_result(waiting, here, parked) if waiting.keys else parked

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

    async def _run_calls(self, calls: Sequence[ToolCall], limit: int | None) -> None:
        """Run the calls concurrently, up to the limit, and wait for all that have begun.

        No call begins after another one has failed for good, or after a cancellation.
        """

        async def run(call: ToolCall) -> None:
            self._take_token(await self._steps.call_tool(call))

        await self._run_each(calls, limit, run)

    async def _run_programs(self, programs: Sequence[ToolCall], limit: int | None) -> _Waiting | None:
        """Run the programs and their calls, until all of them have ended or wait for people or other sessions.

        None: the turn should continue as new before it goes on.
        """
        running = list(programs)
        waiting = _Waiting(programs[0].at)
        while running:
            outcomes = await self._run_each(running, limit, self._steps.run_program)
            calls = [
                self._tool_call(program.at, call)
                for program, outcome in zip(running, outcomes, strict=True)
                for call in outcome.calls
            ]
            if calls:
                await self._run_calls(calls, next((each.parallel for each in outcomes if each.parallel), None))
            # A program goes on once all that it waits for has a result.
            stopped = [each for each in outcomes if each.open or each.keys]
            waiting = _Waiting(
                waiting.at,
                _merged(waiting.open, *(each.open for each in stopped)),
                (*waiting.keys, *(key for each in stopped for key in each.keys)),
                min((each.deadline for each in stopped if each.deadline is not None), default=waiting.deadline),
            )
            running = [
                program
                for program, outcome in zip(running, outcomes, strict=True)
                if not (outcome.ended or outcome.open or outcome.keys)
            ]
            if running and self._steps.should_continue_as_new():
                return None
        return waiting

    async def _run_each(
        self, calls: Sequence[ToolCall], limit: int | None, run: Callable[[ToolCall], Awaitable[T]]
    ) -> list[T]:
        if self._steps.cancelled(early=True):
            raise asyncio.CancelledError
        waiting = deque(enumerate(calls))
        outcomes: dict[int, T] = {}
        failures: list[BaseException] = []

        async def run_next_calls() -> None:
            while waiting:
                number, call = waiting.popleft()
                try:
                    outcomes[number] = await run(call)
                except (Exception, asyncio.CancelledError) as failure:
                    failures.append(failure)
                if failures or self._steps.cancelled():
                    return

        parallel = min(len(calls), self._steps.parallel(limit, len(calls)))
        await asyncio.gather(*(run_next_calls() for _ in range(parallel)))
        if failures:
            raise failures[0]
        if self._steps.cancelled():
            raise asyncio.CancelledError
        return [outcomes[number] for number in range(len(calls))]

    def _take_token(self, outcome: ToolOutcome) -> None:
        """Take over the session's new token, unless another call has set a later one. Older workers send no `head`."""
        if outcome.token_hash is None:
            return
        if outcome.head is not None and outcome.head < self._token_head:
            self._retired = (*self._retired, outcome.token_hash)
            return
        self._set_token(outcome.token_hash)
        self._token_head = outcome.head or 0

    def _set_token(self, token_hash: str | None) -> None:
        """Set the session's token. Deliveries that were accepted with the previous one may still arrive."""
        if self._token_hash is not None and self._token_hash != token_hash:
            self._retired = (*self._retired, self._token_hash)
        self._token_hash = token_hash

    async def _park(
        self, open: tuple[OpenInput, ...], *, silent: bool = False, programs: tuple[Coordinates, ...] = ()
    ) -> TurnResult:
        request, shown = self._request, self._shown(open)
        park = ParkTurn(at=self._at, agent=request.agent, mode=request.mode, open=shown, programs=programs)
        await self._steps.park(park)
        return self._result(None, open=shown, silent=silent)

    def _shown(self, open: Sequence[OpenInput]) -> tuple[OpenInput, ...]:
        """The requests with the place where each was shown first: here, unless it was open before the turn."""
        before = {each.request_id: each.first_shown for each in self._request.open}
        return tuple(
            each.model_copy(update={"first_shown": before.get(each.request_id, self._at.place)}) for each in open
        )

    def _handed_over(
        self,
        keys: tuple[str, ...],
        at: Coordinates | None = None,
        deadline: float | None = None,
        parked: TurnResult | None = None,
    ) -> TurnResult:
        """The result of a turn that waits for other sessions, and for people if it has parked."""
        request = None if parked else self._continuation().model_dump(mode="json")
        awaited = Awaited(at=at or self._at, keys=keys, request=request, deadline=None if parked else deadline)
        action = DispatchRuntimeActions(pending_action_keys=keys)
        return (parked or self._result(None)).model_copy(update={"action": action, "awaited": awaited})

    def _waiting_result(self, waiting: _Waiting, here: TurnRequest, parked: TurnResult | None) -> TurnResult:
        """As `_handed_over`, for programs: the turn continues with them."""
        again = {"head": self._head, "token_hash": None, "retired": ()}
        request = None if parked else here.model_copy(update=again).model_dump(mode="json")
        deadline = None if parked else waiting.deadline
        awaited = Awaited(at=waiting.at, keys=waiting.keys, request=request, deadline=deadline)
        action = DispatchCodeModeRuntimeActions(pending_action_keys=waiting.keys)
        return (parked or self._result(None)).model_copy(update={"action": action, "awaited": awaited})

    def _stopping_result(self) -> TurnResult:
        """The result of a cancelled turn: the driver stops the sessions that work for it, and ends it after them."""
        waiting = _Waiting(self._at, keys=tuple(each.id for each in self._awaited))
        return self._waiting_result(waiting, self._request_from_here(), None).model_copy(update={"cancelled": True})

    def _request_from_here(self) -> TurnRequest:
        """The request with which the turn processes its answers again: all that was done is recorded."""
        again = {**self._carried_fields(), "deliveries": (*self._request.deliveries, *self._awaited)}
        return self._request.model_copy(update=again)

    def _continuation(self) -> TurnRequest:
        """The request with which the turn continues: what it has consumed is in its records."""
        remaining = self._remaining_request()
        # A turn that waits first, and has no answers to process, has consumed nothing yet.
        unread = self._request.deliveries if self._step == 0 and not decisions.resumes(self._request) else ()
        again = {"deliveries": unread, "head": self._head, "token_hash": None, "retired": ()}
        return remaining.model_copy(update=again)

    def _held_result(self, failure: Failure) -> TurnResult:
        """The result of a turn that no worker can serve now: it carries the request to continue from here."""
        # Before the end of the first step, answers may still have to be processed: they stay in the request.
        remaining = (
            self._remaining_request() if self._step > 0 else self._request.model_copy(update=self._carried_fields())
        )
        again = {"head": self._head, "deliveries": (*remaining.deliveries, *self._awaited)}
        return TurnResult(
            snapshot=remaining.snapshot,
            action=Park(),
            token_hash=self._token_hash,
            retired=self._retired,
            failure=failure,
            model=self._model,
            held=remaining.model_copy(update=again).model_dump(mode="json"),
            head=self._head,
        )

    def _remaining_request(self) -> TurnRequest:
        done: dict[str, object] = {"expired": (), "open": (), "step": self._step}
        return self._request.model_copy(update={**done, **self._carried_fields()})

    def _carried_fields(self) -> dict[str, object]:
        tokens = {"token_hash": self._token_hash, "retired": self._retired}
        return {"snapshot": dump_turn(self._state), "model": self._model, "joined": self._joined, **tokens}

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
        # A turn without events does not end its session, not even a task.
        waits = open or silent
        return TurnResult(
            snapshot=dump_turn(state),
            action=Park() if waits else decisions.action_after_conclusion(self._request.mode, failure, self._concluded),
            token_hash=self._token_hash,
            retired=self._retired,
            failure=failure,
            open=open,
            cancelled=cancelled,
            silent=silent or self._concluded.silent,
            model=self._model,
            head=self._head,
            turns=self._turns,
            joined=self._joined,
        )


def _merged(*several: Sequence[OpenInput]) -> tuple[OpenInput, ...]:
    """All requests, each once."""
    return tuple({each.request_id: each for some in several for each in some}.values())
