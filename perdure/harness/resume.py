"""Processes answers and expired requests when a parked session resumes. Each is processed once."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from perdure.agents.agent import Agent
from perdure.agents.registry import AgentRegistry
from perdure.errors import UnreadableState
from perdure.faults import reach
from perdure.protocol.deliveries import CHILD_KINDS, Principal
from perdure.protocol.events import NewEvent
from perdure.protocol.inputs import InputRequest
from perdure.protocol.names import outcome_key
from perdure.protocol.requests import ApprovedCall, CallRef, Coordinates, Failure, Resumed, ResumeTurn
from perdure.protocol.wire import JsonObject
from perdure.session.inputs import at_expiry, refuse_newer, resolved
from perdure.store.base import Store, commit_with_retries
from perdure.store.inputs import InputRow
from perdure.store.values import (
    Attempt,
    Commit,
    Consumption,
    DeliveryTaken,
    InputChanges,
    NewRecord,
    Record,
    SessionChange,
    SessionRow,
    SlotConflict,
)
from perdure.telemetry import spans

from .events import Ending, EventFactory, results_in
from .journal import (
    FAILURE,
    OUTCOME,
    RESUME,
    RESUMPTION,
    ConsumedDelivery,
    StoredFailure,
    StoredResumption,
    TurnJournal,
    find_agent,
    find_session,
    read,
    read_journal,
    written,
)
from .tools import builtin, outcomes
from .tools.approvals import (
    arguments_of,
    expiry_failure,
    extension_refused,
    log_of,
    outcome_without_run,
    remember_keys,
    remembered_key,
)
from .tools.records import Outcome
from .tools.toolbox import open_toolbox
from .turn_begin import FileFetcher, begin_turn, read_deliveries

_TURN_FAILED = "Another request of this turn expired, and the turn failed with it; the call was not executed."


@dataclass
class ResumePlan:
    """What the commit of a resumed turn writes, beside the beginning of the turn."""

    resumed: Resumed = field(default_factory=Resumed)
    records: list[NewRecord] = field(default_factory=list[NewRecord])
    events: list[NewEvent] = field(default_factory=list[NewEvent])
    #: Approvals that are valid for the rest of the session.
    remembers: list[InputRow] = field(default_factory=list[InputRow])
    withdrawn: dict[str, NewEvent] = field(default_factory=dict[str, NewEvent])
    ending: Ending | None = None
    speaker: Principal | None = None
    output_schema: JsonObject | None = None


def plan_resumption(
    factory: EventFactory, resumption: ResumeTurn, rows: Mapping[str, InputRow], asking_turns: Mapping[int, TurnJournal]
) -> ResumePlan:
    plan = ResumePlan()
    for turn in asking_turns.values():
        plan.speaker = turn.principal or plan.speaker
        plan.output_schema = turn.output_schema or plan.output_schema
    failure = next((found for row in rows.values() if (found := expiry_failure(row) or extension_refused(row))), None)
    if failure:
        _plan_failure(plan, factory, resumption, rows, failure)
        return plan
    calls: list[ApprovedCall] = []
    for row in rows.values():
        request = row.request
        if row.status == "open":
            continue
        if outcome := outcome_without_run(row):
            add_outcome(plan.records, plan.events, factory, request, outcome)
            continue
        if request.remember and row.status == "answered":
            plan.remembers.append(row)
        calls.append(ApprovedCall(at=coordinates_of(request), call=_ref(request, asking_turns[request.turn])))
    left = tuple(each for each in resumption.open if _is_open(rows, each.request_id))
    plan.resumed = Resumed(calls=tuple(calls), open=left)
    return plan


def add_outcome(
    records: list[NewRecord], events: list[NewEvent], factory: EventFactory, request: InputRequest, outcome: Outcome
) -> None:
    """The record belongs to the step that asked, the event to the current step. Questions have no event."""
    records.append(written(request.turn, request.step, outcome_key(request.call_id), OUTCOME, outcome))
    if request.kind == "approval":
        events.append(factory.action_result(request.call_id, request.tool, outcome, coordinates_of(request)))


def coordinates_of(request: InputRequest) -> Coordinates:
    return Coordinates(session_id=request.session_id, turn=request.turn, step=request.step)


def note_of(request: InputRequest | None) -> str:
    """A note to the model about an answer to a request that was already closed, or never existed."""
    if request is None:
        return "An answer arrived for a request that this session never made. It changed nothing."
    asked = f"the question {request.prompt!r}" if request.kind == "question" else f"the call of {request.tool}"
    return f"An answer about {asked} arrived after that request was closed. It changed nothing."


def _plan_failure(
    plan: ResumePlan, factory: EventFactory, resumption: ResumeTurn, rows: Mapping[str, InputRow], failure: Failure
) -> None:
    """The turn fails: none of the calls runs, and open requests are withdrawn."""
    for row in rows.values():
        request = row.request
        add_outcome(plan.records, plan.events, factory, request, _outcome_of_failed_turn(row))
        if row.status == "open":
            plan.withdrawn[request.request_id] = resolved(request, "withdrawn", None)
    plan.ending = factory.turn_failed(resumption.mode, failure)
    plan.resumed = Resumed(failure=failure)


def _stop_programs(plan: ResumePlan, programs: Sequence[ApprovedCall], turns: Mapping[int, TurnJournal]) -> None:
    """Record that the programs that waited have ended with their turn."""
    for program in programs:
        turn, step = program.at.place
        made = outcomes.made_by(turns[turn], step, program.call.call_id)
        outcome = outcomes.failed(outcomes.of_program("The program was stopped before its end.", made))
        plan.records.append(written(turn, step, outcome_key(program.call.call_id), OUTCOME, outcome))


def _outcome_of_failed_turn(row: InputRow) -> Outcome:
    if row.request.kind == "question":
        return outcome_without_run(row) or builtin.ignored()
    if row.status == "open":
        return outcomes.failed(_TURN_FAILED, outcomes.DENIED, "rejected")
    return outcome_without_run(row) or outcomes.failed(_TURN_FAILED, outcomes.DENIED, "rejected")


def _ref(request: InputRequest, turn: TurnJournal) -> CallRef:
    ref = turn.call(request.step, request.call_id).ref
    if ref is None:
        raise UnreadableState(f"The records of turn {request.turn} do not hold the call {request.call_id!r}.")
    return ref


@dataclass(frozen=True)
class _ResumeContext:
    """What an attempt has read before it decides."""

    resumption: ResumeTurn
    attempt: Attempt
    agent: Agent
    session: SessionRow
    turn: TurnJournal
    #: The requests that were open when the turn was started, in their current state.
    rows: Mapping[str, InputRow]
    #: The same of descendants: their own sessions process the answers.
    others: Mapping[str, InputRow] = field(default_factory=dict[str, InputRow])
    deliveries: tuple[ConsumedDelivery, ...] = ()

    @property
    def at(self) -> Coordinates:
        return self.resumption.at

    @property
    def factory(self) -> EventFactory:
        return EventFactory(self.at, self.attempt.number)

    @property
    def key(self) -> tuple[int, int, str]:
        return self.at.turn, 0, RESUME

    @property
    def closed(self) -> tuple[InputRow, ...]:
        return tuple(row for row in self.rows.values() if row.status != "open")

    @property
    def closed_elsewhere(self) -> tuple[InputRow, ...]:
        return tuple(row for row in self.others.values() if row.status != "open")

    @property
    def expiring(self) -> tuple[InputRow, ...]:
        """The requests that expire now: their time has ended without an answer."""
        return tuple(row for each in self.resumption.expired if (row := self.rows.get(each)) and row.status == "open")


class TurnResumer:
    """Processes the answers of a resumed turn. The result is recorded once, however many attempts are made."""

    def __init__(self, store: Store, agents: AgentRegistry, files: FileFetcher | None = None) -> None:
        self._store = store
        self._files = files
        self._agents = agents

    async def resume(self, resumption: ResumeTurn, attempt: Attempt) -> Resumed:
        while True:
            try:
                return await self._resume(resumption, attempt)
            except (DeliveryTaken, SlotConflict):
                # Lost a race for a delivery or for the remembered approvals: read again.
                continue

    async def _resume(self, resumption: ResumeTurn, attempt: Attempt) -> Resumed:
        at = resumption.at
        if found := await self._store.record(at.session_id, at.turn, 0, RESUME):
            return _resumed(found)
        # Keys of remembered approvals and the limit of parallel calls are declared by the agent.
        agent = find_agent(self._agents, resumption.agent)
        ctx = await self._read_context(resumption, attempt, agent)
        if ctx.expiring:
            ctx = await self._expire(ctx)
        ctx = await self._read_deliveries(ctx)
        if not (ctx.deliveries or ctx.closed or ctx.closed_elsewhere):
            # An earlier turn has consumed all of it.
            return Resumed(open=resumption.open, silent=True)
        reach("resume_before_commit")
        resumed = await self._commit_plan(ctx)
        reach("resume_after_commit")
        return resumed

    async def _read_context(self, resumption: ResumeTurn, attempt: Attempt, agent: Agent) -> _ResumeContext:
        at = resumption.at
        session, turn, rows = await asyncio.gather(
            find_session(self._store, at.session_id, resumption.head),
            read_journal(self._store, at.session_id, at.turn),
            self._rows([each.request_id for each in resumption.open]),
        )
        own = {name: row for name, row in rows.items() if row.request.session_id == at.session_id}
        others = {name: row for name, row in rows.items() if name not in own}
        return _ResumeContext(resumption, attempt, agent, session, turn, own, others)

    async def _rows(self, request_ids: Sequence[str]) -> dict[str, InputRow]:
        found = await asyncio.gather(*(self._store.input(each) for each in request_ids))
        rows = {row.request.request_id: row for row in found if row}
        if missing := set(request_ids) - rows.keys():
            raise UnreadableState("A request that this session waits for is not there.", request_ids=sorted(missing))
        for row in rows.values():
            refuse_newer(row.request, row.answer)
        return rows

    async def _read_deliveries(self, ctx: _ResumeContext) -> _ResumeContext:
        """Read the deliveries of this turn, and those of all other answers that it processes."""
        wanted = [each.id for each in ctx.resumption.deliveries]
        wanted += [row.delivery_id for row in ctx.closed if row.delivery_id]
        deliveries, turn = await read_deliveries(
            self._store, ctx.at, list(dict.fromkeys(wanted)), ctx.turn, self._files
        )
        return replace(ctx, deliveries=deliveries, turn=turn)

    # --- requests that expire ---

    async def _expire(self, ctx: _ResumeContext) -> _ResumeContext:
        """Close the requests that expire. Until then an answer may still arrive.

        The deliveries are read afterwards, so that an answer of the last moment is processed too.
        """
        requests = [row.request for row in ctx.expiring]
        answers = {each.request_id: at_expiry(each) for each in requests}
        expired_events = {each.request_id: resolved(each, "expired", answers[each.request_id]) for each in requests}
        await commit_with_retries(
            self._store,
            Commit(
                ctx.at.session_id,
                unless_cancelled=ctx.at.turn,
                unless=ctx.key,
                inputs=InputChanges(expires=answers, resolved=expired_events),
                # From now on a cancel request for the session means this turn.
                change=SessionChange(status="running", turns=ctx.at.turn + 1),
            ),
        )
        closed = await self._rows(list(answers))
        # It is running from now on, so no more notes come. The other rows are not read again: an answer since then has
        # a delivery of its own.
        session = await find_session(self._store, ctx.at.session_id, ctx.resumption.head)
        return replace(ctx, session=session, rows={**ctx.rows, **closed})

    # --- requests that are closed ---

    async def _commit_plan(self, ctx: _ResumeContext) -> Resumed:
        asking_turns = await self._asking_turns(ctx)
        programs, turns = await self._programs(ctx, asking_turns)
        plan = plan_resumption(ctx.factory, ctx.resumption, ctx.rows, asking_turns)
        if plan.ending is not None:
            _stop_programs(plan, programs, turns)
        plan.events += [resolved(row.request, row.status, row.answer) for row in ctx.closed_elsewhere]
        resumed = plan.resumed
        if plan.ending is None:
            rows = {**ctx.rows, **ctx.others}
            left = tuple(each for each in ctx.resumption.open if _is_open(rows, each.request_id))
            resumed = resumed.model_copy(update={"open": left})
        if programs and plan.ending is None:
            resumed = resumed.model_copy(update={"kind": "programs", "programs": programs})
        if resumed.calls or resumed.programs:
            resumed = resumed.model_copy(update={"parallel": ctx.agent.limits.parallel_calls})
        stored = StoredResumption(
            resumed=resumed,
            notes=(*ctx.session.notes, *await self._notes(ctx)),
            speaker=plan.speaker,
            output_schema=plan.output_schema,
        )
        if withdrawn_events := plan.withdrawn:
            # In a commit before the boundary: events after the boundary belong to the next turn.
            withdrawal = Commit(
                ctx.at.session_id,
                unless_cancelled=ctx.at.turn,
                unless=ctx.key,
                inputs=InputChanges(withdraws=tuple(withdrawn_events), resolved=withdrawn_events),
            )
            await commit_with_retries(self._store, withdrawal)
        done = await commit_with_retries(self._store, await self._commit(ctx, plan, stored))
        if done.existing:
            return _resumed(done.existing)
        if plan.ending:
            spans.turn_ended(ctx.resumption.agent, "failed")
        return resumed

    async def _commit(self, ctx: _ResumeContext, plan: ResumePlan, stored: StoredResumption) -> Commit:
        model = ctx.agent.model or "unknown"
        opening = begin_turn(ctx.factory, ctx.deliveries, ctx.turn, ctx.session.agent, model)
        ending = plan.ending
        change = ending.change(turns=ctx.at.turn + 1) if ending else opening.change
        consume = opening.consume
        if notes := len(ctx.session.notes):
            # Also without a delivery: it is the turn that tells them.
            consume = replace(consume or Consumption(ctx.at.turn, (), {}), notes=notes)
        remembered = [await self._remembered_key(ctx, row) for row in plan.remembers]
        return Commit(
            ctx.at.session_id,
            head=ctx.resumption.head,
            unless_cancelled=ctx.at.turn,
            unless=ctx.key,
            records=(*opening.records, written(*ctx.key, RESUMPTION, stored), *plan.records),
            events=(*opening.events, *plan.events, *(ending.events if ending else ())),
            consume=consume,
            slots=await remember_keys(self._store, ctx.at.session_id, [key for key in remembered if key]),
            close=bool(ending and ending.closes),
            close_turn=ctx.at.turn if ending else None,
            change=replace(change, tool_calls=results_in(plan.events)),
        )

    async def _remembered_key(self, ctx: _ResumeContext, row: InputRow) -> str | None:
        """The key of a remembered approval, made of the approved arguments, which the approver may have changed."""
        request = row.request
        if row.answer is None or row.answer.arguments is None:
            return request.remember
        try:
            tool = (await open_toolbox(ctx.agent))[request.tool]
            runs_with = tool.read(arguments_of(request, row.answer))
            return await remembered_key(request.tool, tool.approval_policy, runs_with.values())
        except Exception:
            # The call may still run as approved; the next one needs an approval again.
            log = log_of(coordinates_of(request), request.tool, request.call_id)
            log.exception("this approval cannot be remembered")
            return None

    async def _asking_turns(self, ctx: _ResumeContext) -> dict[int, TurnJournal]:
        """The turns that asked, by number."""
        turns = sorted({row.request.turn for row in ctx.rows.values()})
        return {turn: await read_journal(self._store, ctx.at.session_id, turn) for turn in turns}

    async def _programs(
        self, ctx: _ResumeContext, known: Mapping[int, TurnJournal]
    ) -> tuple[tuple[ApprovedCall, ...], Mapping[int, TurnJournal]]:
        """The programs that have not ended, of the turns that parked directly before this one; and these turns."""
        found: list[ApprovedCall] = []
        turns: dict[int, TurnJournal] = {}
        session_id = ctx.at.session_id
        for number in range(ctx.at.turn - 1, -1, -1):
            turn = known[number] if number in known else await read_journal(self._store, session_id, number)
            if turn.records and not turn.park:
                break
            turns[number] = turn
            for step in range(turn.last_step + 1):
                at = Coordinates(session_id=session_id, turn=number, step=step)
                found += [ApprovedCall(at=at, call=each.ref) for each in turn.programs(step) if each.ref]
            if turn.records and turn.resumption is None:
                # It did not continue another one.
                break
        return tuple(found), turns

    async def _notes(self, ctx: _ResumeContext) -> tuple[str, ...]:
        """Notes to the model about answers that came too late. They authorise nothing."""
        answered = (delivery for delivery in ctx.deliveries if delivery.kind not in CHILD_KINDS)
        late = [each for delivery in answered for each in delivery.answers if each not in ctx.rows]
        rows = [await self._store.input(each) for each in dict.fromkeys(late)]
        requests = [row.request if row and row.request.session_id == ctx.at.session_id else None for row in rows]
        return tuple(dict.fromkeys(note_of(request) for request in requests))


def _is_open(rows: Mapping[str, InputRow], request_id: str) -> bool:
    return request_id in rows and rows[request_id].status == "open"


def _resumed(record: Record) -> Resumed:
    if FAILURE.includes(record):
        return Resumed(failure=read(record, FAILURE, StoredFailure).failure)
    return read(record, RESUMPTION, StoredResumption).resumed
