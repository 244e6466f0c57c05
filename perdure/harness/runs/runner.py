"""Enters the function of a run, parks the run or ends it."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from pydantic import ValidationError

from perdure.agents.context import Dispatch
from perdure.agents.registry import AgentRegistry
from perdure.agents.run import Run, RunContext, RunRegistry
from perdure.agents.signature import problems
from perdure.errors import (
    NeedsAttention,
    RunCancelled,
    RunDiverged,
    RunGone,
    RunKillsWorkers,
    RunStuck,
    Superseded,
    TurnCancelled,
    Unavailable,
    UnreadableState,
)
from perdure.faults import reach
from perdure.harness.journal import find_session
from perdure.harness.tools.approvals import Clock
from perdure.harness.tools.children import Children
from perdure.protocol import names
from perdure.protocol.deliveries import CHILD_ANSWER, CHILD_INPUT, CHILD_RESULT, RUN
from perdure.protocol.events import EventType, NewEvent, cancel_requested
from perdure.protocol.runs import RunBody, RunLooked
from perdure.protocol.wire import JsonObject
from perdure.store.attempts import AttemptKey, AttemptReport, error_of
from perdure.store.base import Store, commit_with_retries, reported
from perdure.store.deliveries import DeliveryRow
from perdure.store.runs import RunChange
from perdure.store.values import Attempt, Commit, Consumption, Fence, Hold, SessionChange, SessionQuery, SessionRow

from .body import Body, Leave
from .outcomes import Ended, Parked, as_json, text_of
from .records import Calls, calls_of
from .waits import Drivers, RunWaits

log = logging.getLogger("perdure.runs")

#: The kinds of deliveries that only make a run look again.
_NOTICES = frozenset({RUN, "answer", CHILD_INPUT, CHILD_ANSWER})

#: After so many deaths of workers in a row the run waits for an operator.
_MOST_DEATHS = 10

#: Children of one page.
_PAGE = 200

_CANCELLED = RunCancelled()


Report: TypeAlias = Callable[[str, NeedsAttention], Awaitable[object]]


class RunRunner:
    """Any worker may repeat any look at any time."""

    def __init__(
        self,
        store: Store,
        runs: RunRegistry,
        agents: AgentRegistry,
        children: Children,
        report: Report,
        clock: Clock = time.time,
        dispatch: Dispatch | None = None,
    ) -> None:
        """`report`: sets the attention of a run."""
        self._dispatch = dispatch
        self._report = report
        self._store = store
        self._runs = runs
        self._agents = agents
        self._children = children
        self._clock = clock

    async def look(
        self, order: RunBody, attempt: Attempt, drivers: Drivers, leaving: Callable[[], Awaitable[object]]
    ) -> RunLooked:
        """Enter the function of the run, unless it has ended or is to end; `leaving` returns when the worker stops."""
        row = await find_session(self._store, order.session_id)
        if not row.ended and order.ends is not None:
            await self._fail(row, order.ends.code, order.ends.message, None)
        elif not row.ended and row.cancel_turn is not None:
            await self._cancel(row, None)
        elif not row.ended and attempt.deaths >= _MOST_DEATHS:
            # Not raised: the workflow would have it entered again, and as many workers would die.
            killed = RunKillsWorkers(f"The worker died in {attempt.deaths} attempts at this run.")
            await self._report(row.session_id, killed)
            return RunLooked()
        elif not row.ended:
            key = AttemptKey(0, 0, names.BODY_SCOPE, attempt.generation)
            try:
                async with reported(self._store, row.session_id, key, stops=Leave):
                    parked = await self._enter(row, attempt, drivers, leaving)
            except Leave:
                return RunLooked(due=self._clock())
            except (NeedsAttention, Superseded, Unavailable):
                raise
            except Exception as error:
                # Raised as it is, it would be tried again for ever, and only the log would say so.
                log.error("run %s cannot be entered", row.session_id, exc_info=error)
                raise RunStuck from None
            if parked is not None:
                return RunLooked(due=parked.due)
        await self._stop_children(row, drivers)
        return RunLooked(ended=True)

    async def _enter(
        self, row: SessionRow, attempt: Attempt, drivers: Drivers, leaving: Callable[[], Awaitable[object]]
    ) -> Parked | None:
        """Run the function; None when the run has ended."""
        run = self._runs.get(row.run or "")
        if run is None:
            raise RunGone(f"The run {row.run!r} is not served here.")
        waiting = await self._store.unread(row.session_id)
        await self._begin(row, attempt, waiting)
        calls = calls_of(await self._store.records(row.session_id))
        reports = await self._reports(row, calls, waiting)
        waits = RunWaits(self._store, self._agents, self._children, drivers, row, reports, self._dispatch)
        body = Body(self._store, row.session_id, attempt, calls, waits, clock=self._clock)
        try:
            done = await self._run(row, run, body, leaving)
        except TurnCancelled:
            await self._cancel(row, body)
            return None
        match done:
            case Parked():
                await self._park(row, body, done)
                return done
            case Ended():
                await self._end(row, run, body, done)
                return None

    async def _reports(
        self, row: SessionRow, calls: Calls, waiting: Sequence[DeliveryRow]
    ) -> Mapping[str, DeliveryRow]:
        """The unread reports of the children that the run waits for, with their bodies, by the id of the child."""
        unread = {each.delivery_id for each in waiting if each.kind == CHILD_RESULT}
        child_of = {names.delivery_of_child(child): child for child in _children(calls)}
        found = await self._store.deliveries(row.session_id, [each for each in child_of if each in unread])
        return {child_of[each.delivery_id]: each for each in found}

    async def _begin(self, row: SessionRow, attempt: Attempt, waiting: Sequence[DeliveryRow]) -> None:
        """Take over from any older attempt."""
        started = NewEvent(
            type=EventType.RUN_STARTED,
            key=names.session_key("run/started"),
            data={"runId": row.session_id, "workflowName": row.run},
        )
        notices = [each.delivery_id for each in waiting if each.kind in _NOTICES]
        await self._store.commit(
            Commit(
                row.session_id,
                fence=Fence(0, 0, names.BODY_SCOPE, attempt, Hold.RAISE),
                events=(started,),
                consume=Consumption(0, notices) if notices else None,
                change=SessionChange(status="running", turns=1),
                run=RunChange(enters=True),
            )
        )

    async def _run(
        self, row: SessionRow, run: Run, body: Body, leaving: Callable[[], Awaitable[object]]
    ) -> Ended | Parked:
        try:
            record = await self._store.run(row.session_id)
        except ValueError:
            raise UnreadableState("The input of the run is no JSON.") from None
        context = RunContext(row.session_id, run.name, row.principal, body)
        try:
            given = run.read_input(record.input if record else None)
        except Exception as unfit:
            if body.has_begun:
                # The type has changed since. It can be mended; a run that has ended could not.
                raise RunDiverged("The input of the run does not fit what its function takes now.") from None
            text = problems(unfit) if isinstance(unfit, ValidationError) else text_of(unfit)
            return Ended(error=ValueError(f"The input does not fit: {text}"))
        return await body.run(lambda: run.function(context, given), leaving)

    async def _park(self, row: SessionRow, body: Body, parked: Parked) -> None:
        # The same wait is told once, however often the run looks at it.
        what = "-".join(str(each) for each in parked.positions)
        waiting = NewEvent(
            type=EventType.RUN_WAITING,
            key=names.session_key(f"run/waiting/{what[:100]}"),
            data={"waitingFor": parked.what, **({} if parked.due is None else {"due": parked.due})},
        )
        recovers = row.attention is not None
        run, report = RunChange(waiting_for=parked.what), body.fence.report("succeeded")
        await body.commit(events=(waiting,), recovers=recovers, run=run, report=report)

    async def _end(self, row: SessionRow, run: Run, body: Body, ended: Ended) -> None:
        reach("run_before_end")
        result: Any = None
        error = ended.error
        if error is None:
            try:
                result = as_json(run.dump_output(ended.value))
            except Exception as unfit:
                error = unfit
        if error is not None:
            log.error("run %s failed", row.session_id, exc_info=error)
            name = type(error).__name__
            text = (
                f"The output does not fit: {problems(error)}" if isinstance(error, ValidationError) else text_of(error)
            )
            await self._fail(row, name, text, body)
        else:
            event = NewEvent(type=EventType.RUN_COMPLETED, key=names.session_key("run/ended"), data={})
            await self._close(row, body, event, SessionChange(status="completed"), RunChange(result=result))
        reach("run_after_end")

    async def _fail(self, row: SessionRow, name: str, message: str, body: Body | None) -> None:
        error: JsonObject = {"code": name, "name": name, "message": message}
        shown = {"name": name, "message": message}
        event = NewEvent(type=EventType.RUN_FAILED, key=names.session_key("run/ended"), data={"error": shown})
        await self._close(row, body, event, SessionChange(status="failed", error=error), RunChange())

    async def _cancel(self, row: SessionRow, body: Body | None) -> None:
        error: JsonObject = {"code": _CANCELLED.code, "name": "RunCancelled", "message": _CANCELLED.message}
        event = NewEvent(type=EventType.RUN_CANCELLED, key=names.session_key("run/ended"), data={})
        await self._close(row, body, event, SessionChange(status="failed", error=error), RunChange())

    async def _close(
        self, row: SessionRow, body: Body | None, event: NewEvent, change: SessionChange, run: RunChange
    ) -> None:
        if body is not None:
            report = _report(body, event, change)
            await body.commit(events=(event,), close=True, settles_cancel=True, change=change, run=run, report=report)
            return
        commit = Commit(row.session_id, events=(event,), close=True, settles_cancel=True, change=change, run=run)
        await commit_with_retries(self._store, commit)

    async def _stop_children(self, row: SessionRow, drivers: Drivers) -> None:
        """Stop the agents whose work the run has not waited for."""
        # Not by the records of the calls: this ends also a run whose records nobody can read.
        query = SessionQuery(parent=row.session_id, limit=_PAGE)
        while True:
            page = await self._store.sessions(query)
            for child in page.sessions:
                if child.ended:
                    continue
                if request := await self._store.cancel(child.session_id, None, cancel_requested):
                    await drivers.cancel(request)
            if page.next_cursor is None:
                return
            query = replace(query, cursor=page.next_cursor)


def _report(body: Body, end: NewEvent, change: SessionChange) -> AttemptReport:
    """How the attempt has ended that ends the run."""
    if change.error is None:
        return body.fence.report("succeeded")
    status = "cancelled" if end.type == EventType.RUN_CANCELLED else "failed"
    return body.fence.report(status, error_of(str(change.error["code"]), str(change.error["message"])))


def _children(calls: Calls) -> list[str]:
    """The sessions that were started for calls that have not ended."""
    return [each.child_session_id for each in calls.open.values() if each.child_session_id is not None]
