import asyncio
import json
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as examples
from hypothesis import strategies as st

from perdure.errors import Invalid
from perdure.protocol.events import NewEvent
from perdure.protocol.wire import JsonObject
from perdure.store.base import Store
from perdure.store.values import Commit
from tests.store.conformance.conftest import Database
from tests.support import given
from tests.support.examples import at_least


async def test_events_are_dense_from_zero(store: Store) -> None:
    await store.commit(Commit("s", events=[given.event("a"), given.event("b")]))
    committed = await store.commit(Commit("s", events=[given.event("c")]))

    assert [(e.index, e.key) for e in await store.events("s")] == [(0, "a"), (1, "b"), (2, "c")]
    assert committed.session.events == 3


async def test_an_event_is_read_back_as_it_was_written(store: Store) -> None:
    new = NewEvent(
        type="message.received", key="k", data={"message": "hi"}, turn=1, step=2, attempt=3, delivery_ids=("d", "e")
    )

    await store.commit(Commit("s", events=[new]))

    (event,) = await store.events("s")
    assert event.model_dump(exclude={"index", "at"}) == new.model_dump()
    assert event.at.endswith("Z")


async def test_a_request_that_an_older_build_emitted_is_read_as_todays_are(store: Store, database: Database) -> None:
    request: JsonObject = {
        "requestId": "r",
        "prompt": "Approve tool call: pay",
        "action": {"kind": "tool-call", "callId": "c", "toolName": "pay", "input": {}},
        "display": "confirmation",
        "allowFreeform": False,
        "options": [{"id": "approve", "label": "Yes"}],
    }
    ours = {"kind": "approval", "responders": {"kind": "requester"}, "summary": "Pay", "expiresAt": "2026-01-01"}
    # Under another type it is stored without a version, as older builds stored it.
    older = NewEvent(type="test.event", key="k", data={"requests": [{**request, **ours}], "turnId": "turn_0"})
    await store.commit(Commit("s", events=[older]))

    database.run("UPDATE events SET type = 'input.requested'")

    (event,) = await store.events("s")
    assert event.data == {"requests": [request], "details": {"r": ours}, "turnId": "turn_0"}


async def test_the_version_of_an_event_is_stored_and_not_shown(store: Store, database: Database) -> None:
    data: JsonObject = {"requests": [], "details": {}}
    asked = NewEvent(type="input.requested", key="asked", data=data)
    await store.commit(Commit("s", events=[asked, given.event("plain", n=1)]))

    stored = [json.loads(text) for (text,) in database.run("SELECT data FROM events ORDER BY idx")]

    assert stored == [{**data, "$version": 2}, {"n": 1}]
    assert [event.data for event in await store.events("s")] == [data, {"n": 1}]


async def test_an_event_of_a_newer_build_is_shown_as_it_is(store: Store) -> None:
    await store.commit(Commit("s", events=[given.event("k", **{"$version": 9, "later": True})]))

    assert [event.data for event in await store.events("s")] == [{"later": True}]


async def test_a_repeated_key_is_skipped_and_leaves_no_gap(store: Store) -> None:
    await store.commit(Commit("s", events=[given.event("a", n=1), given.event("a", n=2)]))
    await store.commit(Commit("s", events=[given.event("a", n=3), given.event("b")]))

    events = await store.events("s")

    assert [(e.index, e.key) for e in events] == [(0, "a"), (1, "b")]
    assert events[0].data == {"n": 1}


async def test_a_key_may_be_used_by_two_sessions(store: Store) -> None:
    await store.create_session(given.session("t"))

    for session_id in ("s", "t"):
        await store.commit(Commit(session_id, events=[given.event("a")]))

    assert await given.keys(store, "s") == await given.keys(store, "t") == ["a"]


async def test_events_are_read_in_pages_from_anywhere(store: Store) -> None:
    await store.commit(Commit("s", events=[given.event(str(n)) for n in range(10)]))

    assert [e.index for e in await store.events("s", 3, limit=4)] == [3, 4, 5, 6]
    assert [e.index for e in await store.events("s", 8)] == [8, 9]
    assert await store.events("s", 10) == []


async def test_an_event_is_found_by_its_key(store: Store) -> None:
    await store.commit(Commit("s", events=[given.event("a"), given.event("b")]))

    assert await store.index_of("s", "b") == 1
    assert await store.index_of("s", "c") is None


async def test_indexes_are_dense_under_many_writers(store: Store, other: Store) -> None:
    async def write(writer: int) -> None:
        at = store if writer % 2 else other
        for n in range(20):
            await at.commit(Commit("s", events=[given.event(f"{writer}/{n}"), given.event(f"shared/{n}")]))

    await asyncio.gather(*(write(writer) for writer in range(8)))

    events = await given.everything(store)
    assert [e.index for e in events] == list(range(8 * 20 + 20))
    assert len({e.key for e in events}) == len(events)
    for writer in range(8):
        own = [e.key for e in events if e.key.startswith(f"{writer}/")]
        assert own == [f"{writer}/{n}" for n in range(20)]


async def test_indexes_are_dense_under_two_processes(store: Store, url: str) -> None:
    writers = [
        await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.store.writer", url, "s", name, "100")
        for name in ("one", "two")
    ]

    assert [await writer.wait() for writer in writers] == [0, 0]
    events = await given.everything(store)
    assert [e.index for e in events] == list(range(200))
    assert [e.key for e in events if e.key.startswith("one")] == [f"one/{n}" for n in range(100)]


@pytest.mark.parametrize(
    "text",
    ["a\0b", "\ud800", "x\udfffy", "🧭 Ärger 漢字", "\u2028\x7f\x1b", "%s %(x)s :name ?", "\\u0000 \\", "x" * 2**20],
    ids=["nul", "high surrogate", "low surrogate", "beyond ascii", "controls", "placeholders", "escapes", "a mebibyte"],
)
async def test_any_text_comes_back(store: Store, text: str) -> None:
    body: JsonObject = {"text": text, "nested": [{text[:20]: text}]}
    await store.accept(given.delivery(body=body))

    await store.commit(Commit("s", records=[given.record(**body)], events=[given.event("k", **body)]))

    (delivery,) = await store.deliveries("s", ["d"])
    (event,) = await store.events("s")
    (record,) = await store.records("s")
    assert delivery.body == event.data == record.body == body


json_values = st.recursive(
    # Two surrogates that happen to form a pair are one character afterwards: leave out the high ones.
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(max_codepoint=0xD7FF)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=at_least(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@examples(data=st.dictionaries(st.text(max_size=8), json_values, max_size=4))
async def test_any_json_comes_back(store: Store, data: JsonObject) -> None:
    committed = await store.commit(Commit("s"))
    head = committed.session.events

    await store.commit(Commit("s", events=[NewEvent(type="x", key=str(head), data=data)]))

    (event,) = await store.events("s", head)
    assert event.data == data


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
async def test_a_name_that_no_database_can_hold_is_refused_and_nothing_is_written(store: Store, name: str) -> None:
    with pytest.raises(Invalid):
        await store.commit(Commit("s", records=[given.record("reply"), given.record(name)]))

    assert await store.records("s") == []
    await store.commit(Commit("s", records=[given.record("reply")]))
