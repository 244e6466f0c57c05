"""One attempt at the function of a run: each of its calls is looked up, or done under intent and outcome.

The function is stopped by cancelling its task, which no `except Exception` catches. Calls that it makes while it is
being stopped never return.
"""

import asyncio
import contextlib
import contextvars
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from perdure.agents.run import Level, Question
from perdure.agents.tool import Effects
from perdure.bounds import shortened, whole
from perdure.errors import InvalidDeclaration, RunDiverged, RunStepFailed, StepOutcomeUnknown, Superseded, TurnCancelled
from perdure.faults import reach
from perdure.harness.journal import RUN_BEGUN, RUN_SETTLED, written
from perdure.harness.tools.approvals import Clock
from perdure.protocol import names
from perdure.protocol.deliveries import QueueMode
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.wire import JsonObject
from perdure.store.base import Store, commit_with_retries
from perdure.store.values import Attempt, Commit, Committed, Consumption, Fence, Hold, InputChanges, NewRecord

from .outcomes import LONGEST_TEXT, Ended, Escaped, Parked, Wait, as_json, called, failed, guarded, step_event, text_of
from .records import Begun, Calls, Kind, Place, Settled

log = logging.getLogger("perdure.runs")

#: So many rounds of the event loop let the function react to the end of a call before it sees the next one.
_ROUNDS = 16
#: Seconds in which the function must ask for what is recorded, once it waits for something else.
_PATIENCE = 5.0
#: After so many seconds it stops between two calls: its activity and the longest step together have a day.
_LONGEST_ATTEMPT = 11 * 3600.0
#: How often the function is asked to stop, and how many seconds it has each time.
_REQUESTS = 3
_STOP_SECONDS = 5.0


#: The position of the step whose code this is.
_step: ContextVar[int | None] = ContextVar("step", default=None)


@dataclass(frozen=True)
class Done:
    """The end of a call, and what its commit does beside recording it."""

    settled: Settled
    events: Sequence[NewEvent] = ()
    hears: Sequence[str] = ()


#: The work of a call, and how the calls are done that wait.
Work: TypeAlias = Callable[[Place], Awaitable[Done | Wait]]


class Waits(Protocol):
    """How calls are done that wait; the body knows steps only."""

    async def sleep(self, body: "Body", place: Place, seconds: float) -> Done | Wait: ...

    async def prompt(
        self, body: "Body", place: Place, agent: str, message: str, session: str | None, schema: JsonObject | None
    ) -> Done | Wait: ...

    async def dispatch(
        self,
        body: "Body",
        place: Place,
        agent: str,
        to: str,
        input: Any,
        dispatch_id: str | None,
        lane: str,
        queue_mode: QueueMode | None,
    ) -> Done | Wait: ...

    async def ask(self, body: "Body", place: Place, question: Question) -> Done | Wait: ...


class Leave(Exception):
    """The attempt stops between two calls; another one goes on at once."""


class Body:
    """The calls of one attempt. The function gets it as the `RunContext`'s work."""

    def __init__(
        self, store: Store, run_id: str, attempt: Attempt, calls: Calls, waits: Waits, *, clock: Clock = time.time
    ) -> None:
        self.run_id = run_id
        self.clock = clock
        self.attempt = attempt
        self._store = store
        self._calls = calls
        self._ways = waits
        self._position = 0
        # How many events were logged: by each step, and outside of steps.
        self._logged = Counter[int | None]()
        self._unsaid: list[NewEvent] = []
        self._waits: dict[int, Wait] = {}
        self._busy = 0
        self._works: set[asyncio.Task[None]] = set()
        # The order of the last call that has ended.
        self._last = max((each.order for each in calls.settled.values()), default=-1)
        self._asked: dict[int, tuple[asyncio.Future[Settled], Settled]] = {}
        self._ended: asyncio.Queue[tuple[asyncio.Future[Settled], Settled]] = asyncio.Queue()
        self._replayed = not calls.settled
        self._delivering = False
        self._waiting: list[asyncio.Future[None]] = []
        self._committing = asyncio.Lock()
        # Why the function is stopped: an error, or None if it waits.
        self._stop: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    # --- what the function calls ------------------------------------------------------------------------------

    def step(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], effects: Effects, timeout: float
    ) -> Awaitable[Any]:
        return self._call("step", name, lambda place: self._do(place, function, arguments, effects, timeout))

    def sleep(self, seconds: float) -> Awaitable[None]:
        return self._call("sleep", "", lambda place: self._ways.sleep(self, place, seconds))

    def prompt(self, agent: str, message: str, session: str | None, output_schema: JsonObject | None) -> Awaitable[Any]:
        return self._call(
            "prompt", agent, lambda place: self._ways.prompt(self, place, agent, message, session, output_schema)
        )

    def dispatch(
        self, agent: str, to: str, input: Any, dispatch_id: str | None, lane: str, queue_mode: QueueMode | None
    ) -> Awaitable[Any]:
        return self._call(
            "dispatch",
            agent,
            lambda place: self._ways.dispatch(self, place, agent, to, input, dispatch_id, lane, queue_mode),
        )

    def ask(self, question: Question) -> Awaitable[str]:
        return self._call("ask", "", lambda place: self._ways.ask(self, place, question))

    def log(self, level: Level, message: str, attributes: JsonObject) -> None:
        # Written with the next commit. In a later attempt the event is there already; a step that is over logs no more,
        # so its events are counted apart.
        step = _step.get()
        place = "" if step is None else f"{step}/"
        data: JsonObject = {"level": level, "message": shortened(whole(message), LONGEST_TEXT)}
        if attributes:
            data["attributes"] = as_json(attributes)
        key = names.session_key(f"run/log/{place}{self._logged[step]}")
        self._unsaid.append(NewEvent(type=EventType.RUN_LOG, key=key, data=data))
        self._logged[step] += 1

    # --- the attempt ------------------------------------------------------------------------------------------

    async def run(
        self, function: Callable[[], Awaitable[Any]], leaving: Callable[[], Awaitable[object]]
    ) -> Ended | Parked:
        """Run the function until it ends, or waits for something that is not over; raises what stops it.

        It stops with `Leave` once `leaving` returns: the worker stops, and would interrupt a step in the middle.
        """
        task = asyncio.create_task(guarded(function))
        helpers = [asyncio.create_task(each) for each in (self._deliver(), self._watch(), self._leave(leaving))]
        try:
            await asyncio.wait((task, self._stop, *helpers), return_when=asyncio.FIRST_COMPLETED)
            for helper in helpers:
                if helper.done():
                    helper.result()
            if not self._stop.done():
                return await self._end_of(task)
            reason = self._stop.result()
            # What has begun ends: a step in the middle of its effect would be interrupted for nothing.
            while self._busy and not isinstance(reason, TurnCancelled | Superseded):
                await self._change()
            if reason is not None:
                raise reason
            return Parked(tuple(self._waits[each] for each in sorted(self._waits)), tuple(sorted(self._waits)))
        finally:
            self._close()
            await self._stopped(task, "the function")
            for each in (*helpers, *self._works):
                each.cancel()
            await asyncio.gather(*helpers, *self._works, return_exceptions=True)

    async def _end_of(self, task: "asyncio.Task[Any]") -> Ended:
        if any(each.order not in self._asked for each in self._calls.settled.values()):
            raise RunDiverged("The function has ended before it has made all calls that it has recorded.")
        try:
            return Ended(task.result())
        except asyncio.CancelledError:
            return Ended(error=RuntimeError("CancelledError: the function has cancelled itself."))
        except Escaped as escaped:
            return Ended(error=escaped.error)
        except Exception as error:
            return Ended(error=error)

    async def _stopped(self, task: "asyncio.Task[Any]", what: str) -> None:
        for _ in range(_REQUESTS):
            if task.done():
                break
            task.cancel()
            await asyncio.wait((task,), timeout=_STOP_SECONDS)
        if not task.done():
            log.error("%s of run %s does not stop; it is left alone, and can write nothing", what, self.run_id)
        elif not task.cancelled():
            # What it raises while it is stopped says nothing.
            task.exception()

    def _close(self) -> None:
        if not self._stop.done():
            self._stop.set_result(None)

    def stop(self, reason: BaseException | None) -> None:
        """Stop the function; the first reason counts."""
        if not self._stop.done():
            self._stop.set_result(reason)

    # --- calls ------------------------------------------------------------------------------------------------

    def _call(self, kind: Kind, name: str, work: Work) -> Awaitable[Any]:
        # Here, not when it is awaited: so the calls of `asyncio.gather` have the order in which they are written.
        if _step.get() is not None:
            raise InvalidDeclaration("A step cannot make calls of the run: once it is over, nobody makes them.")
        place = Place(self._position, kind, name)
        self._position += 1
        known = self._calls.labels.get(place.position)
        if known is not None and known != place.label:
            log.warning("run %s diverged at its call %d", self.run_id, place.position)
            now, then = place.label.rstrip("/"), known.rstrip("/")
            self.stop(RunDiverged(f"Call {place.position} of the function is {now} now; the run has recorded {then}."))
        return self._result(place, work)

    async def _result(self, place: Place, work: Work) -> Any:
        future: asyncio.Future[Settled] = asyncio.get_running_loop().create_future()
        if not self._stop.done():
            settled = self._calls.settled.get(place.position)
            if settled is not None:
                self._asked[settled.order] = (future, settled)
                self._notify()
            else:
                self._busy += 1
                self._notify()
                self._start(self._work(place, work, future))
        settled = await future
        match settled.status:
            case "completed":
                return settled.value
            case "failed":
                error = settled.error or {}
                raise RunStepFailed(place.name or place.kind, str(error.get("name", "")), str(error.get("message", "")))
            case "unknown":
                raise StepOutcomeUnknown(place.name)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)

    async def _work(self, place: Place, work: Work, future: "asyncio.Future[Settled]") -> None:
        try:
            done = await work(place)
            if isinstance(done, Wait):
                self._waits[place.position] = done
                return
            self._ended.put_nowait((future, await self._settle(place, done)))
        except Exception as error:
            self.stop(error)
        finally:
            self._busy -= 1
            self._notify()

    async def _settle(self, place: Place, done: Done) -> Settled:
        async with self._committing:
            settled = done.settled.model_copy(update={"order": self._last + 1})
            reach("run_before_settle")
            await self.commit(
                place,
                settled=settled,
                events=(*done.events, step_event(place, settled)),
                hears=done.hears,
            )
            reach("run_after_settle")
            self._last += 1
        return settled

    async def commit(
        self,
        place: Place | None = None,
        *,
        begun: Begun | None = None,
        settled: Settled | None = None,
        events: Sequence[NewEvent] = (),
        hears: Sequence[str] = (),
        inputs: InputChanges | None = None,
        **more: Any,
    ) -> Committed:
        """Commit for this attempt, with what the function has logged; `Superseded` when a newer attempt runs."""
        said, self._unsaid = self._unsaid, []
        records: list[NewRecord] = []
        if place is not None and begun is not None:
            records.append(written(0, place.position, place.begun_key, RUN_BEGUN, begun))
            # No effect begins after a cancel.
            more["unless_cancelled"] = 0
        if place is not None and settled is not None:
            records.append(written(0, place.position, place.label, RUN_SETTLED, settled))
            more["recovers"] = True
        commit = Commit(
            self.run_id,
            fence=self.fence,
            records=records,
            events=(*said, *events),
            consume=Consumption(0, list(hears)) if hears else None,
            inputs=inputs or InputChanges(),
            **more,
        )
        return await commit_with_retries(self._store, commit)

    @property
    def fence(self) -> Fence:
        return Fence(0, 0, names.BODY_SCOPE, self.attempt, Hold.KEEP)

    @property
    def has_begun(self) -> bool:
        """Whether an earlier attempt has recorded anything."""
        return bool(self._calls.labels)

    def begun(self, place: Place) -> Begun | None:
        return self._calls.begun.get(place.position)

    def begin(self, kind: Kind, **about: Any) -> Begun:
        return Begun(
            kind=kind, attempt=self.attempt.number, generation=self.attempt.generation, at=self.clock(), **about
        )

    # --- steps ------------------------------------------------------------------------------------------------

    async def _do(
        self, place: Place, function: Callable[..., Any], arguments: tuple[Any, ...], effects: Effects, seconds: float
    ) -> Done:
        if self.begun(place) is not None and effects == "at_most_once":
            # An earlier attempt has begun it, and has left no outcome.
            return Done(
                Settled(status="unknown", error={"name": "StepOutcomeUnknown", "message": "It was interrupted."})
            )
        reach("run_before_intent")
        await self.commit(place, begun=self.begin("step"))
        reach("run_after_intent")
        settled = await self._outcome(place, function, arguments, seconds)
        reach("run_after_effect")
        return Done(settled)

    async def _outcome(
        self, place: Place, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float
    ) -> Settled:
        # A task of its own: it may swallow what stops it, or cancel itself, and this call has to end all the same.
        context = contextvars.copy_context()
        context.run(_step.set, place.position)
        task = asyncio.create_task(guarded(lambda: called(function, arguments, place.name)), context=context)
        try:
            await asyncio.wait((task,), timeout=seconds)
            if not task.done():
                return failed("TimeoutError", f"The step did not end within {seconds:g} seconds.")
            return Settled(status="completed", value=as_json(task.result()))
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return failed("CancelledError", "The step has cancelled itself.")
        except Escaped as escaped:
            return self._raised(place, escaped.error)
        except Exception as error:
            return self._raised(place, error)
        finally:
            await self._stopped(task, f"call {place.position}")

    def _raised(self, place: Place, error: BaseException) -> Settled:
        log.error("call %d of run %s raised", place.position, self.run_id, exc_info=error)
        return failed(type(error).__name__, text_of(error))

    # --- the order of the ends --------------------------------------------------------------------------------

    async def _deliver(self) -> None:
        """Let the function see the ends of its calls one after the other, in the order in which they were recorded.

        Branches that run side by side then make their next calls in the same order as in earlier attempts.
        """
        for order in sorted(each.order for each in self._calls.settled.values()):
            while order not in self._asked:
                await self._change()
            await self._show(*self._asked[order])
        self._replayed = True
        self._notify()
        while True:
            future, settled = await self._ended.get()
            self._delivering = True
            await self._show(future, settled)
            self._delivering = False
            self._notify()

    async def _show(self, future: "asyncio.Future[Settled]", settled: Settled) -> None:
        if not future.done():
            future.set_result(settled)
        await _rounds()

    async def _watch(self) -> None:
        """Stop the function when nothing is left to do but to wait."""
        while True:
            if not self._waits or self._busy or self._delivering or not self._ended.empty():
                await self._change()
                continue
            if not self._replayed:
                try:
                    async with asyncio.timeout(_PATIENCE):
                        await self._change()
                except TimeoutError:
                    self.stop(RunDiverged("The function does not make all calls that it has recorded."))
                continue
            before = self._position
            await _rounds()
            if before == self._position and not self._busy:
                self.stop(None)
                return

    async def _leave(self, leaving: Callable[[], Awaitable[object]]) -> None:
        # An attempt that took longer than its activity may would be interrupted as well.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_ATTEMPT):
                await leaving()
        self.stop(Leave())

    def _notify(self) -> None:
        for each in self._waiting:
            if not each.done():
                each.set_result(None)
        self._waiting.clear()

    async def _change(self) -> None:
        """Wait until a call was made or has ended."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting


async def _rounds() -> None:
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)
