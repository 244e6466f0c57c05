"""Transcripts: what they tell, and that everybody gets the same bytes."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from perdure.errors import SessionNotFound
from perdure.protocol import names
from perdure.protocol.wire import JsonObject
from perdure.runtime.forks import export_session, import_session
from perdure.runtime.signals import Signals
from perdure.runtime.streams.transcript import RecordsExpired, transcript
from perdure.store.base import Store
from perdure.store.lifecycle import Keep
from perdure.store.open import open_store
from perdure.store.values import Commit, NewRecord
from perdure.testing import call
from tests.conformance.agents import weather
from tests.runtime.fake_driver import FakeDriver
from tests.support import given
from tests.support.lab import SESSION, lab
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Talk


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.conformance.agents:concierge", apis=2)


@pytest.fixture
async def other(tmp_path: Path) -> AsyncGenerator[Store]:
    store = await open_store(f"sqlite:///{tmp_path / 'other.db'}")
    await store.migrate()
    yield store
    await store.close()


async def told(store: Store, session_id: str = SESSION) -> list[JsonObject]:
    return [message async for message in transcript(store, session_id)]


async def read(talk: Talk, form: str, url: str = "") -> bytes:
    path = f"{url}/v1/sessions/{talk.session_id}/transcript"
    answer = await talk.http.get(path, params={"format": form})
    assert answer.status_code == 200, answer.text
    return answer.content


async def test_it_tells_what_was_said_and_what_came_of_each_call(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create('think Hm; call weather {"city": "Bonn"} then say Clear')
        await talk.until_boundary()
        messages = json.loads(await read(talk, "messages"))["messages"]

    (asked, called, result, said) = messages
    assert asked["parts"] == [{"type": "text", "text": 'think Hm; call weather {"city": "Bonn"} then say Clear'}]
    assert (asked["role"], asked["turn"]) == ("user", 0)
    thought, wanted = called["parts"]
    assert thought == {"type": "reasoning", "text": "Hm"}
    assert (wanted["type"], wanted["toolName"], wanted["input"]) == ("tool-call", "weather", {"city": "Bonn"})
    assert (result["role"], result["callId"], result["status"]) == ("tool", wanted["callId"], "completed")
    assert (said["role"], said["step"], said["parts"]) == ("assistant", 1, [{"type": "text", "text": "Clear"}])


@pytest.mark.parametrize("form", ["messages", "events"])
async def test_each_process_gives_the_same_bytes(stack: Stack, form: str) -> None:
    async with stack.talk() as talk:
        await talk.create('call weather {"city": "Bonn"} then say Clear')
        await talk.until_boundary()
        await talk.send("drip 20 words delay 5")
        await talk.until_boundary()

        first, second, again = await asyncio.gather(*(read(talk, form, url) for url in (*stack.api_urls, "")))

    assert first == second == again


async def test_the_events_that_count_are_those_of_the_stream_without_pieces(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("drip 20 words delay 5")
        await talk.until_boundary()
        events = json.loads(await read(talk, "events"))["events"]
        streamed = await talk.http.get(f"/eve/v1/session/{talk.session_id}/stream", params={"follow": "false"})

    lines = [json.loads(line) for line in streamed.text.splitlines() if line]
    assert "message.appended" in {line["type"] for line in lines}
    assert events == [line for line in lines if line["type"] != "message.appended"]


async def test_it_is_the_same_after_an_import(other: Store, tmp_path: Path) -> None:
    async with lab([call("weather", city="Bonn"), "Clear", "Again"], weather) as it:
        (ref,) = await it.calls(await it.deliver("Weather, café \ud800"))
        await it.tool(ref)
        await it.model(step=1)
        await it.model(await it.deliver("And"), turn=1)
        before = await told(it.store)
        path = tmp_path / "export.jsonl"
        path.write_bytes(b"".join([line async for line in export_session(it.store, SESSION)]))

    row = await import_session(other, Signals(other, FakeDriver()), b"secret", path)

    assert [message["role"] for message in before] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert await told(other, row.session_id) == before


async def test_expired_records_are_told_and_not_left_out() -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))
        await it.store.commit(given.closing(SESSION))
        await it.store.expire(Keep(records=-60.0), None, 10)

        with pytest.raises(RecordsExpired):
            await told(it.store)


async def test_a_turn_that_cannot_be_read_does_not_hide_the_others() -> None:
    async with lab(["Hello", call("weather", city="Bonn")], weather) as it:
        await it.model(await it.deliver("Hi"))
        (ref,) = await it.calls(await it.deliver("Weather"), turn=1)
        newer = NewRecord(turn=1, step=0, key=names.outcome_key(ref.call_id), format="perdure/outcome/99", body={})
        await it.store.commit(Commit(SESSION, records=[newer]))

        roles = [(message["turn"], message["role"]) for message in await told(it.store)]

    assert roles == [(0, "user"), (0, "assistant"), (1, "unreadable")]


async def test_of_an_unknown_session_there_is_none(other: Store, stack: Stack) -> None:
    with pytest.raises(SessionNotFound):
        await told(other, "ses_none")
    async with stack.talk() as talk:
        answer = await talk.http.get("/v1/sessions/ses_none/transcript")
        await talk.create("say Hi")
        odd = await talk.http.get(f"/v1/sessions/{talk.session_id}/transcript", params={"format": "html"})

    assert (answer.status_code, odd.status_code) == (404, 400)


@pytest.mark.parametrize("form", ["messages", "events"])
async def test_an_api_that_hides_content_hides_it_here_too(stack: Stack, form: str) -> None:
    """The policy is of the API; the other ones of the same store show all."""
    hidden = "reasoning.appended,reasoning.completed"
    redacted = "action.input.appended,actions.requested,action.result,subagent.completed"
    stack.start_api({"PERDURE_STREAM_EXCLUDE": hidden, "PERDURE_STREAM_REDACT": redacted})
    async with stack.talk() as talk:
        await talk.create('think Hm-hm; call weather {"city": "Bonn"} then say Clear')
        await talk.until_boundary()

        shown, hiding = (await read(talk, form)).decode(), (await read(talk, form, stack.api_urls[-1])).decode()

    entries = [json.loads(text)[form] for text in (shown, hiding)]
    assert "Hm-hm" in json.dumps(entries[0][1:])
    told = json.dumps(
        [each for each in entries[1] if each.get("role") != "user" and each.get("type") != "message.received"]
    )
    assert not [secret for secret in ("Hm-hm", "Bonn", "sunny", "Sunny") if secret in told]
    assert "Clear" in told
    assert "[redacted]" in told
