"""`perdure.connect`: sessions from any program. The worker is real, and so is everything below it."""

import asyncio
import sqlite3
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest

import perdure
from perdure import Event, Receipt, SessionQuery, Sessions
from perdure.dev.machine import locked
from perdure.errors import (
    ForbiddenResponder,
    InputClosed,
    InputNotFound,
    Invalid,
    InvalidDeclaration,
    Misconfigured,
    NoActiveSession,
    SchemaOutdated,
    SessionNotFound,
)
from perdure.protocol.events import BOUNDARIES
from perdure.runtime.local import write_temporal_address
from perdure.settings import Settings
from perdure.store.open import NoStore
from tests.support.plugin import StackFactory
from tests.support.processes import PATIENCE, free_port
from tests.support.stack import Stack

AGENTS = "examples.shop:agent,examples.approvals:agent"
LETTER = 'use send_letter {"to": "Oslo 1", "text": "Hello"}'
#: Nothing listens there.
NOWHERE = f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(apis=0, agents=AGENTS)


@pytest.fixture
def environment(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in stack.environment.items():
        if name.startswith("PERDURE_"):
            monkeypatch.setenv(name, value)


@pytest.fixture
async def sessions(environment: None) -> AsyncGenerator[Sessions]:
    async with perdure.connect() as sessions:
        yield sessions


async def until_boundary(sessions: Sessions, session_id: str, start: int = 0) -> Sequence[Event]:
    """The events up to the next one after which the session waits or has ended."""
    found: list[Event] = []
    async with asyncio.timeout(PATIENCE), aclosing(sessions.events(session_id, start)) as events:
        async for event in events:
            found.append(event)
            if event.type in BOUNDARIES:
                return found
    raise AssertionError("The stream ended before its boundary.")


async def asked(sessions: Sessions, message: str = LETTER) -> tuple[Receipt, str, int]:
    """A session that waits for an approval, the id of the request, and the index of the next event."""
    receipt = await sessions.start("refunds", message)
    events = await until_boundary(sessions, receipt.session_id)
    (row,) = await sessions.inputs.waiting(receipt.session_id)
    return receipt, row.request.request_id, events[-1].index + 1


async def test_a_session_is_started_followed_and_delivered_to(sessions: Sessions) -> None:
    token = f"room:{uuid.uuid4().hex}"
    receipt = await sessions.start("shop", 'use price {"sku": "tea"}', token=token)
    first = await until_boundary(sessions, receipt.session_id)

    await sessions.deliver(token, "hello")

    second = await until_boundary(sessions, receipt.session_id, first[-1].index + 1)
    assert first[0].type == "session.started"
    assert "action.result" in [event.type for event in first]
    assert [(event.data or {}).get("message") for event in second if event.type == "message.received"] == ["hello"]


async def test_an_approval_is_answered(sessions: Sessions) -> None:
    receipt, request_id, place = await asked(sessions)

    answered = await sessions.answer(request_id, "approve")

    (outcome,) = answered.inputs
    events = await until_boundary(sessions, receipt.session_id, place)
    results = [(event.data or {})["result"]["output"] for event in events if event.type == "action.result"]
    assert (outcome.status, results) == ("answered", ["Sent 5 characters to Oslo 1."])


async def test_an_approval_changes_the_arguments_where_the_agents_are_known(sessions: Sessions) -> None:
    receipt, request_id, place = await asked(sessions)

    await sessions.answer(request_id, "approve", arguments={"to": "Bergen 2", "text": "Hei"})

    events = await until_boundary(sessions, receipt.session_id, place)
    results = [(event.data or {})["result"]["output"] for event in events if event.type == "action.result"]
    assert results == ["Sent 3 characters to Bergen 2."]


async def test_arguments_cannot_be_changed_where_the_agents_are_not_known(
    sessions: Sessions, environment: None
) -> None:
    _, request_id, _ = await asked(sessions)

    async with perdure.connect(agents=()) as others:
        with pytest.raises(Invalid, match="cannot be checked here"):
            await others.answer(request_id, "approve", arguments={"to": "Bergen 2", "text": "Hei"})


async def test_a_slip_in_an_answer_denies_nothing(sessions: Sessions) -> None:
    receipt, request_id, _ = await asked(sessions)

    with pytest.raises(Invalid, match="'approve' or 'deny'"):
        await sessions.answer(request_id, "aprove")

    assert len(await sessions.inputs.waiting(receipt.session_id)) == 1


async def test_a_question_is_answered_with_text(sessions: Sessions) -> None:
    question = 'use ask_question {"prompt": "Which order?"}'
    receipt, request_id, place = await asked(sessions, question)

    await sessions.answer(request_id, "number 7 \ud800")

    events = await until_boundary(sessions, receipt.session_id, place)
    answers = [(event.data or {})["answer"] for event in events if event.type == "input.resolved"]
    assert [answer["text"] for answer in answers] == ["number 7 \ufffd"]


async def test_only_a_responder_can_answer_and_only_once(sessions: Sessions) -> None:
    message = 'use refund {"order": "7", "amount": 50}'
    _, request_id, _ = await asked(sessions, message)
    support = perdure.Principal(
        principal_id="ada", principal_type="user", authenticator="jwt", attributes={"role": "support"}
    )

    with pytest.raises(ForbiddenResponder):
        await sessions.answer(request_id, "approve")
    await sessions.answer(request_id, "approve", principal=support)

    with pytest.raises(InputClosed):
        await sessions.answer(request_id, "deny", principal=support)
    with pytest.raises(InputNotFound):
        await sessions.answer("inp_unknown", "approve")


async def test_what_waits_is_cancelled(sessions: Sessions) -> None:
    receipt, _, place = await asked(sessions)

    cancelled = await sessions.cancel(receipt.session_id)

    events = await until_boundary(sessions, receipt.session_id, place)
    assert cancelled.status == "accepted"
    assert "turn.cancelled" in [event.type for event in events]
    assert (await sessions.cancel(receipt.session_id)).status == "no_active_turn"


async def test_sessions_are_listed_and_described(sessions: Sessions) -> None:
    receipt = await sessions.start("shop", "hello, list me")
    await until_boundary(sessions, receipt.session_id)

    page = await sessions.list(SessionQuery(agent="shop", status="waiting"))
    described = await sessions.describe(receipt.session_id)

    assert receipt.session_id in [row.session_id for row in page.sessions]
    assert described.row.title == "hello, list me"
    assert described.workflow_status == "running"


async def test_the_events_of_a_task_end_with_it(sessions: Sessions) -> None:
    receipt = await sessions.start("shop", "hello", mode="task")

    async with asyncio.timeout(PATIENCE):
        events = [event async for event in sessions.events(receipt.session_id)]
        later = [event async for event in sessions.events(receipt.session_id, events[-1].index + 7)]

    assert [event.index for event in events] == list(range(len(events)))
    assert events[-1].type == "session.completed"
    assert later == []


async def test_events_that_are_not_followed_end_where_they_are(sessions: Sessions) -> None:
    receipt = await sessions.start("shop", "hello")
    followed = await until_boundary(sessions, receipt.session_id)

    read = [event async for event in sessions.events(receipt.session_id, 2, follow=False)]

    assert read == followed[2:]


async def test_a_reader_learns_that_the_sessions_were_closed(environment: None) -> None:
    async with perdure.connect() as sessions:
        receipt = await sessions.start("shop", "hello")
        await until_boundary(sessions, receipt.session_id)
        reading = asyncio.create_task(_read(sessions, receipt.session_id))
        await asyncio.sleep(0.1)

    async with asyncio.timeout(PATIENCE):
        with pytest.raises(perdure.PerdureError):
            await reading


async def _read(sessions: Sessions, session_id: str) -> None:
    async for _ in sessions.events(session_id):
        pass


async def test_deliver_or_start_makes_one_session(sessions: Sessions) -> None:
    token = f"room:{uuid.uuid4().hex}"

    receipts = [await sessions.deliver_or_start(token, "shop", "hello") for _ in range(2)]

    assert len({receipt.session_id for receipt in receipts}) == 1


@pytest.mark.parametrize("message", [None, "", 42, [{"type": "image"}]])
async def test_what_is_no_message_is_refused(sessions: Sessions, message: Any) -> None:
    with pytest.raises(Invalid):
        await sessions.start("shop", message)
    with pytest.raises(Invalid):
        await sessions.deliver("room:unknown", message)
    with pytest.raises(Invalid):
        await sessions.deliver_or_start("room:unknown", "shop", message)


async def test_parts_and_halves_of_characters_are_taken(sessions: Sessions) -> None:
    parts = (perdure.TextPart(text="hello \ud800"), perdure.TextPart(text="there"))

    texts = [await sessions.start("shop", message) for message in (parts, "hello \ud800")]

    for receipt in texts:
        events = await until_boundary(sessions, receipt.session_id)
        assert events[-1].type == "session.waiting"


async def test_what_is_not_there_or_means_nothing_is_refused(sessions: Sessions) -> None:
    with pytest.raises(Invalid):
        await sessions.start("shop", "hello", mode=cast("Any", "chat"))
    with pytest.raises(Invalid):
        await sessions.start("", "hello")
    with pytest.raises(NoActiveSession):
        await sessions.deliver("", "hello")
    with pytest.raises(Invalid):
        await sessions.list(SessionQuery(limit=0))
    with pytest.raises(Invalid):
        await sessions.list(SessionQuery(status=cast("Any", "sleeping")))
    with pytest.raises(Invalid):
        await sessions.list(SessionQuery(cursor="no cursor"))
    with pytest.raises(Invalid):
        await anext(sessions.events("ses_unknown", -1))
    for missing in (
        anext(sessions.events("ses_unknown")),
        sessions.describe("ses_unknown"),
        sessions.cancel("ses_unknown"),
    ):
        with pytest.raises(SessionNotFound):
            await missing


async def test_without_a_store_the_error_explains_how_to_create_one(tmp_path: Path) -> None:
    with pytest.raises(NoStore, match="perdure migrate"):
        async with perdure.connect(data_dir=tmp_path / "nowhere"):
            pass

    assert not (tmp_path / "nowhere").exists()


async def test_the_temporal_of_perdure_dev_is_found(
    stack: Stack, environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERDURE_TEMPORAL_ADDRESS")
    folder = stack.settings.data_dir

    with locked(folder):
        write_temporal_address(Settings(data_dir=folder), stack.settings.temporal_address)
        async with perdure.connect(data_dir=folder) as sessions:
            receipt = await sessions.start("shop", "hello")
            await until_boundary(sessions, receipt.session_id)

    assert not receipt.delayed


async def test_an_older_schema_is_refused(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "perdure.db").close()
    (tmp_path / "perdure.db").touch()

    with pytest.raises(SchemaOutdated, match="perdure migrate"):
        async with perdure.connect(database=f"sqlite:///{tmp_path / 'perdure.db'}", data_dir=tmp_path):
            pass


@pytest.mark.parametrize("database", ["mysql://db/x", "sqlite:///"])
async def test_an_address_of_no_store_is_refused(database: str, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured):
        async with perdure.connect(database=database, data_dir=tmp_path):
            pass


async def test_a_setting_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_MAX_INBOX", "many")

    with pytest.raises(Invalid, match="PERDURE_MAX_INBOX"):
        async with perdure.connect():
            pass


async def test_agents_that_are_not_there_are_named(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_AGENTS", "nowhere.to_be_found:agent")

    with pytest.raises(InvalidDeclaration, match="nowhere"):
        async with perdure.connect():
            pass


async def test_while_temporal_is_away_sessions_are_accepted(environment: None, stack: Stack) -> None:
    began = time.monotonic()
    async with perdure.connect(address=NOWHERE) as sessions:
        receipt = await sessions.start("shop", "hello, later")
        described = await sessions.describe(receipt.session_id)
    spent = time.monotonic() - began

    assert (receipt.delayed, described.row.status, described.workflow_status) == (True, "starting", None)
    # The sweeper is what an API process runs; a program without one runs it itself.
    async with perdure.connect() as sessions:
        sweeper = sessions.sweeper
        async with asyncio.timeout(PATIENCE):
            while (await sessions.get(receipt.session_id)).status == "starting":
                await sweeper.sweep()
                await asyncio.sleep(0.1)
        await until_boundary(sessions, receipt.session_id)
    assert spent < PATIENCE
