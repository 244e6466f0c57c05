"""What sessions have to do with other servers: callbacks that they owe, and calls for which they wait."""

import asyncio
from dataclasses import replace

import pytest

from perdure.protocol.wire import JsonObject
from perdure.store.base import Store
from perdure.store.lifecycle import NewRemoteCall, RemoteCall
from tests.store.conformance.conftest import Database
from tests.support import given

CALLBACK: JsonObject = {"callId": "c", "subagentName": "s", "token": "secret", "url": "https://a.example/"}
NEW = NewRemoteCall("s", "subagent-call:away:c", {"tries": 0}, token_hash="hash")


@pytest.fixture
async def owing(empty: Store) -> Store:
    """A store with a session `s` that owes a callback, and one that does not."""
    await empty.create_session(replace(given.session(), callback=CALLBACK))
    await empty.create_session(given.session("other"))
    return empty


async def waiting(store: Store) -> RemoteCall:
    return await store.begin_remote_call(NEW)


# --- callbacks ---


async def test_a_callback_is_due_when_its_session_has_ended_and_not_before(owing: Store) -> None:
    assert await owing.due_callbacks(10) == []
    assert await owing.claim_callback("s", 30) is None

    await owing.commit(given.closing("s"))
    await owing.commit(given.closing("other"))

    assert await owing.due_callbacks(10) == ["s"]
    due = await owing.claim_callback("s", 30)
    assert due is not None
    assert (due.callback, due.tries) == (CALLBACK, 1)


async def test_one_of_many_processes_claims_a_callback(owing: Store) -> None:
    await owing.commit(given.closing("s"))

    claims = await asyncio.gather(*(owing.claim_callback("s", 30) for _ in range(8)))

    assert sum(claim is not None for claim in claims) == 1
    assert await owing.due_callbacks(10) == []


async def test_a_claim_ends_by_itself(owing: Store) -> None:
    await owing.commit(given.closing("s"))
    await owing.claim_callback("s", 0)

    again = await owing.claim_callback("s", 30)

    assert again is not None
    assert again.tries == 2


async def test_a_failed_try_says_when_the_next_one_is_unless_it_is_under_way(owing: Store) -> None:
    await owing.commit(given.closing("s"))
    first = await owing.claim_callback("s", 0)
    assert first is not None
    await owing.delay_callback(first, 60)
    assert await owing.due_callbacks(10) == []

    await owing.delay_callback(first, -1)
    second = await owing.claim_callback("s", 30)
    await owing.delay_callback(first, -1)

    assert second is not None
    assert await owing.due_callbacks(10) == []


async def test_a_settled_callback_keeps_no_secret_and_is_never_due_again(owing: Store, database: Database) -> None:
    await owing.commit(given.closing("s"))
    await owing.claim_callback("s", 0)

    await owing.settle_callback("s", "delivered")
    await owing.settle_callback("s", "abandoned")

    assert await owing.claim_callback("s", 0) is None
    status = await owing.callback("s")
    assert status is not None
    assert (status.settled, status.tries) == ("delivered", 1)
    assert database.run("SELECT callback FROM callbacks") == [(None,)]


async def test_a_repeated_end_does_not_make_a_callback_due_again(owing: Store) -> None:
    await owing.commit(given.closing("s"))
    await owing.claim_callback("s", 0)
    await owing.settle_callback("s", "delivered")

    await owing.commit(given.closing("s"))

    assert await owing.due_callbacks(10) == []


async def test_a_callback_outlives_its_deleted_session_until_it_is_settled(owing: Store, database: Database) -> None:
    await owing.begin_deletion("s")
    await owing.commit(given.closing("s"))
    while not await owing.purge("s", 500):
        pass

    assert await owing.due_callbacks(10) == ["s"]
    assert await owing.claim_callback("s", 30) is not None
    await owing.settle_callback("s", "delivered")

    assert database.run("SELECT session_id FROM callbacks") == []


async def test_a_callback_is_written_with_its_session_or_not_at_all(owing: Store) -> None:
    first = await owing.create_session(
        replace(given.session("t"), callback=CALLBACK), given.delivery("e", session_id="t", key="k")
    )
    again = await owing.create_session(
        replace(given.session("u"), callback=CALLBACK), given.delivery("f", session_id="u", key="k")
    )

    assert first is not None
    assert again is not None
    assert not again.fresh
    assert await owing.callback("t") is not None
    assert await owing.callback("u") is None


# --- calls ---


async def test_a_call_is_begun_once(store: Store) -> None:
    first = await waiting(store)
    await store.advance_remote_call(first, {"tries": 3})

    again = await store.begin_remote_call(replace(NEW, state={"tries": 0}, token_hash="another"))

    assert again.state == {"tries": 3}
    assert await store.remote_call_by_token("another") is None
    assert await store.remote_call_by_token("hash") == again


@pytest.mark.parametrize("at_once", [True, False])
async def test_the_first_result_of_a_call_is_delivered_and_no_other(store: Store, at_once: bool) -> None:
    call = await waiting(store)
    results = [{"output": number} for number in range(5)]

    if at_once:
        found = await asyncio.gather(*(store.end_remote_call(call, each, {}) for each in results))
    else:
        found = [await store.end_remote_call(call, each, {}) for each in results]

    (accepted,) = [each for each in found if each is not None]
    (row,) = await store.unread("s")
    assert row.delivery_id == accepted.delivery.delivery_id
    assert row.kind == "child-result"
    assert row.ref is not None
    assert row.ref["action"] == NEW.action
    assert (accepted.delivery.body or {})["result"] in results


async def test_a_result_ends_the_call_and_spends_its_token(store: Store) -> None:
    call = await waiting(store)
    await store.end_remote_call(call, {"output": "x"}, {"done": True})

    await store.advance_remote_call(call, {"tries": 9})

    ended = await store.remote_call("s", NEW.action)
    assert ended is not None
    assert (ended.ended, ended.state) == (True, {"done": True})
    assert await store.remote_call_by_token("hash") is None


async def test_a_result_for_a_session_that_has_ended_goes_nowhere(store: Store) -> None:
    call = await waiting(store)
    await store.commit(given.closing("s"))

    assert await store.end_remote_call(call, {"output": "x"}, {}) is None
    assert await store.unread("s") == []


async def test_a_result_comes_in_although_the_inbox_is_full(store: Store) -> None:
    call = await waiting(store)
    for number in range(3):
        await store.accept(given.delivery(f"d{number}"))

    accepted = await store.end_remote_call(call, {"output": "x"}, {})

    assert accepted is not None
    assert len(await store.unread("s")) == 4
