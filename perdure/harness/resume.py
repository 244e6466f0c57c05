"""What people decided is carried out: once, whoever tries and however often."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from perdure.agents.agent import Agent
from perdure.agents.registry import AgentRegistry
from perdure.errors import UnreadableState
from perdure.faults import reach
from perdure.protocol.events import NewEvent
from perdure.protocol.inputs import InputRequest
from perdure.protocol.names import outcome_slot
from perdure.protocol.principals import Principal
from perdure.protocol.requests import ApprovedCall, CallRef, Coordinates, Failure, Resumed, ResumeTurn
from perdure.protocol.wire import JsonObject
from perdure.session.inputs import at_expiry, resolved
from perdure.store.base import Store, commit_with_retries
from perdure.store.values import (
    Attempt,
    Commit,
    DeliveryTaken,
    InputRow,
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
    HeardDelivery,
    Outcome,
    StoredFailure,
    StoredResumption,
    TurnJournal,
    read,
    written,
)
from .lookup import find_agent, find_session
from .tools import builtin, outcomes
from .tools.approvals import arguments_of, failing, log_of, remembered_key, remembering, without_run
from .tools.toolbox import open_toolbox
from .turn_begin import Files, Opening, begin_turn, hear

_TURN_FAILED = "Another request of this turn expired, and the turn failed with it; the call was not executed."


@dataclass
class Carried:
    """What the commit of a resumed turn writes, beside its beginning."""

    resumed: Resumed = field(default_factory=Resumed)
    records: list[NewRecord] = field(default_factory=list[NewRecord])
    events: list[NewEvent] = field(default_factory=list[NewEvent])
    #: Approvals that hold for the rest of the session.
    remembers: list[InputRow] = field(default_factory=list[InputRow])
    withdrawn: dict[str, NewEvent] = field(default_factory=dict[str, NewEvent])
    ending: Ending | None = None
    speaker: Principal | None = None
    output_schema: JsonObject | None = None


def carried_out(
    facts: EventFactory, resumption: ResumeTurn, rows: Mapping[str, InputRow], asking: Mapping[int, TurnJournal]
) -> Carried:
    carried = Carried()
    for turn in asking.values():
        carried.speaker = turn.principal or carried.speaker
        carried.output_schema = turn.output_schema or carried.output_schema
    failure = next((found for row in rows.values() if (found := failing(row))), None)
    if failure:
        _fail(carried, facts, resumption, rows, failure)
        return carried
    calls: list[ApprovedCall] = []
    for row in rows.values():
        request = row.request
        if row.status == "open":
            continue
        if outcome := without_run(row):
            settle(carried.records, carried.events, facts, request, outcome)
            continue
        if request.remember and row.status == "answered":
            carried.remembers.append(row)
        calls.append(ApprovedCall(at=place_of(request), call=_ref(request, asking[request.turn])))
    left = tuple(each for each in resumption.open if rows[each.request_id].status == "open")
    carried.resumed = Resumed(calls=tuple(calls), open=left)
    return carried


def settle(
    records: list[NewRecord], events: list[NewEvent], facts: EventFactory, request: InputRequest, outcome: Outcome
) -> None:
    """The outcome stands with the step that asked, and is told where the session is now. Questions are no actions."""
    records.append(written(request.turn, request.step, outcome_slot(request.call_id), OUTCOME, outcome))
    if request.kind == "approval":
        events.append(facts.action_result(request.call_id, request.tool, outcome, place_of(request)))


def place_of(request: InputRequest) -> Coordinates:
    return Coordinates(session_id=request.session_id, turn=request.turn, step=request.step)


def note_of(request: InputRequest | None) -> str:
    """What the model is told of an answer to a request that was closed before, or never made."""
    if request is None:
        return "An answer arrived for a request that this session never made. It changed nothing."
    asked = f"the question {request.prompt!r}" if request.kind == "question" else f"the call of {request.tool}"
    return f"An answer about {asked} arrived after that request was closed. It changed nothing."


def _fail(
    carried: Carried, facts: EventFactory, resumption: ResumeTurn, rows: Mapping[str, InputRow], failure: Failure
) -> None:
    """Nothing of the batch is carried out any more."""
    for row in rows.values():
        request = row.request
        settle(carried.records, carried.events, facts, request, _given_up(row))
        if row.status == "open":
            carried.withdrawn[request.request_id] = resolved(request, "withdrawn", None)
    carried.ending = facts.turn_failed(resumption.mode, failure)
    carried.resumed = Resumed(failure=failure)


def _given_up(row: InputRow) -> Outcome:
    if row.request.kind == "question":
        return without_run(row) or builtin.ignored()
    if row.status == "open":
        return outcomes.failed(_TURN_FAILED, outcomes.DENIED, "rejected")
    return without_run(row) or outcomes.failed(_TURN_FAILED, outcomes.DENIED, "rejected")


def _ref(request: InputRequest, turn: TurnJournal) -> CallRef:
    reply = turn.reply(request.step)
    ref = reply.call(request.call_id).ref if reply else None
    if ref is None:
        raise UnreadableState(f"The records of turn {request.turn} do not hold the call {request.call_id!r}.")
    return ref


@dataclass(frozen=True)
class _ResumeContext:
    """What an attempt knows before it decides."""

    resumption: ResumeTurn
    attempt: Attempt
    agent: Agent
    session: SessionRow
    turn: TurnJournal
    #: All that was open when the turn was started, as it stands now.
    rows: Mapping[str, InputRow]
    heard: tuple[HeardDelivery, ...] = ()

    @property
    def at(self) -> Coordinates:
        return self.resumption.at

    @property
    def facts(self) -> EventFactory:
        return EventFactory(self.at, self.attempt.number)

    @property
    def key(self) -> tuple[int, int, str]:
        return self.at.turn, 0, RESUME

    @property
    def closed(self) -> tuple[InputRow, ...]:
        return tuple(row for row in self.rows.values() if row.status != "open")

    @property
    def due(self) -> tuple[InputRow, ...]:
        """What nobody has answered in time."""
        return tuple(row for each in self.resumption.expired if (row := self.rows.get(each)) and row.status == "open")


class TurnResumer:
    """Carries out what people decided: once, whoever tries and however often."""

    def __init__(self, store: Store, agents: AgentRegistry, files: Files | None = None) -> None:
        self._store = store
        self._files = files
        self._agents = agents

    async def resume(self, resumption: ResumeTurn, attempt: Attempt) -> Resumed:
        while True:
            try:
                return await self._resume(resumption, attempt)
            except (DeliveryTaken, SlotConflict):
                # Somebody was quicker with a delivery, or with another approval: look again.
                continue

    async def _resume(self, resumption: ResumeTurn, attempt: Attempt) -> Resumed:
        at = resumption.at
        if found := await self._store.record(at.session_id, at.turn, 0, RESUME):
            return _resumed(found)
        # What is approved for the rest of the session, and how many calls may run at a time, only the agent says.
        agent = find_agent(self._agents, resumption.agent)
        ctx = await self._read_context(resumption, attempt, agent)
        if ctx.due:
            ctx = await self._expire(ctx)
        ctx = await self._hear(ctx)
        if not (ctx.heard or ctx.closed):
            # An earlier turn has heard it all.
            return Resumed(open=resumption.open, silent=True)
        reach("resume_before_commit")
        resumed = await self._carry_out(ctx)
        reach("resume_after_commit")
        return resumed

    async def _read_context(self, resumption: ResumeTurn, attempt: Attempt, agent: Agent) -> _ResumeContext:
        at = resumption.at
        session, records, rows = await asyncio.gather(
            find_session(self._store, at.session_id, resumption.head),
            self._store.records(at.session_id, from_turn=at.turn, to_turn=at.turn),
            self._rows(at.session_id, [each.request_id for each in resumption.open]),
        )
        return _ResumeContext(resumption, attempt, agent, session, TurnJournal(list(records)), rows)

    async def _rows(self, session_id: str, request_ids: Sequence[str]) -> dict[str, InputRow]:
        found = await asyncio.gather(*(self._store.input(each) for each in request_ids))
        rows = {row.request.request_id: row for row in found if row and row.request.session_id == session_id}
        if missing := set(request_ids) - rows.keys():
            raise UnreadableState("A request that this session waits for is not there.", request_ids=sorted(missing))
        return rows

    async def _hear(self, ctx: _ResumeContext) -> _ResumeContext:
        """The deliveries of this turn, and those of all other answers that are carried out here."""
        wanted = [each.id for each in ctx.resumption.deliveries]
        wanted += [row.delivery_id for row in ctx.closed if row.delivery_id]
        heard, turn = await hear(self._store, ctx.at, list(dict.fromkeys(wanted)), ctx.turn, self._files)
        return replace(ctx, heard=heard, turn=turn)

    # --- nobody has answered in time ---

    async def _expire(self, ctx: _ResumeContext) -> _ResumeContext:
        """Close what is due, before anything is made of it: an answer may come in until it is closed.

        Only then are the deliveries read: one that has answered in the last moment is carried out with the others.
        """
        answers = {row.request.request_id: at_expiry(row.request) for row in ctx.due}
        told = {
            row.request.request_id: resolved(row.request, "expired", answers[row.request.request_id]) for row in ctx.due
        }
        await commit_with_retries(
            self._store,
            Commit(
                ctx.at.session_id,
                unless_cancelled=ctx.at.turn,
                unless=ctx.key,
                expires=answers,
                resolved=told,
                # From here on it is this turn that somebody stops who stops the session.
                change=SessionChange(status="running", turns=ctx.at.turn + 1),
            ),
        )
        closed = await self._rows(ctx.at.session_id, list(answers))
        # The others stay as they were read: what was answered since comes with a delivery of its own.
        return replace(ctx, rows={**ctx.rows, **closed})

    # --- what was decided ---

    async def _carry_out(self, ctx: _ResumeContext) -> Resumed:
        carried = carried_out(ctx.facts, ctx.resumption, ctx.rows, await self._asking(ctx))
        resumed = carried.resumed
        if resumed.calls:
            resumed = resumed.model_copy(update={"parallel": ctx.agent.limits.parallel_calls})
        stored = StoredResumption(
            resumed=resumed,
            notes=await self._notes(ctx),
            speaker=carried.speaker,
            output_schema=carried.output_schema,
        )
        if told := carried.withdrawn:
            # Before the boundary: what follows it belongs to the next turn.
            withdrawal = Commit(
                ctx.at.session_id, unless_cancelled=ctx.at.turn, unless=ctx.key, withdraws=tuple(told), resolved=told
            )
            await commit_with_retries(self._store, withdrawal)
        done = await commit_with_retries(self._store, await self._commit(ctx, carried, stored))
        if done.existing:
            return _resumed(done.existing)
        if carried.ending:
            spans.turn_ended(ctx.resumption.agent, "failed")
        return resumed

    async def _commit(self, ctx: _ResumeContext, carried: Carried, stored: StoredResumption) -> Commit:
        opening, ending = self._opening(ctx), carried.ending
        change = ending.change(turns=ctx.at.turn + 1) if ending else opening.change
        return Commit(
            ctx.at.session_id,
            head=ctx.resumption.head,
            unless_cancelled=ctx.at.turn,
            unless=ctx.key,
            records=(*opening.records, written(*ctx.key, RESUMPTION, stored), *carried.records),
            events=(*opening.events, *carried.events, *(ending.events if ending else ())),
            consume=opening.consume,
            consume_turn=ctx.at.turn,
            slots=await remembering(self._store, ctx.at.session_id, await self._keys(ctx, carried)),
            close=bool(ending and ending.closes),
            close_turn=ctx.at.turn if ending else None,
            change=replace(change, tool_calls=results_in(carried.events)),
        )

    async def _keys(self, ctx: _ResumeContext, carried: Carried) -> list[str]:
        """What is approved for the rest of the session: for the arguments that were approved, not those asked about."""
        found = [await self._key(ctx, row) for row in carried.remembers]
        return [key for key in found if key]

    async def _key(self, ctx: _ResumeContext, row: InputRow) -> str | None:
        request = row.request
        if row.answer is None or row.answer.arguments is None:
            return request.remember
        try:
            tool = (await open_toolbox(ctx.agent))[request.tool]
            runs_with = tool.read(arguments_of(request, row.answer))
            return await remembered_key(request.tool, tool.gate, runs_with.values())
        except Exception:
            # The call itself may still run as it was approved; the next one is asked about again.
            log_of(place_of(request), request.tool, request.call_id).exception("this approval cannot be remembered")
            return None

    def _opening(self, ctx: _ResumeContext) -> Opening:
        model = ctx.agent.model or "unknown"
        return begin_turn(ctx.at, ctx.attempt.number, ctx.heard, ctx.turn, ctx.session.agent, model)

    async def _asking(self, ctx: _ResumeContext) -> dict[int, TurnJournal]:
        """The turns that asked, by their numbers."""
        turns = sorted({row.request.turn for row in ctx.rows.values()})
        read_turns = [await self._store.records(ctx.at.session_id, from_turn=each, to_turn=each) for each in turns]
        return {turn: TurnJournal(list(records)) for turn, records in zip(turns, read_turns, strict=True)}

    async def _notes(self, ctx: _ResumeContext) -> tuple[str, ...]:
        """What the model is told of answers that came too late: they never authorise anything."""
        late = [each for heard in ctx.heard for each in heard.answers if each not in ctx.rows]
        rows = [await self._store.input(each) for each in dict.fromkeys(late)]
        requests = [row.request if row and row.request.session_id == ctx.at.session_id else None for row in rows]
        return tuple(dict.fromkeys(note_of(request) for request in requests))


def _resumed(record: Record) -> Resumed:
    if record.format == FAILURE:
        return Resumed(failure=read(record, FAILURE, StoredFailure).failure)
    return read(record, RESUMPTION, StoredResumption).resumed
