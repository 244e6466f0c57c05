"""Record the histories of scenarios: `python -m tests.workflows.record LABEL [SCENARIO …]`.

Without a scenario, it records those that have no recording yet. It starts dev servers of its own;
`PERDURE_TEMPORAL_ADDRESS` names another one for the scenarios that any server can play. Record when workflow code
ships, and keep every recording: a change that cannot replay them strands live sessions.
"""

import asyncio
import contextlib
import json
import logging
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from temporalio.client import Client, WorkflowHistory
from temporalio.service import RPCError

from perdure.runtime.connect import temporal_client
from perdure.settings import Settings
from tests.support.stack import TemporalServer

from .scenarios import SCENARIOS, Scenario, Stage
from .scenarios.stage import is_settled, story_of
from .story import contains

HISTORIES = Path(__file__).parent / "histories"

#: A server suggests a new run after so many events: enough for a driver's three turns, and for a turn's two steps.
_PATIENT = {"frontend.keepAliveTime": '"30s"', "frontend.keepAliveTimeout": '"30s"'}
_BRIEF = {**_PATIENT, "limit.historyCount.suggestContinueAsNew": "30"}

#: Scenarios that are played at the same time: most of their time they wait.
_AT_ONCE = 4

#: Where two things meet, they do not meet in each attempt.
_ATTEMPTS = 8
_PATIENCE = 30.0

#: Who the SDK says it is: the process and the machine.
_WHO = re.compile(r"\b\d+@[\w.-]*?(?=-[0-9a-f]{32}$|$)")

log = logging.getLogger("record")


async def record(label: str, chosen: list[str]) -> None:
    asked = [each for each in SCENARIOS if each.name in chosen] if chosen else unrecorded()
    if kept := [name for each in asked for name in each.recordings() if (HISTORIES / f"{label}-{name}.json").exists()]:
        sys.exit(f"A recording is never overwritten; choose another label than {label}: {', '.join(kept)}")
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        for brief in (False, True):
            some = [each for each in asked if each.brief == brief]
            if some:
                address = _named() if not brief else None
                if address is None:
                    server = TemporalServer(Path(directory) / f"brief-{brief}", _BRIEF if brief else _PATIENT)
                    stack.callback(server.close)
                    address = server.address
                await _play_all(label, some, await temporal_client(Settings(temporal_address=address)))


def unrecorded() -> list[Scenario]:
    """The scenarios of which a part has no recording."""
    kept = {path.stem.partition("-")[2] for path in HISTORIES.glob("*.json")}
    return [each for each in SCENARIOS if not kept.issuperset(each.recordings())]


def _named() -> str | None:
    settings = Settings()
    return settings.temporal_address if "temporal_address" in settings.model_fields_set else None


async def _play_all(label: str, scenarios: list[Scenario], client: Client) -> None:
    places = asyncio.Semaphore(_AT_ONCE)

    async def play(scenario: Scenario) -> bool:
        async with places:
            played = await _played(scenario, client)
        if played is not None:
            _keep(label, scenario, played)
        log.info("%s%s", scenario.name, "" if played else ": NOT RECORDED")
        return played is not None

    done = await asyncio.gather(*(play(each) for each in scenarios))
    if not all(done):
        sys.exit("Some did not happen as they should")


async def _played(scenario: Scenario, client: Client) -> Mapping[str, WorkflowHistory] | None:
    """The histories of an attempt in which it happened as it should."""
    for _ in range(_ATTEMPTS):
        async with contextlib.AsyncExitStack() as stack:
            stage = Stage(client, stack)
            histories = None
            # On a busy machine a connection may break.
            with contextlib.suppress(TimeoutError, RPCError):
                await scenario.play(stage)
                histories = await _histories_of(scenario, stage)
            # Nothing that still runs disturbs the others.
            with contextlib.suppress(RPCError):
                if stage.started is not None:
                    await client.get_workflow_handle(stage.started.id).terminate()
        if histories is not None:
            return histories
        log.warning("%s: once more", scenario.name)
    return None


async def _histories_of(scenario: Scenario, stage: Stage) -> Mapping[str, WorkflowHistory] | None:
    """The histories, once they contain what they should and nothing is left to be decided; None if they never do."""
    found: Mapping[str, WorkflowHistory] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE):
            while True:
                found = await stage.histories()
                shown = all(contains(story_of(found, part), wanted) for part, wanted in scenario.shows.items())
                if shown and all(is_settled(found[part]) for part in scenario.shows):
                    return found
                await asyncio.sleep(0.1)
    for part in scenario.shows:
        log.warning("%s %s: %s", scenario.name, part, ", ".join(story_of(found, part)))
    return None


def _keep(label: str, scenario: Scenario, histories: Mapping[str, WorkflowHistory]) -> None:
    HISTORIES.mkdir(exist_ok=True)
    for part in scenario.shows:
        name = "-".join(filter(None, (label, scenario.name, part)))
        events = json.loads(histories[part].to_json())["events"]
        # A line for each event: small, and a difference can still be read.
        lines = ",\n".join(json.dumps(anonymous(each), separators=(",", ":")) for each in events)
        (HISTORIES / f"{name}.json").write_text(f'{{"events":[\n{lines}\n]}}\n')


def anonymous(value: Any) -> Any:
    """Without what is the recording machine's alone: no replay reads it."""
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return {key: "" if key == "stackTrace" else anonymous(item) for key, item in items}
    if isinstance(value, list):
        return [anonymous(item) for item in cast(list[Any], value)]
    return _WHO.sub("recorder", value) if isinstance(value, str) else value


if __name__ == "__main__":
    # What fails here is meant to.
    logging.basicConfig(level=logging.CRITICAL, format="%(message)s")
    log.setLevel(logging.INFO)
    asyncio.run(record(sys.argv[1], sys.argv[2:]))
