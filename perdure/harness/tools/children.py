"""Children: calls that are the work of other sessions. They are started, stopped, and their results recorded.

A child is a session like any other. It reports by deliveries, which the store writes with the event that they report.
"""

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic_ai.messages import TextPart

from perdure.agents.registry import bounds_of
from perdure.agents.remote import RemoteAgent
from perdure.bounds import shortened
from perdure.errors import AgentGone, Invalid, TurnCancelled
from perdure.harness.events import EventFactory
from perdure.harness.journal import (
    END,
    OUTCOME,
    PARK,
    StoredPark,
    TurnJournal,
    find_agent,
    find_session,
    load_response,
    read,
    read_journal,
    written,
)
from perdure.harness.turn_begin import completed_step
from perdure.protocol import names
from perdure.protocol.deliveries import CHILD_INPUT, DeliveryBody, DeliveryRef, Lineage
from perdure.protocol.events import EventType, NewEvent, cancel_requested
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import (
    CollectChildren,
    Coordinates,
    DispatchChildren,
    LookAtChildren,
    Looked,
    Pending,
    ShowInputs,
    ShownInputs,
    StopChildren,
)
from perdure.protocol.wire import JsonObject
from perdure.store.base import Store, commit_with_retries
from perdure.store.deliveries import CancelRequest, DeliveryRow, NewDelivery
from perdure.store.inputs import InputRow
from perdure.store.values import Commit, Consumption, NewRecord, NewSession, SessionChange, SessionRow

from . import outcomes
from .child_tool import Task
from .records import Outcome, RequestedCall

if TYPE_CHECKING:
    from perdure.agents.registry import AgentRegistry
    from perdure.harness.remote.calls import Remote, RemoteCalls
    from perdure.settings import Settings

FAILED = "SUBAGENT_EXECUTION_FAILED"


@dataclass(frozen=True)
class _Family:
    """The calls of one step that are the work of other sessions."""

    at: Coordinates
    row: SessionRow
    turn: TurnJournal

    @property
    def calls(self) -> Sequence[RequestedCall]:
        return [call for call in self.turn.calls(self.at.step) if call.child]

    @property
    def local(self) -> Sequence[RequestedCall]:
        """The calls that sessions of this store do."""
        return [call for call in self.calls if call.child and call.child.remote_url is None]

    @property
    def remote(self) -> Sequence[RequestedCall]:
        """Those that agents on other servers do."""
        return [call for call in self.calls if call.child and call.child.remote_url is not None]

    @property
    def ends(self) -> Sequence[float]:
        """When the turn or the session ends, in seconds since the epoch."""
        reply = self.turn.reply(self.at.step)
        # A program may make its calls in a later turn than that of the reply.
        later = [call.child.deadline for call in self.pending if call.child and call.child.deadline is not None]
        of_turn = max(later, default=reply.deadline if reply else None)
        known = (self.row.bounds.deadline if self.row.bounds else None, of_turn)
        return [end for end in known if end is not None]

    @property
    def pending(self) -> Sequence[RequestedCall]:
        """The calls without a result. The end of a turn gives each call one, also one whose session still works."""
        return [call for call in self.calls if self.is_pending(call)]

    def is_pending(self, call: RequestedCall) -> bool:
        return self.turn.outcome(self.at.step, call.call_id) is None

    @property
    def is_to_stop(self) -> bool:
        """Whether the turn that waits for them is cancelled or late, or its session has ended."""
        return self.row.ended or self.row.cancel_turn is not None or min(self.ends, default=math.inf) <= time.time()

    def child_id(self, call: RequestedCall) -> str:
        return names.child_session(self.at.session_id, self.at.turn, self.at.step, call.call_id)


@dataclass(frozen=True)
class NewChild:
    """A session to start, with its task."""

    session: NewSession
    task: DeliveryRef


class Children:
    """Starts and stops the children of a step, and records their results. Any method may be repeated at any time."""

    def __init__(
        self, store: Store, agents: "AgentRegistry", settings: "Settings", calls: "RemoteCalls | None" = None
    ) -> None:
        self._store = store
        self._agents = agents
        self._settings = settings
        self._calls = calls

    @property
    def _remote_calls(self) -> "RemoteCalls":
        if self._calls is None:
            # Imported here because most sessions have no agents elsewhere.
            from perdure.harness.remote.calls import RemoteCalls

            self._calls = RemoteCalls(self._store)
        return self._calls

    async def dispatch(self, order: DispatchChildren) -> tuple[Pending, Sequence[NewChild]]:
        """Write the sessions of all calls without a result. Returns these calls, and the sessions to start."""
        family = await self._family(order.at)
        # A worker that knows their agents is worth waiting for, unless they are to be stopped at once.
        gone = (AgentGone,) if family.is_to_stop else ()
        created: list[NewChild] = []
        called: list[NewEvent] = []
        for call in filter(family.is_pending, family.local):
            with contextlib.suppress(*gone):
                if new := await self._create(family, call, order.traceparent):
                    created.append(new)
                called.append(_called(family, call, family.child_id(call)))
        for remote in self._remotes(family):
            if family.is_pending(remote.call):
                with contextlib.suppress(*gone):
                    await self._remote_calls.begin(remote, min(family.ends, default=None))
        await self._emit(family, called)
        return _pending(family.pending), created

    async def look(self, order: LookAtChildren) -> Looked:
        """Start, follow and cancel the sessions on other servers, as far as something is due."""
        family = await self._family(order.at)
        remotes = self._remotes(family)
        if not remotes:
            return Looked()
        found = await self._remote_calls.look(remotes)
        called = [
            _called(family, each.remote.call, each.session_id)
            for each in found
            if each.session_id and family.is_pending(each.remote.call)
        ]
        await self._emit(family, called)
        due = min((each.due for each in found if each.due is not None), default=None)
        return Looked(
            results=tuple(each.result for each in found if each.result is not None),
            look_in=None if due is None else max(0.0, due - time.time()),
        )

    async def _emit(self, family: _Family, called: Sequence[NewEvent]) -> None:
        if called and not family.row.ended:
            events = (*completed_step(EventFactory(family.at), family.turn), *called)
            await commit_with_retries(self._store, Commit(family.at.session_id, events=events))

    def _remotes(self, family: _Family) -> "Sequence[Remote]":
        """The calls that agents on other servers do."""
        if not family.remote:
            return ()
        from perdure.harness.remote.calls import Remote

        # A worker that does not know them can still stop them.
        agent = self._agents.get(family.row.agent)
        declared = {each.name: each for each in (agent.subagents if agent else ()) if isinstance(each, RemoteAgent)}
        return [Remote(family.at, call, declared.get(call.tool)) for call in family.remote]

    async def stop(self, order: StopChildren) -> tuple[Pending, Sequence[CancelRequest]]:
        """Write a cancel request for each child that has not ended; calls that have no child yet never get one.

        Returns the calls for whose results a turn still waits.
        """
        family = await self._family(order.at)
        begun: list[RequestedCall] = []
        requests: list[CancelRequest] = []
        stopped = [(remote.call, await self._remote_calls.stop(remote)) for remote in self._remotes(family)]
        begun += [call for call, was_begun in stopped if was_begun]
        for call in family.local:
            child_id = family.child_id(call)
            child = await self._store.session(child_id)
            if child is None:
                continue
            begun.append(call)
            if child.ended:
                # A build that knows no children may have ended it: then its report would never come.
                await self._store.report_end(child_id)
                continue
            if request := await self._store.cancel(child_id, None, cancel_requested):
                requests.append(request)
        keys = tuple(call.key for call in begun if family.is_pending(call))
        return _pending(begun).model_copy(update={"keys": keys}), requests

    async def collect(self, order: CollectChildren) -> None:
        """Record the results that the deliveries bring, and emit their events, in the order of the calls."""
        family = await self._family(order.at)
        refs = {ref.action: ref.id for ref in order.deliveries}
        by_id = await self._reports(family, list(refs.values()))
        arrived = [call for call in family.pending if refs.get(call.key) in by_id]
        if not arrived:
            return
        factory = EventFactory(order.at)
        records: list[NewRecord] = []
        events: list[NewEvent] = []
        for remote in self._remotes(family):
            # A callback may have been faster than the worker that was to emit this.
            if remote.call in arrived and (session_id := await self._remote_calls.session_of(remote)):
                events += [*completed_step(factory, family.turn), _called(family, remote.call, session_id)]
        for call in arrived:
            outcome = await self.outcome(by_id[refs[call.key]])
            key = names.outcome_key(call.call_id)
            records.append(written(order.at.turn, order.at.step, key, OUTCOME, outcome))
            if not outcome.is_error:
                events.append(_completed(order.at, call, outcome))
            events.append(factory.action_result(call.call_id, call.tool, outcome, of_child=True))
        commit = Commit(
            order.at.session_id,
            unless=(order.at.turn, order.at.step, records[0].key),
            records=records,
            events=events,
            consume=Consumption(order.at.turn, list(by_id)),
            change=SessionChange(tool_calls=len(records)),
        )
        await commit_with_retries(self._store, commit)

    async def _reports(self, family: _Family, report_ids: Sequence[str]) -> Mapping[str, DeliveryRow]:
        """The deliveries with the results, by their ids."""
        found = await self._store.deliveries(family.at.session_id, report_ids)
        if len(found) < len(report_ids):
            # A worker or API of a build that knows no children has ended one: its driver has signalled us all the same.
            for call in family.local:
                await self._store.report_end(family.child_id(call))
            found = await self._store.deliveries(family.at.session_id, report_ids)
        return {row.delivery_id: row for row in found}

    async def show(self, order: ShowInputs) -> ShownInputs:
        """Emit the open requests of descendants that these deliveries are about; the turn may park with them."""
        at = order.at
        asked = [ref.request_id for ref in order.deliveries if ref.kind == CHILD_INPUT and ref.request_id]
        rows = [row for each in asked if order.shows and (row := await self._open_request(at.session_id, each))]
        commit = Commit(at.session_id, consume=Consumption(at.turn, [each.id for each in order.deliveries]))
        if not rows:
            await commit_with_retries(self._store, commit)
            await self._forget_cancel(at.session_id)
            return ShownInputs()
        open = tuple(OpenInput(request_id=row.request.request_id, first_shown=at.place) for row in rows)
        factory = EventFactory(at)
        shown = factory.inputs_requested([row.request for row in rows], open[0].request_id)
        if not order.parks:
            done = await commit_with_retries(self._store, replace(commit, events=(shown,)))
            return ShownInputs(open=open, head=done.session.events)
        ending = factory.parked()
        parked = replace(
            commit,
            unless_cancelled=at.turn,
            unless=(at.turn, at.step, END),
            records=(written(at.turn, at.step, END, PARK, StoredPark(open=open)),),
            events=(shown, *ending.events),
            close_turn=at.turn,
            change=SessionChange(status=ending.status),
        )
        try:
            done = await commit_with_retries(self._store, parked)
        except TurnCancelled:
            await commit_with_retries(self._store, commit)
            return ShownInputs(cancelled=True)
        if done.existing is not None:
            open = read(done.existing, PARK, StoredPark).open if PARK.includes(done.existing) else ()
        return ShownInputs(open=open, head=done.session.events)

    async def _forget_cancel(self, session_id: str) -> None:
        """Settle a cancel that was accepted because these deliveries waited: it would stop the next message."""
        row = await find_session(self._store, session_id)
        if row.cancel_turn is not None and row.cancel_turn >= row.turns and row.status != "running":
            await self._store.commit(Commit(session_id, head=row.events, current=True, settles_cancel=True))

    async def _open_request(self, root_id: str, request_id: str) -> InputRow | None:
        """The request, if it is open and one of a descendant of this session."""
        row = await self._store.input(request_id)
        if row is None or row.status != "open":
            return None
        asking = await self._store.session(row.request.session_id)
        above = asking.parent if asking else None
        return row if above is not None and above.get("rootSessionId") == root_id else None

    async def _family(self, at: Coordinates) -> _Family:
        row = await find_session(self._store, at.session_id)
        return _Family(at, row, await read_journal(self._store, at.session_id, at.turn))

    async def _create(self, family: _Family, call: RequestedCall, traceparent: str | None) -> NewChild | None:
        """Write the session and its task, unless that was done before; None if there is nothing to start."""
        assert call.child is not None
        parent, at = family.row, family.at
        session_id = family.child_id(call)
        # One whose agent is no longer declared here may have begun before, and goes on without this worker.
        elsewhere = self._agents.get(call.child.agent) is None and await self._store.session(session_id)
        if elsewhere or await self._store.deletion(session_id) is not None:
            # One that was deleted has ended before, and its report waits.
            return None
        above = parent.parent or {}
        lineage = Lineage(
            session_id=parent.session_id,
            root_session_id=above.get("rootSessionId", parent.session_id),
            turn=at.turn,
            step=at.step,
            call_id=call.call_id,
            name=call.tool,
            depth=call.child.depth,
        )
        task = Task.model_validate(call.input)
        limits = find_agent(self._agents, call.child.agent).limits
        session = NewSession(
            session_id=session_id,
            agent=call.child.agent,
            mode="task",
            # No token has this hash: nobody but its parent can deliver to a child.
            token_hash=f"child/{session_id}",
            principal=parent.principal,
            capabilities=parent.capabilities,
            parent=lineage.model_dump(mode="json"),
            title=shortened(" ".join(task.message[:400].split()), 80),
            bounds=bounds_of(limits, deadline=min(family.ends, default=None)),
        )
        body = DeliveryBody(
            message=task.message,
            output_schema=task.output_schema,
            principal=family.turn.principal or parent.principal,
        )
        ref = DeliveryRef(
            id=names.delivery_of_child(session_id), token_hash=session.token_hash, traceparent=traceparent
        )
        delivery = NewDelivery(
            session_id=session_id,
            delivery_id=ref.id,
            body=body.model_dump(mode="json", exclude_none=True),
            owner=parent.principal.owner,
            ref=ref.model_dump(mode="json"),
        )
        accepted = await self._store.create_session(session, delivery)
        if accepted is not None and not accepted.fresh:
            # It may have ended, and a build that knows no children may have ended it.
            await self._store.report_end(session_id)
        return NewChild(session, ref)

    async def outcome(self, report: DeliveryRow) -> Outcome:
        """The outcome of the call, from the child that has ended."""
        body = DeliveryBody.model_validate(report.body or {})
        if body.result is not None:
            return self._reported(body.result)
        child_id = body.child_session_id or ""
        child = await self._store.session(child_id)
        if child is None or await self._store.deletion(child_id) is not None:
            return outcomes.failed("The session that did this task was deleted.", FAILED)
        if child.records_expired:
            # Retention waits for this; that of older code does not.
            return outcomes.failed("The result of this task has expired.", FAILED)
        if child.status != "completed":
            error = child.error or {}
            message = f"{error.get('message', 'The task failed.')} ({error.get('code', 'SESSION_FAILED')})"
            return outcomes.failed(message, FAILED)
        return self._completed(await output_of(self._store, child))

    def _reported(self, result: JsonObject) -> Outcome:
        """The outcome of a call that another server has done."""
        if error := result.get("error"):
            return outcomes.failed(str(error.get("message")), str(error.get("code")))
        return self._completed(result.get("output", ""))

    def _completed(self, output: object) -> Outcome:
        try:
            return outcomes.completed(output, self._settings.max_tool_output_bytes)
        except Invalid as unsendable:
            # Not raised: the driver would try to collect this result again for ever.
            return outcomes.failed(unsendable.message, FAILED)


def _pending(calls: Sequence[RequestedCall]) -> Pending:
    """The calls without a result; agents on other servers want a look at once."""
    elsewhere = any(call.child and call.child.remote_url is not None for call in calls)
    return Pending(keys=tuple(call.key for call in calls), look_in=0.0 if elsewhere else None)


async def output_of(store: Store, session: SessionRow, turn_number: int | None = None) -> object:
    """The output of a task that has completed, or of this turn: its structured result, or its last text."""
    number = max(0, session.turns - 1) if turn_number is None else turn_number
    turn = await read_journal(store, session.session_id, number)
    # A result may have been accepted in the step before the last one.
    for step in (turn.last_step, turn.last_step - 1):
        index = await store.index_of(session.session_id, names.step_key(number, step, "result"))
        if index is not None:
            event = (await store.events(session.session_id, index, 1))[0]
            if event.type == EventType.RESULT_COMPLETED and event.data:
                return event.data["result"]
    reply = turn.reply(turn.last_step)
    texts = [part.content for part in load_response(reply).parts if isinstance(part, TextPart)] if reply else []
    if turn.output_schema is not None and texts:
        # The event has expired. The record of the reply has the result as its last text.
        with contextlib.suppress(ValueError):
            return json.loads(texts[-1])
    return "".join(texts)


def _called(family: _Family, call: RequestedCall, child_id: str) -> NewEvent:
    data: JsonObject = {
        "callId": call.call_id,
        "childSessionId": child_id,
        "sessionId": family.at.session_id,
        "name": call.tool,
        "toolName": call.tool,
        "workflowId": child_id,
    }
    if call.child and call.child.remote_url is not None:
        data["remote"] = {"url": call.child.remote_url}
    return EventFactory(family.at).of_turn(EventType.SUBAGENT_CALLED, f"called/{call.call_id}", data)


def _completed(at: Coordinates, call: RequestedCall, outcome: Outcome) -> NewEvent:
    data = {"callId": call.call_id, "subagentName": call.tool, "output": outcomes.as_text(outcome.output)}
    return NewEvent(
        type=EventType.SUBAGENT_COMPLETED,
        key=names.step_key(at.turn, at.step, f"child/{call.call_id}"),
        data=data,
        turn=at.turn,
        step=at.step,
    )
