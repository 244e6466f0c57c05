"""Programs whose worker dies: no call is made twice, and none that has ended is made again."""

import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.chaos.world import dies_at, unique
from tests.support.ledger import Ledger, running_ledger
from tests.support.stack import Stack
from tests.support.talk import text
from tests.support.waiting import until

from .test_sessions import approve, asked, program, requests_in

pytestmark = pytest.mark.chaos

#: Where a worker dies, and at which pass; and what becomes of the two charges.
BOTH = ("charged a", "charged b")
DEATHS = {
    **{f"program_{moment}:{number}": BOTH for moment in ("before_stage", "before_settle") for number in (1, 2, 3)},
    **{f"program_after_settle:{number}": BOTH for number in (1, 2, 3)},
    **{f"tool_{moment}:{number}": BOTH for moment in ("before_intent", "after_settle") for number in (1, 2)},
    **{f"tool_{moment}:1": ("unknown", "charged b") for moment in ("after_intent", "after_effect", "before_settle")},
    **{f"tool_{moment}:2": ("charged a", "unknown") for moment in ("after_intent", "after_effect", "before_settle")},
}


#: What `make test` runs of them, by how turns run; `make chaos` runs all. Each kind of death is in one of both.
QUICK = {
    "child": {
        *("program_before_stage:1", "program_before_settle:2", "program_after_settle:3"),
        *("tool_before_intent:2", "tool_after_effect:1", "tool_before_settle:2"),
        *("resume_after_commit", "tool_after_effect", "park_after_commit"),
    },
    "inline": {
        *("program_before_settle:1", "program_after_settle:2", "tool_after_intent:2", "tool_after_settle:1"),
        *("program_after_settle", "park_before_commit"),
    },
}


def is_of_many(place: str, point: str) -> bool:
    return point not in QUICK[place]


of_many = pytest.mark.slow_where.with_args(is_of_many)


@dataclass
class Place:
    stack: Stack
    ledger: Ledger


@pytest.fixture(scope="module", params=["child", "inline"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Place]:
    directory = tmp_path_factory.mktemp("deaths")
    with running_ledger(directory) as ledger:
        environment = {
            "PERDURE_TURNS": request.param,
            "PERDURE_HEARTBEAT_TIMEOUT": "2",
            "LEDGER_URL": ledger.url,
        }
        agents = "tests.code_mode.agents:agents"
        with Stack(directory, provider=True, agents=agents, environment=environment) as stack:
            yield Place(stack, ledger)


def charges(word: str) -> str:
    return program(
        "done = []",
        'for note in ("a", "b"):',
        "    try:",
        f'        done.append(await charge(note=note + "{word}"))',
        "    except RuntimeError as error:",
        "        done.append(str(error))",
        'print("all done")',
        "done",
    )


@of_many
@pytest.mark.parametrize(("point", "expected"), DEATHS.items())
async def test_a_program_survives_its_worker(
    place: Place, tmp_path: Path, point: str, expected: tuple[str, str]
) -> None:
    word, stack = unique(), place.stack
    stack.workers[-1].kill()
    doomed = stack.start_worker(dies_at(point, tmp_path / "once"))
    async with stack.talk() as talk:
        await talk.create(charges(word))
        await until(lambda: not doomed.alive, "the worker to die")
        stack.start_worker()
        answer = text(await talk.until_boundary())

    for note, outcome in zip(("a", "b"), expected, strict=True):
        effects = place.ledger.of_call("charge", note + word)
        if outcome == "unknown":
            assert "Outcome unknown" in answer
            assert len(effects) == (0 if "intent" in point else 1)
        else:
            assert outcome + word in answer
            assert len(effects) == 1
    assert answer.count("all done") == 1


async def test_a_killed_worker_does_not_forget_where_a_program_waits_for_people(place: Place) -> None:
    word, stack = unique(), place.stack
    lines = (f'x = await charge(note="{word}")', f'y = await refund(note="{word}")', "[x, y]")
    async with stack.talk() as talk:
        _, (request,) = await asked(talk, program(*lines))
        stack.workers[-1].kill()
        stack.start_worker()
        await talk.send(inputResponses=approve(request))
        answer = text(await talk.until_boundary())

    assert answer == f'Results: ["charged {word}","refunded {word}"]'
    assert [len(place.ledger.of_call(tool, word)) for tool in ("charge", "refund")] == [1, 1]


@of_many
@pytest.mark.parametrize(
    "point",
    [
        *("resume_before_commit", "resume_after_commit", "tool_after_effect", "tool_after_settle"),
        *("program_before_stage", "program_after_settle", "park_before_commit", "park_after_commit"),
    ],
)
async def test_a_program_survives_its_worker_after_an_answer(place: Place, tmp_path: Path, point: str) -> None:
    word, stack = unique(), place.stack
    lines = (
        *("try:", f'    x = await refund(note="{word}")', "except RuntimeError as error:", "    x = str(error)"),
        f'y = await refund(note="2{word}")',
        "[x, y]",
    )
    async with stack.talk() as talk:
        _, (first,) = await asked(talk, program(*lines))
        stack.workers[-1].kill()
        doomed = stack.start_worker(dies_at(point, tmp_path / "once"))
        await talk.send(inputResponses=approve(first))
        await until(lambda: not doomed.alive, "the worker to die")
        stack.start_worker()
        (second,) = requests_in(await talk.until_boundary())
        await talk.send(inputResponses=approve(second))
        answer = text(await talk.until_boundary())

    assert [len(place.ledger.of_call("refund", note)) for note in (word, f"2{word}")] == [1, 1]
    assert ("Outcome unknown" if point == "tool_after_effect" else f'"refunded {word}"') in answer
    assert f"refunded 2{word}" in answer


async def test_a_program_survives_its_worker_while_a_subagent_works(place: Place) -> None:
    word, stack = unique(), place.stack
    lines = (f'x = await charge(note="{word}")', 'y = await clerk(message="drip 8 words delay 200")', "[x, y]")
    async with stack.talk() as talk:
        await talk.create(program(*lines))
        await talk.until("subagent.called")
        stack.workers[-1].kill()
        stack.start_worker()
        answer = text(await talk.until_boundary())

    assert f"charged {word}" in answer
    assert "w7" in answer
    assert len(place.ledger.of_call("charge", word)) == 1


async def test_calls_that_are_made_at_once_run_at_once(place: Place) -> None:
    gates = [unique() for _ in range(3)]
    calls = ", ".join(f'meet(gate="{gate}")' for gate in gates)
    async with place.stack.talk() as talk:
        await talk.create(program("import asyncio", f"await asyncio.gather({calls})"))
        await until(lambda: all(map(place.ledger.reached, gates)), "all calls to run")
        for gate in gates:
            place.ledger.open(gate)

        answer = text(await talk.until_boundary())

    assert answer == "Results: " + json.dumps(gates, separators=(",", ":"))
