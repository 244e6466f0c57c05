"""The whole product under attack, and all that can be known of it from outside."""

import asyncio
import contextlib
import os
import sys
import time
import uuid
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
from temporalio.client import WorkflowHandle

from perdure.dev.temporal_server import listens
from perdure.protocol import names
from tests.support.ledger import Ledger, running_ledger
from tests.support.processes import PATIENCE, Process, free_port, wait_until
from tests.support.stack import Stack
from tests.support.talk import Talk
from tests.support.waiting import until

from . import invariants
from .evidence import Asked, Evidence, Json, Moving, read_moving, read_store

AGENT = "tests.support.chaos.agents:agent"

#: What a worker without heartbeats is taken for dead after, and what recovery may take on top of it.
HEARTBEAT = 5.0
RECOVERY = 3.0
#: What the loss of a worker's cache may cost.
STICKY = 3.0

#: How many turns are measured for one bound: one alone may be lucky.
MEASURED = 2


def unique(word: str = "w") -> str:
    """A word that was not used before: messages and notes are recognised by it."""
    return f"{word}{uuid.uuid4().hex[:10]}"


class Caller(Talk):
    """A caller whose receipts are kept."""

    def __init__(self, url: str, receipts: list[tuple[str, str]]) -> None:
        super().__init__(url, timeout=90.0)
        self._receipts = receipts

    async def _post(self, path: str, body: Json) -> Json:
        return self.received(await self.http.post(path, json=body))

    def received(self, response: httpx2.Response) -> Json:
        """The receipt, which is kept."""
        assert response.is_success, f"{response.status_code}: {response.text}"
        receipt: Json = response.json()
        self._receipts.append((receipt["sessionId"], receipt["deliveryId"]))
        return receipt


async def undisturbed(caller: Talk) -> float:
    """How many seconds a turn takes here and now, to which nothing happens: other tests share the machine."""
    took: list[float] = []
    for _ in range(MEASURED):
        word = unique()
        began = time.monotonic()
        assert await caller.say(f"say {word}") == word
        took.append(time.monotonic() - began)
    return max(took)


class World:
    """A stack, the ledger its tools act on, and what callers were promised."""

    def __init__(self, stack: Stack, ledger: Ledger) -> None:
        self.stack = stack
        self.ledger = ledger
        self.receipts: list[tuple[str, str]] = []
        self._own: list[Process] = []

    # --- people ---------------------------------------------------------------------------------------------

    def caller(self, like: Talk | None = None) -> Caller:
        """A caller of the newest API that lives; the same one as before, if there was one."""
        caller = Caller(self.living_apis[-1], self.receipts)
        if like is not None:
            caller.session_id, caller.token, caller.cursor = like.session_id, like.token, like.cursor
        return caller

    @property
    def living_apis(self) -> list[str]:
        """The addresses of the APIs that live, the newest last; when none does, the one that did last."""
        urls = [url for url, api in zip(self.stack.api_urls, self.stack.apis, strict=True) if api.alive]
        return urls or self.stack.api_urls[-1:]

    @property
    def runs_inline(self) -> bool:
        """Whether turns run in the workflow of their session."""
        return self.stack.environment.get("PERDURE_TURNS") == "inline"

    # --- processes ------------------------------------------------------------------------------------------

    def only_worker(self, environment: Mapping[str, str] | None = None) -> Process:
        """Leave one worker, a new one."""
        self.kill_workers()
        return self.stack.start_worker(environment)

    def kill_everything(self) -> None:
        """All but the outside world: the provider and the ledger are not ours."""
        self.kill_workers()
        for api in self.stack.apis:
            api.kill()
        self.stack.temporal.process.kill()

    def start_everything(self) -> None:
        self.stack.restart_temporal()
        self.stack.start_api(wait=False)
        self.stack.start_worker()

    def kill_workers(self) -> None:
        for worker in self.stack.workers:
            if worker.alive:
                worker.kill()

    def dying_api(self, moment: str) -> tuple[Process, str]:
        """Start an API that dies at this moment of its requests to Temporal; the process and its address."""
        port = free_port()
        api = self._dying("api", moment, {"PERDURE_PORT": str(port)})
        wait_until(lambda: not api.alive or listens("127.0.0.1", port), f"{api.name} to listen", 2 * PATIENCE)
        assert api.alive, api.output
        return api, f"http://127.0.0.1:{port}"

    def _dying(self, part: str, moment: str, environment: Mapping[str, str]) -> Process:
        program = [sys.executable, "-m", "tests.support.chaos.dying", part]
        name = f"{part}-dying-{len(self._own)}"
        log = self.stack.directory / f"{name}.log"
        process = Process(name, program, log, {**self.stack.environment, **environment, "DIE_AT": moment})
        self._own.append(process)
        return process

    def dying_worker(self, moment: str) -> Process:
        """Start a worker that dies at this moment."""
        return self._dying("worker", moment, {})

    def close(self) -> None:
        for process in self._own:
            process.close()

    # --- evidence -------------------------------------------------------------------------------------------

    def store(self) -> Evidence:
        """The store as it is now."""
        return read_store(self.stack.settings.database)

    def asked(self) -> list[Asked]:
        """What the provider was asked, in order."""
        requests = self._provider("requests")["requests"]
        names_of = ("said", "round", "results", "at", "begun", "instructions")
        return [Asked(*(each[name] for name in names_of)) for each in requests]

    def times_asked(self, message: str, step: int = 0) -> int:
        """How often the provider was asked for one step of the turn of a message."""
        return sum((each.said, each.step) == (message, step) for each in self.asked())

    def _provider(self, what: str) -> Json:
        return httpx2.get(f"{self.stack.provider_url}/{what}", timeout=60, verify=False).raise_for_status().json()

    def moving(self) -> Moving:
        """What has not settled yet."""
        return read_moving(self.stack.settings.database)

    async def settled(self, within: float = 1.5 * PATIENCE) -> Evidence:
        """Wait until every session waits or has ended, and every delivery was consumed or refused."""
        await until(lambda: not self.moving().unsettled, "all sessions to settle", within)
        return self.store()

    async def check(self) -> Evidence:
        """Everything must hold."""
        await self.settled()
        evidence = await self.evidence()
        invariants.check(evidence)
        return evidence

    async def evidence(self) -> Evidence:
        """All that can be seen from outside now."""
        evidence = self.store()
        some = asyncio.Semaphore(16)

        async def read(session_id: str, length: int) -> tuple[str, list[Json]]:
            async with some:
                return session_id, await self._stream(session_id, length)

        read_all = (read(session_id, len(kept)) for session_id, kept in evidence.events.items())
        streams = dict(await asyncio.gather(*read_all))
        return replace(
            evidence,
            effects=self.ledger.effects(),
            asked=self.asked(),
            unpaired=self._provider("count")["unpaired"],
            streams=streams,
            receipts=tuple(self.receipts),
        )

    async def _stream(self, session_id: str, length: int) -> list[Json]:
        """The first events of a session, as a reader gets them."""
        read: list[Json] = []
        if not length:
            return read
        # One that stays behind is shorter than the log; that is for the checks to find.
        with contextlib.suppress(TimeoutError):
            async with self.caller() as caller, asyncio.timeout(PATIENCE):
                caller.session_id = session_id
                stream = caller.events()
                async for event in stream:
                    read.append(event)
                    if len(read) == length:
                        break
                await stream.aclose()
        return read


@contextlib.contextmanager
def running_world(
    directory: Path, environment: Mapping[str, str] | None = None, *, agents: str = AGENT, **options: Any
) -> Generator[World]:
    """A world of its own, as `Stack` takes the options, with the agent that acts on the ledger."""
    with running_ledger(directory) as ledger:
        everywhere = {"LEDGER_URL": ledger.url, **(environment or {})}
        with Stack(directory, agents=agents, provider=True, environment=everywhere, **options) as stack:
            world = World(stack, ledger)
            yield world
            world.close()


def dies_at(point: str, once: Path) -> dict[str, str]:
    """The environment of a worker that dies at a point of its work, and of no second one."""
    return {"PERDURE_KILL_POINT": point, "PERDURE_KILL_ONCE_FILE": str(once)}


async def runner_of(world: World, session_id: str, turn: int) -> WorkflowHandle[Any, Any]:
    """The workflow that runs the turn: its own one, or its driver."""
    client = await world.stack.client()
    return client.get_workflow_handle(session_id if world.runs_inline else names.turn_workflow(session_id, turn))


def kept_types(world: World, session_id: str) -> list[str]:
    """The types of the events that the store holds of a session."""
    return [event["type"] for event in world.store().events.get(session_id, ())]


def reported(events: list[Json]) -> str:
    """The outcome of the call, as a reader sees it."""
    result = next(event["data"] for event in events if event["type"] == "action.result")
    return "unknown" if result.get("error", {}).get("code") == "TOOL_OUTCOME_UNKNOWN" else result["status"]


def rss(process: Process) -> int:
    """The memory of a process, in bytes."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
