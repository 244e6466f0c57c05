"""The states of the table in docs/resuming.md: how a session gets there."""

import contextlib
import json
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from tests.support.chaos.evidence import Json
from tests.support.chaos.people import answer, asked, cancel, kinds
from tests.support.chaos.scripts import say
from tests.support.chaos.world import Caller, World, running_world, unique
from tests.support.processes import free_port
from tests.support.waiting import until

from .agents import REMOTE_URL

#: For what a turn waits that has handed work on.
Others: TypeAlias = Literal["children", "a remote", "code"]


@dataclass
class Case:
    """One session in one state."""

    world: World
    caller: Caller
    #: What the model says in the end.
    answer: str
    #: By which the ledger knows the calls, and the gate that holds one of them.
    note: str = ""
    gate: str = ""
    #: What the session asks, by kind.
    requests: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def approval(self) -> str:
        return self.requests["approval"]

    @property
    def question(self) -> str:
        return self.requests["question"]

    def effects(self, tool: str) -> int:
        return len(self.world.ledger.of_call(tool, self.note))


Arrange: TypeAlias = Callable[[World], Awaitable[Case]]
_QUESTION = 'ask_question {"prompt": "Which?", "options": ["red", "blue"]}'


async def idle(world: World) -> Case:
    case = Case(world, world.caller(), "")
    script = say()
    assert await case.caller.say(script.message) == script.answer
    return case


async def running(world: World) -> Case:
    """A tool is at work."""
    case = _case(world)
    await case.caller.create(f'call charge {{"note": "{case.note}", "before": "{case.gate}"}} then say {case.answer}')
    await at_its_gate(case)
    return case


async def on_approval(world: World, tool: str = "pay") -> Case:
    return await _parked(world, lambda case: f'{tool} {{"note": "{case.note}"}}')


async def on_question(world: World) -> Case:
    return await _parked(world, lambda case: _QUESTION)


async def on_both(world: World, tool: str = "pay") -> Case:
    return await _parked(world, lambda case: f'{tool} {{"note": "{case.note}"}} and {_QUESTION}')


async def half_answered(world: World, other: str = "pay", *, cling: bool = False) -> Case:
    """One of two requests was approved and is carried out; the other one is still open."""
    note = unique("n")
    clings = ', "cling": true' if cling else ""
    case = await _parked(
        world,
        lambda case: f'pay {{"note": "{case.note}", "before": "{case.gate}"{clings}}} and {other} {{"note": "{note}"}}',
    )
    rows = world.store().inputs[case.caller.session_id]
    held, open = sorted(rows, key=lambda row: row["request"]["input"]["note"] != case.note)
    case.requests = {"approval": open["request_id"], "held": held["request_id"]}
    await answer(case.caller, held["request_id"])
    await at_its_gate(case)
    return case


async def cancelling(world: World) -> Case:
    """A tool runs that does not react to a cancel, and its turn is to be cancelled."""
    case = await half_answered(world, cling=True)
    assert await cancel(case.caller) == "accepted"
    return case


async def finished(world: World) -> Case:
    case = Case(world, world.caller(), unique())
    await case.caller.create(f"say {case.answer}", mode="task")
    await case.caller.until_boundary()
    return case


def waiting_for(others: Others) -> Arrange:
    """The turn has handed work on: a tool is at work there."""

    async def arrange(world: World) -> Case:
        return await handed(world, others)

    return arrange


async def handed(world: World, others: Others, asks: str | None = None) -> Case:
    """A session that waits for others; `asks`: the tool about which people are asked meanwhile."""
    case = _case(world)
    work = f'call charge {{"note": "{case.note}", "before": "{case.gate}"}}'
    if others == "code":
        made = [f"helper(message={json.dumps(work)})", *([f'{asks}(note="{case.note}")'] if asks else [])]
        await _create(
            case, "coder", _call("code_mode", code=f"import asyncio\nawait asyncio.gather({', '.join(made)})")
        )
    elif others == "children":
        # It is a child that asks.
        tasks = [work, *([f"call {_call(asks, note=case.note)}"] if asks else [])]
        await _create(case, "boss", *(_call("helper", message=task) for task in tasks))
    else:
        await _create(case, "boss", _call("away", message=work), *([_call(asks, note=case.note)] if asks else []))
    if asks is not None:
        case.requests = {"approval": await _only_request(case)}
    await at_its_gate(case)
    return case


async def child_on_approval(world: World) -> Case:
    """A child waits for people, and the session for it."""
    case = _case(world)
    await _create(case, "boss", _call("helper", message=f"call {_call('pay', note=case.note)}"))
    case.requests = {"approval": await _only_request(case)}
    return case


STATES: dict[str, Arrange] = {
    "idle": idle,
    "running": running,
    "parked on approval": on_approval,
    "parked on question": on_question,
    "parked on both": on_both,
    "cancelling": cancelling,
    "finished": finished,
    "waiting for children": waiting_for("children"),
    "waiting for a remote": waiting_for("a remote"),
    "waiting for code": waiting_for("code"),
}


@contextlib.contextmanager
def world_of_states(directory: Path, environment: Mapping[str, str] | None = None) -> Generator[World]:
    """A world without workers, in which a session can come into all states."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    remote = {REMOTE_URL: url, "PERDURE_PUBLIC_URL": url, "PERDURE_LOCAL_CALLBACKS": "true"}
    everywhere = {**(environment or {}), **remote}
    agents = "tests.parking.agents:agents"
    with running_world(directory, everywhere, agents=agents, workers=0, apis=0) as world:
        world.stack.start_api({"PERDURE_PORT": str(port)})
        yield world


# --- helpers ------------------------------------------------------------------------------------------------


def _case(world: World) -> Case:
    return Case(world, world.caller(), unique(), note=unique("n"), gate=unique("g"))


async def _parked(world: World, calls: Callable[[Case], str]) -> Case:
    case = _case(world)
    await case.caller.create(f"call {calls(case)} then say {case.answer}")
    events = await case.caller.until_boundary()
    case.requests = dict(zip(kinds(events), asked(events), strict=True))
    return case


async def _create(case: Case, agent: str, *calls: str) -> None:
    caller = case.caller
    message = f"call {' and '.join(calls)} then say {case.answer}"
    made = caller.received(await caller.http.post(f"/agents/{agent}/eve/v1/session", json={"message": message}))
    caller.session_id, caller.token, caller.cursor = made["sessionId"], made["continuationToken"], 0


def _call(tool: str, **arguments: str) -> str:
    return f"{tool} {json.dumps(arguments)}"


async def _only_request(case: Case) -> str:
    (request_id,) = asked(await case.caller.until_boundary())
    return request_id


async def at_its_gate(case: Case) -> None:
    await until(lambda: case.world.ledger.reached(case.gate), "the tool to be at its gate")


def types(case: Case) -> list[str]:
    return [event["type"] for event in log(case)]


def log(case: Case) -> list[Json]:
    return list(case.world.store().events[case.caller.session_id])
