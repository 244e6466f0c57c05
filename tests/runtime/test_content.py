"""Where content goes: the table in docs/deploying.md, against what real processes leave behind."""

import asyncio
import hashlib
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from temporalio.client import Client, WorkflowHandle

from perdure.protocol import names
from perdure.protocol.events import EventType
from tests.runtime import private
from tests.support.collector import Collector
from tests.support.processes import PATIENCE, wait_until
from tests.support.stack import Stack
from tests.support.talk import Json, Talk

DOCUMENT = Path(__file__).parents[2] / "docs" / "deploying.md"

PROVIDER_KEY = "sk-provider-pelican-0123456789"
CALLER_KEY = "caller-key-kingfisher"
FORGED = "forged-bearer-wagtail"

#: What is planted, by the rows of the table.
PLANTED = {
    "the first 80 characters of the first message": ["message-heron", "file-egret.txt"],
    "all other messages and replies, client context, files": ["later-ibis", "context-stork", "aGVyZSBpcyBhIGNyYW5l"],
    "arguments of tool calls": ["argument-plover", "approve-dunlin"],
    "results of tools, what is wrong with arguments, replies of models": [
        private.RETURNED,
        private.UNFIT,
        "reply-avocet",
    ],
    "exceptions of tools, of approval, key and summary functions": [private.RAISED, private.UNDECIDED],
    "exceptions of anything else": [private.MOOD],
    "refusals of model providers": ["scripted failure 400", "scripted failure 503"],
    "keys and tokens": [PROVIDER_KEY, CALLER_KEY, FORGED],
}
STORE, ON, OFF, LOGS, TRACES = range(5)

#: Of the session that plants it.
TURNS = 8
TURN = "invoke_agent private"


@dataclass
class Left:
    """What a session has left behind, and where."""

    events: list[Json] = field(default_factory=list[Json])
    store: bytes = b""
    #: Histories and descriptions as they travel, and the server's database.
    temporal: dict[str, bytes] = field(default_factory=dict[str, bytes])
    logs: dict[str, bytes] = field(default_factory=dict[str, bytes])
    traces: bytes = b""
    token: str = ""


def table() -> dict[str, list[str]]:
    """The table of the document: where each kind of content may be."""
    section = DOCUMENT.read_text().split("### Where content goes", 1)[1].split("\n### ", 1)[0]
    lines = section.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {name: cells for name, *cells in rows[1:]}


@pytest.fixture(scope="module", params=["on", "off"])
def detail(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def left(detail: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Left]:
    with Collector() as collector:
        environment = {
            "PERDURE_UI_DETAIL": detail,
            "PERDURE_API_KEYS": f"tester={hashlib.sha256(CALLER_KEY.encode()).hexdigest()}",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        directory = tmp_path_factory.mktemp(f"content-{detail}")
        agents = "tests.runtime.private:agent"
        with Stack(directory, provider=True, agents=agents, environment=environment) as stack:
            # The stack's own key is none to look for.
            stack.workers[0].close()
            stack.start_worker({"OPENAI_API_KEY": PROVIDER_KEY})
            left = asyncio.run(all_that_is_left(stack))
            wait_until(lambda: len([each for each in collector.spans if each.name == TURN]) >= TURNS, "the spans")
        left.traces = "".join(span.raw for span in collector.spans).encode()
        yield left


async def all_that_is_left(stack: Stack) -> Left:
    left = Left()
    headers = {"authorization": f"Bearer {CALLER_KEY}"}
    async with Talk(stack.url, headers=headers) as talk:
        refused = await talk.http.get("/v1/sessions", headers={"authorization": f"Bearer {FORGED}"})
        assert refused.status_code == 401
        left.temporal["while it runs"] = await converse(talk, await stack.client())
        stream = talk.events()
        left.events = [await anext(stream) for _ in range(talk.cursor)]
        await stream.aclose()
        left.token = talk.token
    client = await stack.client()
    turns = [names.turn_workflow(talk.session_id, number) for number in range(TURNS)]
    for workflow_id in (talk.session_id, *turns):
        left.temporal[workflow_id] = await kept_of(client.get_workflow_handle(workflow_id))
    for path in stack.temporal.database.parent.glob("temporal.db*"):
        left.temporal[path.name] = path.read_bytes()
    for path in (stack.directory / "data").glob("*.db*"):
        left.store += path.read_bytes()
    for path in stack.directory.glob("*.log"):
        left.logs[path.stem] = path.read_bytes()
    return left


async def converse(talk: Talk, client: Client) -> bytes:
    """Plant everything; what Temporal shows of an attempt that has failed and is to be made again."""
    file = {"type": "file", "mediaType": "text/plain", "filename": "file-egret.txt", "data": "aGVyZSBpcyBhIGNyYW5l"}
    first = {"type": "text", "text": "say message-heron"}
    await talk.create([file, first], clientContext={"page": "context-stork"})
    await talk.until_boundary()
    await talk.say('call find {"what": "argument-plover"} then say reply-avocet later-ibis')
    await talk.say('call lose {"what": "argument-plover"} then call keep {"what": "it"} then say lost')
    await talk.say('call weigh {"what": "it"} then say unfit')
    await talk.say("fail 400 times 9 quoting")
    await talk.say('call give {"what": "approve-dunlin"}')
    # No answer comes in time, and so the turn fails that begins then.
    await talk.until_boundary()
    await talk.send("fail 503 times 1 after 3 quoting")
    pending = await failed_attempt(client.get_workflow_handle(names.turn_workflow(talk.session_id, TURNS - 1)))
    await talk.until_boundary()
    return pending


async def failed_attempt(turn: WorkflowHandle[object, object]) -> bytes:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                description = (await turn.describe()).raw_description
            except Exception:
                description = None
            if description and any(each.HasField("last_failure") for each in description.pending_activities):
                return description.SerializeToString()
            await asyncio.sleep(0.05)


async def kept_of(handle: WorkflowHandle[object, object]) -> bytes:
    """Memo, search attributes, summaries and all events. Payloads are JSON, so their bytes are what they say."""
    description = await handle.describe()
    kept = description.raw_description.SerializeToString()
    async for event in handle.fetch_history_events():
        kept += event.SerializeToString() + str(event).encode()
    return kept


def test_every_kind_of_content_was_there_to_be_found(left: Left) -> None:
    events = str(left.events)

    for row in table():
        in_store = [word for word in PLANTED[row] if word.encode() in left.store]
        assert in_store == (PLANTED[row] if not table()[row][STORE].startswith("no") else []), row
    assert private.RAISED in events
    assert private.UNDECIDED in events
    assert "INPUT_EXPIRED" in events


def test_temporal_holds_what_the_table_allows(left: Left, detail: str) -> None:
    for row, cells in table().items():
        allowed = cells[ON if detail == "on" else OFF] != "no"
        for place, kept in left.temporal.items():
            found = [word for word in PLANTED[row] if word.encode() in kept]
            assert allowed or not found, f"{row}: {found} in {place}"
    assert not [place for place, kept in left.temporal.items() if left.token.encode() in kept]
    if detail == "on":
        everything = b"".join(left.temporal.values())
        assert b"message-heron" in everything
        assert b"argument-plover" in everything


def test_logs_hold_what_the_table_allows(left: Left) -> None:
    said = {name: text for name, text in left.logs.items() if name != "provider"}

    for row, cells in table().items():
        for name, text in said.items():
            found = [word for word in PLANTED[row] if word.encode() in text]
            allowed = cells[LOGS].startswith("the worker's") and name.startswith("worker")
            assert allowed or not found, f"{row}: {found} in the log of {name}"
    assert not [name for name, text in said.items() if left.token.encode() in text]


def test_traces_hold_nothing_of_it(left: Left) -> None:
    assert b"invoke_agent" in left.traces
    for row, cells in table().items():
        assert cells[TRACES] == "no"
        assert not [word for word in PLANTED[row] if word.encode() in left.traces], row
    assert left.token.encode() not in left.traces


def test_readers_get_a_code_and_an_id_and_the_log_has_the_rest(left: Left) -> None:
    failed = next(event["data"] for event in left.events if event["type"] == EventType.TURN_FAILED)
    error_id = failed["details"]["errorId"]

    (line,) = (line for line in left.logs["worker-2"].decode().splitlines() if error_id in line and "perdure" in line)

    assert failed["code"] == "MODEL_CALL_FAILED"
    assert "scripted failure" not in str(left.events)
    assert " WARNING perdure.model: " in line
    assert line.endswith("scripted failure 400 for [redacted]")
