"""Sessions from Python: tokens, races, order. The worker is real, and so is everything below it."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure.errors import IdempotencyConflict, NoActiveSession, TokenConflict, Unavailable
from perdure.protocol.deliveries import LOCAL, Receipt
from perdure.protocol.events import BOUNDARIES, Event
from perdure.runtime.connect import secret
from perdure.runtime.sessions import Sessions
from perdure.session.state import hash_token
from perdure.store.base import Store
from perdure.store.deliveries import NewDelivery
from perdure.store.values import NewSession
from tests.support.plugin import StackFactory
from tests.support.processes import PATIENCE
from tests.support.stack import Stack


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(apis=0, provider=True, agents="tests.runtime.agents:agent")


@pytest.fixture
async def store(stack: Stack) -> AsyncGenerator[Store]:
    store = await stack.store()
    yield store
    await store.close()


@pytest.fixture
async def sessions(stack: Stack, store: Store) -> Sessions:
    settings = stack.settings
    return Sessions(store, await stack.client(), secret=secret(settings), task_queue=settings.task_queue)


def a_token() -> str:
    return f"room:{uuid.uuid4().hex}"


async def events(store: Store, session_id: str, *, boundaries: int = 1) -> list[Event]:
    """The session's events, once it has reached so many boundaries."""
    async with asyncio.timeout(PATIENCE), store.watch(session_id) as watch:
        while True:
            found = list(await store.events(session_id))
            if sum(event.type in BOUNDARIES for event in found) >= boundaries:
                return found
            await watch.changed()


def fields(found: list[Event], type: str, field: str) -> list[Any]:
    return [(event.data or {})[field] for event in found if event.type == type]


async def test_a_token_without_a_session_is_no_active_session(sessions: Sessions) -> None:
    with pytest.raises(NoActiveSession) as raised:
        await sessions.deliver(a_token(), "hello")

    assert raised.value.code == "NO_ACTIVE_SESSION"


async def test_resume_or_start_in_three_lines(sessions: Sessions, store: Store) -> None:
    token = a_token()

    for message in ("say one", "say two"):
        try:
            receipt = await sessions.deliver(token, message)
        except NoActiveSession:
            receipt = await sessions.start("host", message, token=token)

    found = await events(store, receipt.session_id, boundaries=2)
    assert fields(found, "message.completed", "message") == ["one", "two"]


async def test_many_resume_or_starts_at_once_make_one_session(sessions: Sessions, store: Store) -> None:
    token = a_token()

    receipts = await asyncio.gather(*(sessions.deliver_or_start(token, "host", f"say {n}") for n in range(12)))

    [session_id] = {receipt.session_id for receipt in receipts}
    found = await events(store, session_id, boundaries=12)
    assert sorted(fields(found, "message.received", "message")) == sorted(f"say {n}" for n in range(12))


async def test_a_repeated_resume_or_start_gets_the_same_receipt(sessions: Sessions, store: Store) -> None:
    token = a_token()

    first = await sessions.deliver_or_start(token, "host", "say one", idempotency_key=f"once-{token}")
    again = await sessions.deliver_or_start(token, "host", "say one", idempotency_key=f"once-{token}")

    assert (again.session_id, again.delivery_id) == (first.session_id, first.delivery_id)
    with pytest.raises(IdempotencyConflict):
        await sessions.deliver_or_start(token, "host", "say two", idempotency_key=f"once-{token}")
    found = await events(store, first.session_id)
    assert fields(found, "message.received", "message") == ["say one"]


async def test_resume_or_start_finds_a_session_that_was_written_and_never_started(
    sessions: Sessions, store: Store
) -> None:
    token, session_id = a_token(), f"ses_{uuid.uuid4().hex}"
    first = NewDelivery(session_id, "dlv_first", {"message": "say one"}, LOCAL.owner)
    await store.create_session(NewSession(session_id, "host", "conversation", hash_token(token), LOCAL), first)

    receipt = await sessions.deliver_or_start(token, "host", "say two")

    assert (receipt.session_id, receipt.delayed) == (session_id, False)
    found = await events(store, session_id, boundaries=2)
    assert fields(found, "message.completed", "message") == ["one", "two"]


async def test_resume_or_start_ends_even_if_the_token_never_stops_changing(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[str] = []

    async def raised(*_: Any, **__: Any) -> None: ...

    async def another_caller(*_: Any, **__: Any) -> Receipt:
        rounds.append("start")
        raise TokenConflict

    monkeypatch.setattr(sessions, "_owner", raised)
    monkeypatch.setattr(sessions, "start", another_caller)

    with pytest.raises(Unavailable):
        await sessions.deliver_or_start(a_token(), "host", "hello")
    assert 0 < len(rounds) < 10


async def test_a_live_sessions_token_cannot_be_claimed_and_its_input_goes_nowhere(
    sessions: Sessions, store: Store
) -> None:
    token = a_token()
    owner = await sessions.start("host", "say mine", token=token)

    with pytest.raises(TokenConflict):
        await sessions.start("host", "say stolen", token=token)

    found = await events(store, owner.session_id)
    assert fields(found, "message.received", "message") == ["say mine"]


async def test_the_token_of_a_finished_session_is_free(sessions: Sessions, store: Store) -> None:
    token = a_token()
    finished = await sessions.start("host", "say done", token=token, mode="task")
    await events(store, finished.session_id)

    with pytest.raises(NoActiveSession):
        await sessions.deliver(token, "hello")
    assert (await sessions.start("host", "say again", token=token)).session_id != finished.session_id


async def test_a_repeated_request_gets_its_receipt_even_if_another_session_owns_its_token_now(
    sessions: Sessions, store: Store
) -> None:
    token = a_token()
    task = await sessions.start("host", "drip 5 delay 20", token=token, mode="task")
    first = await sessions.deliver(token, "more", idempotency_key=f"once-{token}")
    await events(store, task.session_id)

    free = await sessions.deliver(token, "more", idempotency_key=f"once-{token}")
    await sessions.start("host", "say again", token=token)
    taken = await sessions.deliver(token, "more", idempotency_key=f"once-{token}", session_id=task.session_id)

    assert {first.delivery_id} == {free.delivery_id, taken.delivery_id}
    assert (free.deduplicated, taken.deduplicated) == (True, True)


async def test_a_token_is_live_before_the_first_turn(sessions: Sessions, store: Store) -> None:
    receipt = await sessions.start("host", "drip 20 delay 20")
    token = receipt.continuation_token
    assert token is not None

    await sessions.deliver(token, "say second")

    found = await events(store, receipt.session_id, boundaries=2)
    assert fields(found, "message.completed", "message")[-1] == "second"


async def test_deliveries_during_a_turn_become_turns_of_their_own_in_order(sessions: Sessions, store: Store) -> None:
    token = a_token()
    receipt = await sessions.start("host", "drip 20 delay 20", token=token)

    for number in range(3):
        await sessions.deliver(token, f"say {number}")

    found = await events(store, receipt.session_id, boundaries=4)
    assert fields(found, "message.completed", "message")[1:] == ["0", "1", "2"]


async def test_coalesced_deliveries_share_a_turn_and_keep_every_message(
    stack: Stack, sessions: Sessions, store: Store
) -> None:
    token = a_token()
    # Frozen, so that all of them wait before the first turn ends.
    stack.workers[0].stop()
    try:
        receipt = await sessions.start("host", "say first", token=token)
        for number in range(3):
            await sessions.deliver(token, f"say {number}", coalesce=True)
    finally:
        stack.workers[0].cont()

    found = await events(store, receipt.session_id, boundaries=2)
    later = [event for event in found if event.turn != 0 or (event.data or {}).get("sequence") == 1]
    assert fields(found, "message.received", "message")[1:] == ["say 0", "say 1", "say 2"]
    assert sum(event.type == "turn.started" for event in later) == 1


async def test_a_session_answers_to_the_token_that_its_tool_set(sessions: Sessions, store: Store) -> None:
    old, new = a_token(), a_token()
    receipt = await sessions.start("host", f'call adopt {{"token": "{new}"}} then say adopted', token=old)
    await events(store, receipt.session_id)

    with pytest.raises(NoActiveSession):
        await sessions.deliver(old, "say lost")
    await sessions.deliver(new, "say found")

    found = await events(store, receipt.session_id, boundaries=2)
    assert fields(found, "message.completed", "message") == ["adopted", "found"]


async def test_a_delivery_to_the_new_token_during_the_turn_that_sets_it_is_consumed(
    sessions: Sessions, store: Store
) -> None:
    new = a_token()
    receipt = await sessions.start("host", f'call adopt {{"token": "{new}"}} then drip 30 delay 20')
    async with asyncio.timeout(PATIENCE), store.watch(receipt.session_id) as watch:
        while await store.route(hash_token(new)) is None:
            await watch.changed(1)

    await sessions.deliver(new, "say heard")

    found = await events(store, receipt.session_id, boundaries=2)
    assert fields(found, "message.completed", "message")[-1] == "heard"


async def test_taking_a_token_that_another_session_owns_fails_the_session(sessions: Sessions, store: Store) -> None:
    taken = a_token()
    owner = await sessions.start("host", "say mine", token=taken)
    thief = await sessions.start("host", f'call adopt {{"token": "{taken}"}} then say stolen')

    found = await events(store, thief.session_id)

    assert fields(found, "session.failed", "code") == ["TOKEN_CONFLICT"]
    assert thief.continuation_token is not None
    with pytest.raises(NoActiveSession):
        await sessions.deliver(thief.continuation_token, "hello")
    await sessions.deliver(taken, "say still mine")
    assert (
        fields(await events(store, owner.session_id, boundaries=2), "message.completed", "message")[-1] == "still mine"
    )
