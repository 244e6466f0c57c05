"""The stages of a program, attempt by attempt, on both stores."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from perdure import Agent, InvalidDeclaration, Limits, tool
from perdure.harness.journal import STAGE, TurnJournal, read_journal
from perdure.harness.programs import program as programs
from perdure.harness.programs.sandbox import Answer, Request
from perdure.protocol.deliveries import Bounds
from perdure.protocol.names import stage_key
from perdure.protocol.requests import CallRef, Coordinates, ParkTurn, ProgramOutcome, Programs, ToolCall
from perdure.settings import Settings
from perdure.store.open import open_store
from perdure.store.values import Attempt, Commit, NewRecord
from perdure.testing import ScriptedModel, call, play
from tests.support.lab import SESSION, YES, Lab
from tests.support.tools import pay

made: list[int] = []


@tool(effects="pure")
def double(number: int) -> int:
    """Double a number."""
    made.append(number)
    return 2 * number


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    return "sqlite:///:memory:" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
async def it(database: str) -> AsyncGenerator[Lab]:
    made.clear()
    store = await open_store(database)
    try:
        await store.migrate()
        agent = Agent("tester", tools=[double, pay], code_mode=True)
        it = Lab(store, agent, ScriptedModel([]), "conversation", Settings(agents=""))
        it.can_ask = True
        yield it
    finally:
        await store.close()


async def begin(it: Lab, code: str) -> CallRef:
    it.models.now = ScriptedModel([call("code_mode", code=code)])
    outcome = await it.model(await it.deliver("Go"))
    assert isinstance(outcome, Programs)
    (ref,) = outcome.programs
    return ref


async def advance(it: Lab, ref: CallRef, *, generation: int = 1, told_at: int | None = None) -> ProgramOutcome:
    at = Coordinates(session_id=SESSION, turn=0)
    told = None if told_at is None else Coordinates(session_id=SESSION, turn=told_at)
    made = ToolCall(at=at, told_at=told, agent="tester", call=ref)
    return await it.harness.run_program(made, Attempt(generation, generation))


async def outcome_of(it: Lab, call_id: str) -> Any:
    outcome = (await journal(it)).outcome(0, call_id)
    assert outcome is not None
    return outcome.output


async def journal(it: Lab) -> TurnJournal:
    return await read_journal(it.store, SESSION, 0)


async def test_a_second_attempt_at_a_stage_changes_nothing(it: Lab) -> None:
    ref = await begin(it, "x = await double(2)\nawait double(x)")
    first = await advance(it, ref)
    before = await it.events()

    assert await advance(it, ref, generation=2) == first

    assert await it.events() == before
    assert len((await journal(it)).stages(0, ref.call_id)) == 1


async def test_a_program_runs_from_stage_to_stage(it: Lab) -> None:
    ref = await begin(it, "x = await double(2)\nawait double(x)")
    for _ in range(2):
        waiting = await advance(it, ref)
        await it.tool(waiting.calls[0])
    end = await advance(it, ref)

    assert end.ended
    assert await outcome_of(it, ref.call_id) == 8
    assert made == [2, 4]
    assert "code_mode" not in str(await it.events())


@pytest.mark.parametrize("state", [None, "AAAA"])
async def test_a_state_that_cannot_be_loaded_runs_the_program_against_what_is_recorded(
    it: Lab, monkeypatch: pytest.MonkeyPatch, state: str | None
) -> None:
    ref = await begin(it, "x = await double(2)\ny = await double(x)\n[x, y]")
    monkeypatch.setattr(programs, "run_in_process", with_state(state))
    for _ in range(2):
        await it.tool((await advance(it, ref)).calls[0])
    await advance(it, ref)

    assert await outcome_of(it, ref.call_id) == [4, 8]
    assert made == [2, 4]


def with_state(state: str | None) -> Any:
    """The sandbox of another version: its states cannot be loaded by this one."""
    original = programs.run_in_process

    async def run(request: Request, family: str) -> Answer:
        answer = await original(request, family)
        return {**answer, "state": state} if "calls" in answer else answer

    return run


async def test_a_repeated_run_that_makes_another_call_is_a_clear_failure(
    it: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await begin(it, "x = await double(2)\nx")
    monkeypatch.setattr(programs, "run_in_process", with_other_digests())
    await it.tool((await advance(it, ref)).calls[0])
    monkeypatch.undo()
    await advance(it, ref)

    output = await outcome_of(it, ref.call_id)
    assert "call 1 was not the one that it had made before" in output
    assert "1. double: completed" in output
    assert made == [2]


def with_other_digests() -> Any:
    original = programs.run_in_process

    async def run(request: Request, family: str) -> Answer:
        answer = await original(request, family)
        calls = [{**each, "digest": "other"} for each in answer.get("calls", [])]
        return {**answer, "state": None, "calls": calls}  # type: ignore[typeddict-item]

    return run


async def test_a_failed_program_says_which_calls_it_has_made(it: Lab) -> None:
    ref = await begin(it, "await double(2)\nraise ValueError('stop')")
    await it.tool((await advance(it, ref)).calls[0])
    await advance(it, ref)

    output = await outcome_of(it, ref.call_id)
    assert "ValueError: stop" in output
    assert output.endswith("1. double: completed")


async def test_invalid_calls_are_errors_in_the_program(it: Lab) -> None:
    ref = await begin(it, "try:\n  await double('two')\nexcept RuntimeError as error:\n  x = str(error)\nx")
    refused = await advance(it, ref)
    assert (refused.calls, refused.ended) == ((), False)
    await advance(it, ref)

    assert "Invalid arguments for double" in await outcome_of(it, ref.call_id)
    assert made == []


async def test_the_end_of_a_turn_ends_its_programs_and_their_calls(it: Lab) -> None:
    ref = await begin(it, "import asyncio\nawait asyncio.gather(double(1), pay(amount=2))")
    waiting = await advance(it, ref)
    await it.tool(waiting.calls[0])
    await park(it, waiting)
    (request,) = waiting.open
    assert await it.status_of(request) == "open"

    await it.cancel(turn=0)

    assert await it.status_of(request) == "withdrawn"
    turn = await journal(it)
    assert [outcome.status for each in turn.calls(0) if (outcome := turn.outcome(0, each.call_id))] == [
        *("completed", "rejected", "failed")
    ]
    assert (await advance(it, ref)).ended


async def park(it: Lab, waiting: ProgramOutcome, turn: int = 0) -> None:
    at = Coordinates(session_id=SESSION, turn=turn)
    asked = Coordinates(session_id=SESSION, turn=0)
    await it.harness.park_turn(ParkTurn(at=at, agent="tester", open=waiting.open, programs=(asked,)))


async def test_parking_twice_opens_a_request_once(it: Lab) -> None:
    ref = await begin(it, "await pay(amount=2)")
    waiting = await advance(it, ref)
    await park(it, waiting)
    before = await it.events()
    await park(it, waiting)

    assert await it.events() == before
    (emitted,) = await it.emitted("input.requested")
    assert [each["action"]["callId"] for each in emitted["requests"]] == [f"{ref.call_id}:tool-1"]


async def test_a_resumed_turn_says_which_programs_go_on(it: Lab) -> None:
    ref = await begin(it, "await pay(amount=2)")
    waiting = await advance(it, ref)
    await park(it, waiting)
    resumed = await it.resume(await it.answer((waiting.open[0], YES)), open=waiting.open)

    assert resumed.kind == "programs"
    assert [each.call.call_id for each in resumed.programs] == [ref.call_id]
    await it.run_approved(resumed.calls[0])
    assert (await advance(it, ref, told_at=1)).ended


async def test_a_stage_that_only_a_newer_build_reads_is_left_to_it(it: Lab) -> None:
    ref = await begin(it, "await double(2)")
    key = (0, 0, stage_key(ref.call_id, 0))
    newer = NewRecord(*key, f"{STAGE.name}/99", {})
    await it.store.commit(Commit(SESSION, records=(newer,)))

    with pytest.raises(Exception, match=r"newer|version"):
        await advance(it, ref)


async def test_a_program_may_make_only_so_many_calls() -> None:
    agent = Agent("tester", tools=[double], code_mode=True, limits=Limits(calls_per_program=3))
    made.clear()
    code = "x = 1\nwhile True: x = await double(x)"
    played = await play(agent, "Go", model=ScriptedModel([call("code_mode", code=code), "Done"]))

    assert made == [1, 2, 4]
    assert played.text == "Done"


def family(it: Lab, limits: Limits) -> None:
    """Give the agent of the lab others to which it hands work."""
    it.agent = replace(it.agent, subagents=[Agent("helper")], limits=limits)
    it.harness = it.worker()


async def test_the_states_of_the_programs_of_a_turn_take_only_so_much_room(it: Lab) -> None:
    kept = "import random\nstate = [random.random() for _ in range(80_000)]\n"
    ref = await begin(it, f"{kept}x = 1\nfor _ in range(14):\n    x = await double(x)\nx")

    sizes: list[int] = []
    while not (waiting := await advance(it, ref)).ended:
        sizes = [len(each.state or "") for each in (await journal(it)).stages(0, ref.call_id)]
        await it.tool(waiting.calls[0])

    assert 500_000 < sizes[0] < 1_048_576
    assert sum(sizes) <= 8 * 1_048_576
    # Without a state the program ran from its beginning.
    assert (len(sizes), sizes[-1], len(made)) == (14, 0, 14)
    assert await outcome_of(it, ref.call_id) == 2**14


async def test_programs_of_one_step_together_hand_on_as_many_tasks_as_the_step_may(it: Lab) -> None:
    family(it, Limits(subagents_per_step=3))
    code = "import asyncio\nawait asyncio.gather(helper(message='a'), helper(message='b'))"
    it.models.now = ScriptedModel([[call("code_mode", code=code) for _ in range(4)]])
    outcome = await it.model(await it.deliver("Go"))
    assert isinstance(outcome, Programs)

    ran = await asyncio.gather(*(advance(it, ref) for ref in outcome.programs))

    assert sum(len(each.keys) for each in ran) == 3
    assert sum(bool(each.child) for each in (await journal(it)).calls(0)) == 3
    assert len((await journal(it)).calls(0)) == 8 + 4


async def test_a_program_of_a_session_that_another_server_has_started_is_as_deep_as_that_says(it: Lab) -> None:
    family(it, Limits())
    it.bounds = Bounds(depth=3)
    ref = await begin(it, "try:\n    await helper(message='a')\nexcept RuntimeError as refused:\n    print(refused)")

    waiting = await advance(it, ref)
    assert (waiting.keys, waiting.ended) == ((), False)
    await advance(it, ref)

    assert "agents may hand work on 3 times only" in (await outcome_of(it, ref.call_id))["printed"]


async def test_the_model_gets_one_tool_with_typed_functions() -> None:
    model = ScriptedModel(["Hi"])
    await play(Agent("tester", tools=[double, pay], code_mode=True), "Go", model=model, can_ask=False)

    (offered,) = model.prompts[0].tools
    assert offered.name == "code_mode"
    assert 'async def double(*, number: int) -> int:\n    """Double a number."""' in (offered.description or "")


async def test_a_tool_of_the_agent_is_not_called_without_a_program() -> None:
    model = ScriptedModel([call("double", number=2), "Done"])
    played = await play(Agent("tester", tools=[double], code_mode=True), "Go", model=model)

    assert [each.status for each in played.tool_calls] == ["failed"]
    assert "Tools that exist: code_mode" in played.tool_calls[0].output


def test_without_the_extra_the_declaration_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds_nothing(name: str) -> None:
        del name

    monkeypatch.setattr("perdure.agents.agent.find_spec", finds_nothing)

    with pytest.raises(InvalidDeclaration, match=r"perdure\[codemode\]"):
        Agent("tester", code_mode=True)


async def test_two_tools_that_a_program_could_not_tell_apart_are_refused() -> None:
    from perdure.harness.tools.toolbox import check_tools

    @tool(name="my-tool")
    def one() -> None: ...

    @tool(name="my_tool")
    def two() -> None: ...

    with pytest.raises(InvalidDeclaration, match=r"Agent .*same name in a program, my_tool: rename one"):
        await check_tools([replace(Agent("tester", tools=[one, two]), code_mode=True)])
