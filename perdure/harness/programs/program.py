"""Programs that the model writes: each runs until it ends or waits for its calls, which are calls of the same turn.

Nothing is kept in memory between two stages. A stage is a record: the calls that the program waits for, and its state.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_ai.messages import ToolCallPart

from perdure.agents.agent import Agent
from perdure.agents.registry import AgentRegistry
from perdure.bounds import seconds_until, whole
from perdure.errors import Invalid, Unavailable, UnreadableState
from perdure.faults import reach
from perdure.harness.events import EventFactory, results_in
from perdure.harness.journal import (
    OUTCOME,
    STAGE,
    StoredReply,
    TurnJournal,
    find_agent,
    find_session,
    read_journal,
    view_of,
    written,
)
from perdure.harness.reply import ReplyReader, RequestedCalls
from perdure.harness.tools import outcomes
from perdure.harness.tools.approvals import Approvals, Clock, remembered
from perdure.harness.tools.builtin import functions_of, open_functions
from perdure.harness.tools.call import deadline_of, speaker_of
from perdure.harness.tools.limits import refuse_killer
from perdure.harness.tools.records import Outcome, RequestedCall, StoredStage
from perdure.protocol import names
from perdure.protocol.requests import Coordinates, ProgramOutcome, ToolCall
from perdure.settings import Settings
from perdure.store.base import Store, commit_with_retries
from perdure.store.values import AlreadyBegun, Attempt, Commit, SessionChange, SessionRow

from .process import run_in_process
from .sandbox import Answer, CallOfProgram, PastStage, Request, Result
from .stubs import parameters_of

#: Characters of the states that the programs of a turn may leave in its records.
_MOST_STATES = 8 * 1024 * 1024

_TOO_LATE = "The program was stopped at the deadline of its turn."
_DIVERGED = (
    "The program could not go on where it was: it had to run again from its beginning, and call {} was not the one "
    "that it had made before."
)


@dataclass(frozen=True)
class _Program:
    """A program as far as it has come, in one attempt."""

    call: ToolCall
    attempt: Attempt
    agent: Agent
    row: SessionRow
    reply: StoredReply
    #: When the reply was recorded: the time that the program sees.
    began_at: str
    turn: TurnJournal
    stages: Sequence[StoredStage]
    deadline: float | None

    @property
    def at(self) -> Coordinates:
        return self.call.at

    @property
    def call_id(self) -> str:
        return self.call.call.call_id

    @property
    def code(self) -> str:
        return str(self.reply.call(self.call_id).input.get("code", ""))

    @property
    def calls(self) -> Sequence[RequestedCall]:
        return [call for stage in self.stages for call in stage.calls]

    @property
    def stage_key(self) -> str:
        """The key of the next stage."""
        return names.stage_key(self.call_id, len(self.stages))

    @property
    def next_stages_of_others(self) -> Sequence[tuple[int, int, str]]:
        """The keys of what the other programs of the step record next."""
        at, others = self.at, [each for each in self.reply.calls if each.program and each.call_id != self.call_id]
        counts = [(each.call_id, len(self.turn.stages(at.step, each.call_id))) for each in others]
        return [(at.turn, at.step, names.stage_key(call_id, count)) for call_id, count in counts]

    @property
    def outcome_key(self) -> tuple[int, int, str]:
        return self.at.turn, self.at.step, names.outcome_key(self.call_id)

    def outcome_of(self, call: RequestedCall) -> Outcome | None:
        return self.turn.outcome(self.at.step, call.call_id)


class ProgramRunner:
    """Runs programs from stage to stage. Any stage may be repeated at any time: the first record of it counts."""

    def __init__(self, store: Store, agents: AgentRegistry, settings: Settings, clock: Clock = time.time) -> None:
        self._store = store
        self._agents = agents
        self._settings = settings
        self._clock = clock

    async def run(self, call: ToolCall, attempt: Attempt) -> ProgramOutcome:
        """Let the program go on, unless it has ended or still waits for results."""
        program = await self._load(call, attempt)
        if program.turn.outcome(program.at.step, program.call_id):
            return _ended(program)
        if missing := [each for each in program.calls if program.outcome_of(each) is None]:
            return _waiting(program, missing)
        refuse_killer(attempt, program.agent.limits)
        if program.deadline is not None and seconds_until(program.deadline, self._clock()) == 0:
            return await self._settle(program, _failed(program, _TOO_LATE))
        reach("program_before_stage")
        answer = await self._advance(program)
        match answer:
            case {"calls": calls}:
                return await self._record_stage(program, calls, answer)
            case {"value": [value]}:
                return await self._settle(program, self._completed(program, value, answer))
            case {"diverged": number}:
                return await self._settle(program, _failed(program, _DIVERGED.format(number)))
            case {"error": error}:
                return await self._settle(program, _failed(program, _with_printed(error, answer)))
            case _:
                raise Unavailable("A program could not be run on this worker.")

    async def _load(self, call: ToolCall, attempt: Attempt) -> _Program:
        at = call.at
        agent = find_agent(self._agents, call.agent)
        row, turn = await asyncio.gather(
            find_session(self._store, at.session_id), read_journal(self._store, at.session_id, at.turn)
        )
        record, reply = await self._store.record(at.session_id, at.turn, at.step, names.REPLY), turn.reply(at.step)
        if record is None or reply is None:
            raise UnreadableState("There is no record of the reply that asks for this program.")
        stages = turn.stages(at.step, call.call.call_id)
        deadline = await deadline_of(self._store, agent, call, reply)
        return _Program(call, attempt, agent, row, reply, record.at, turn, stages, deadline)

    # --- the sandbox ---

    async def _advance(self, program: _Program) -> Answer:
        definitions = await functions_of(program.agent)
        last = program.stages[-1] if program.stages else None
        every = [_past(program, stage) for stage in program.stages]
        most = program.agent.limits.calls_per_program
        request: Request = {
            "code": program.code,
            "functions": {
                name: {"tool": each.name, "parameters": parameters_of(each)} for name, each in definitions.items()
            },
            "seed": f"{program.at.session_id}/{program.at.turn}/{program.at.step}/{program.call_id}",
            "now": program.began_at,
            "calls": most - len(program.calls) if last and last.state else most,
            "state": last.state if last else None,
            "past": every[-1:] if last and last.state else every,
            "printed": last.printed if last else "",
            "room": _MOST_STATES - program.turn.states_of_programs(),
        }
        family = program.row.root_id or program.row.session_id
        answer = await run_in_process(request, family)
        if not answer.get("unloadable"):
            return answer
        # Another version of the interpreter has written the state.
        return await run_in_process({**request, "state": None, "past": every, "calls": most}, family)

    # --- what has become of it ---

    def _completed(self, program: _Program, value: Any, answer: Answer) -> Outcome:
        printed = answer.get("printed")
        try:
            shown = {"result": value, "printed": printed} if printed else value
            return outcomes.completed(shown, self._settings.max_tool_output_bytes)
        except Invalid as unsendable:
            return _failed(program, unsendable.message)

    async def _record_stage(self, program: _Program, calls: Sequence[CallOfProgram], answer: Answer) -> ProgramOutcome:
        at, key = program.at, program.stage_key
        requested = await self._read(program, calls)
        stage = StoredStage(
            calls=requested.calls,
            digests=tuple(each["digest"] for each in calls),
            state=answer.get("state"),
            engine=answer.get("engine", ""),
            printed=answer.get("printed", ""),
            parallel=requested.parallel,
        )
        factory = EventFactory(program.call.told_at or at, program.attempt.number)
        events = requested.events(factory, at, f"actions/{program.call_id}/{len(program.stages)}")
        # The limit of the step was compared with what its programs had handed on when this one was loaded.
        uncounted = program.next_stages_of_others if any(call.child for call in requested.calls) else ()
        commit = Commit(
            at.session_id,
            unless_cancelled=factory.at.turn,
            unless=(at.turn, at.step, key),
            # The end of the turn has closed the program.
            without=[program.outcome_key, *uncounted],
            records=(written(at.turn, at.step, key, STAGE, stage), *requested.records(at)),
            events=tuple(events),
            change=SessionChange(tool_calls=results_in(events)),
        )
        reach("program_before_settle")
        with contextlib.suppress(AlreadyBegun):
            await commit_with_retries(self._store, commit)
        reach("program_after_settle")
        # Another attempt may have been first.
        again = await self._load(program.call, program.attempt)
        if again.turn.outcome(at.step, program.call_id):
            return _ended(again)
        if len(again.stages) == len(program.stages):
            # Another program was faster, and may have handed on what this one was to.
            return await self.run(program.call, program.attempt)
        return _waiting(again, [each for each in again.calls if again.outcome_of(each) is None])

    async def _read(self, program: _Program, calls: Sequence[CallOfProgram]) -> RequestedCalls:
        """The calls as those of a reply are read: which of them run, wait for people or another session, or neither."""
        at, agent, row = program.at, program.agent, program.row
        offer = await open_functions(agent)
        remembers = any(tool.approval_policy.approval == "once" for tool in offer.tools.values())
        approvals = Approvals(
            at=at,
            view=view_of(row, at, await speaker_of(self._store, at, program.reply)),
            can_ask=row.capabilities.request_input,
            remembered=(await remembered(self._store, at.session_id))[0] if remembers else frozenset(),
            clock=self._clock,
        )
        reader = ReplyReader(offer, approvals, self._settings, agent.limits, row.depth)
        first = len(program.calls) + 1
        ids = [names.call_of_program(program.call_id, number) for number in range(first, first + len(calls))]
        parts = [
            ToolCallPart(each["tool"], each["arguments"] or "{}", tool_call_id=call_id)
            for call_id, each in zip(ids, calls, strict=True)
        ]
        problems = {call_id: each["problem"] for call_id, each in zip(ids, calls, strict=True) if each["problem"]}
        begun = sum(bool(call.child) for call in program.turn.calls(at.step))
        children = agent.limits.subagents_per_step - begun
        read = await reader.read_calls_of_program(parts, problems, children=children, stage=program.stage_key)
        if program.deadline is None:
            return read
        return RequestedCalls(
            tuple(_until(call, program.deadline) for call in read.calls), read.refused, parallel=read.parallel
        )

    async def _settle(self, program: _Program, outcome: Outcome) -> ProgramOutcome:
        """Record the outcome. Readers see the calls of a program, not the program."""
        at = program.at
        reach("program_before_settle")
        await commit_with_retries(
            self._store,
            Commit(
                at.session_id,
                unless_cancelled=(program.call.told_at or at).turn,
                unless=program.outcome_key,
                records=(written(*program.outcome_key, OUTCOME, outcome),),
            ),
        )
        reach("program_after_settle")
        return _ended(program)


def _ended(program: _Program) -> ProgramOutcome:
    return ProgramOutcome(call_id=program.call_id, ended=True)


def _waiting(program: _Program, missing: Sequence[RequestedCall]) -> ProgramOutcome:
    return ProgramOutcome(
        call_id=program.call_id,
        calls=tuple(call.ref for call in missing if call.ref and call.runs),
        parallel=program.agent.limits.parallel_calls,
        open=tuple(call.ask.open for call in missing if call.ask),
        keys=tuple(call.key for call in missing if call.child),
        deadline=program.deadline,
    )


def _until(call: RequestedCall, deadline: float) -> RequestedCall:
    child = call.child.model_copy(update={"deadline": deadline}) if call.child else None
    return call.model_copy(update={"child": child})


def _failed(program: _Program, problem: str) -> Outcome:
    made = outcomes.made_by(program.turn, program.at.step, program.call_id)
    return outcomes.failed(outcomes.of_program(whole(problem), made))


def _with_printed(error: str, answer: Answer) -> str:
    printed = answer.get("printed")
    return f"{error}\nIt had printed:\n{printed}" if printed else error


def _past(program: _Program, stage: StoredStage) -> PastStage:
    return {"digests": list(stage.digests), "results": [_result(program, call) for call in stage.calls]}


def _result(program: _Program, call: RequestedCall) -> Result:
    outcome = program.outcome_of(call)
    if outcome is None:
        raise UnreadableState(f"There is no result of the call {call.call_id!r}.")
    error = outcomes.as_text(outcome.output) if outcome.is_error else None
    if outcome.is_error and outcome.error:
        error = str(outcome.error.get("message", error))
    return {"value": outcome.output, "error": error, "denied": outcome.status == "rejected"}
