"""What retention deletes, what it leaves, and that readers still get one event for each index."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from perdure.errors import ForkRefused
from perdure.protocol import names
from perdure.protocol.events import EVENT_EXPIRED, Event, EventType, NewEvent
from perdure.session.inputs import resolved
from perdure.store.base import Store
from perdure.store.engine import lifecycle
from perdure.store.engine.database import Transaction
from perdure.store.follow import read_all
from perdure.store.lifecycle import Keep, NewFork
from perdure.store.values import Commit, SessionChange
from tests.store.conformance.conftest import Database
from tests.store.conformance.test_deletions import delete
from tests.store.conformance.test_forks import fork, owners, play
from tests.support import given
from tests.support.given import opening

#: Everything is older than it is to be kept.
AT_ONCE = -60.0
A_DAY = 86_400.0

TURN = [
    EventType.TURN_STARTED,
    EventType.MESSAGE_RECEIVED,
    EventType.STEP_STARTED,
    EventType.MESSAGE_APPENDED,
    EventType.MESSAGE_APPENDED,
    EventType.MESSAGE_COMPLETED,
    EventType.TURN_COMPLETED,
    EventType.SESSION_WAITING,
]


async def talk(store: Store, turn: int, session_id: str = "s") -> None:
    events = [
        NewEvent(type=type, key=names.turn_key(turn, f"{number}"), data={"n": number}, turn=turn)
        for number, type in enumerate(TURN)
    ]
    change = SessionChange(status="waiting", turns=turn + 1)
    await store.commit(
        Commit(session_id, records=[given.record(turn=turn, of=session_id)], events=events, change=change)
    )


async def expire(store: Store, keep: Keep) -> None:
    cursor = await store.expire(keep, None, 2)
    while cursor is not None:
        cursor = await store.expire(keep, cursor, 2)


async def everything(store: Store, session_id: str = "s") -> list[Event]:
    return [event async for event in read_all(store, session_id)]


async def types(store: Store, turn: int) -> list[str]:
    """The types of the events of one turn, as a reader from index 0 sees them."""
    return [event.type for event in await everything(store)][turn * len(TURN) : (turn + 1) * len(TURN)]


async def test_deltas_go_first_and_every_index_stays(store: Store) -> None:
    for turn in range(3):
        await talk(store, turn)

    await expire(store, Keep(deltas=AT_ONCE))

    events = await everything(store)
    assert [event.index for event in events] == list(range(3 * len(TURN)))
    gone = [EVENT_EXPIRED if type == EventType.MESSAGE_APPENDED else type for type in TURN]
    assert await types(store, 0) == await types(store, 1) == gone
    # The last turn of a session that continues is left alone.
    assert await types(store, 2) == TURN
    assert all(event.data is None for event in events if event.type == EVENT_EXPIRED)


async def test_messages_go_with_their_deltas_and_the_course_of_the_session_stays(store: Store) -> None:
    for turn in range(2):
        await talk(store, turn)

    await expire(store, Keep(messages=AT_ONCE))

    kept = [type for type in await types(store, 0) if type != EVENT_EXPIRED]
    assert kept == ["turn.started", "step.started", "turn.completed", "session.waiting"]
    assert [event.index for event in await everything(store)] == list(range(2 * len(TURN)))
    # What the next prompt is made of stays.
    assert len(await store.records("s")) == 2


async def test_a_reader_may_begin_and_stop_anywhere(store: Store) -> None:
    for turn in range(2):
        await talk(store, turn)
    await expire(store, Keep(messages=AT_ONCE))
    whole = await everything(store)

    for start in range(len(whole)):
        for limit in (1, 2, 3, 100):
            assert await store.events("s", start, limit) == whole[start : start + limit]
    assert await store.events("s", len(whole)) == []


async def test_what_is_young_stays(store: Store) -> None:
    for turn in range(3):
        await talk(store, turn)
    before = await everything(store)

    await expire(store, Keep(deltas=A_DAY, messages=A_DAY, records=A_DAY))
    await expire(store, Keep())

    assert await everything(store) == before


async def test_an_old_turn_expires_while_a_young_one_stays(store: Store, database: Database) -> None:
    for turn in range(3):
        await talk(store, turn)
    database.run("UPDATE events SET at = '2020-01-01T00:00:00.000Z' WHERE turn = 0")
    database.run("UPDATE sessions SET created_at = '2020-01-01T00:00:00.000Z'")

    await expire(store, Keep(deltas=A_DAY))
    assert EVENT_EXPIRED in await types(store, 0)
    assert await types(store, 1) == TURN

    database.run("UPDATE events SET at = '2020-01-01T00:00:00.000Z' WHERE turn = 1")
    await expire(store, Keep(deltas=A_DAY))
    assert EVENT_EXPIRED in await types(store, 1)


async def test_records_go_when_the_session_has_ended(store: Store, database: Database) -> None:
    await store.create_session(given.session("open"))
    for session_id in ("s", "open"):
        await play(store, 0, session_id, cart=1)
    await store.commit(opening("r"))
    await store.commit(given.closing())

    await expire(store, Keep(records=AT_ONCE))

    assert await store.records("s") == []
    assert await store.slots("s", ["cart"]) == {}
    assert await store.input("r") is None
    assert len(await store.records("open")) == 1
    assert await store.session("s") is not None
    assert (await everything(store))[-1].type == EventType.SESSION_COMPLETED


async def test_records_that_a_fork_shares_stay(store: Store) -> None:
    await play(store, 0)
    await fork(store, 0)
    await store.commit(given.closing())

    await expire(store, Keep(deltas=AT_ONCE, messages=AT_ONCE, records=AT_ONCE))

    assert await owners(store, "f") == ["s"]


async def test_a_fork_that_shares_no_turn_keeps_no_records(store: Store) -> None:
    await play(store, 0)
    await store.fork(NewFork("f", "token of f", "s", 0, step=0, cut=given.record("cut", of="f")))
    await store.commit(given.closing())

    await expire(store, Keep(records=AT_ONCE))

    assert await owners(store, "s") == []
    assert await owners(store, "f") == ["f", "s"]


async def test_an_expired_fork_does_not_keep_the_records_of_its_parent(store: Store) -> None:
    await play(store, 0)
    await fork(store, 0)
    for session_id in ("s", "f"):
        await store.commit(given.closing(session_id))

    for _ in range(2):
        await expire(store, Keep(records=AT_ONCE))

    assert await owners(store, "s") == []


async def test_an_expired_fork_inherits_nothing(store: Store, database: Database) -> None:
    await play(store, 0)
    await fork(store, 0)
    await store.commit(given.closing("f"))
    await expire(store, Keep(records=AT_ONCE))

    await delete(store)

    assert database.run("SELECT 1 FROM records") == []


@pytest.mark.parametrize("deleted", [False, True])
async def test_an_expired_fork_of_older_code_gives_up_its_parent(
    store: Store, database: Database, *, deleted: bool
) -> None:
    await play(store, 0)
    for to in ("f", "g"):
        await fork(store, 0, to=to)
    await store.commit(given.closing("f"))
    # Such code left it with its parent.
    database.run("UPDATE sessions SET expired_records = 1 WHERE session_id = 'f'")
    database.run("DELETE FROM records WHERE session_id = 'f'")

    if deleted:
        await delete(store)
    else:
        await expire(store, Keep(records=AT_ONCE))

    assert (await given.read_session(store, "f")).forked_from is None
    assert await owners(store, "f") == []
    assert await owners(store, "g") == ["s"]


@pytest.mark.parametrize("limit", [500, 1])
async def test_no_fork_of_a_session_whose_records_have_expired(
    store: Store, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turn in range(3):
        await play(store, turn)
    await store.commit(given.closing())
    monkeypatch.setattr(lifecycle, "_ROWS", limit)

    # One transaction: with the limit, the process dies after it, and the last turn is still there.
    with dying_after_one_transaction(monkeypatch):
        await expire(store, Keep(records=AT_ONCE))

    assert len(await owners(store, "s")) == (2 if limit == 1 else 0)
    assert (await given.read_session(store)).records_expired
    with pytest.raises(ForkRefused) as refused:
        await fork(store, 2)
    assert refused.value.details["reason"] == "records_expired"
    with pytest.raises(ForkRefused):
        await store.slots_at("s", 2)

    # What was begun goes on.
    await expire(store, Keep(records=AT_ONCE))
    assert await owners(store, "s") == []


@contextmanager
def dying_after_one_transaction(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Retention of records stops after one transaction of a session."""
    real = lifecycle._expire_records  # pyright: ignore[reportPrivateUsage]

    async def once(tx: Transaction, session_id: str, oldest: str) -> bool:
        await real(tx, session_id, oldest)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "_expire_records", once)
        yield


@pytest.mark.parametrize("turns", [19, 20, 21, 45])
async def test_a_long_session_expires_in_several_transactions(store: Store, turns: int) -> None:
    for turn in range(turns):
        await talk(store, turn)

    await expire(store, Keep(deltas=AT_ONCE))

    left = [event.turn for event in await everything(store) if event.type == EventType.MESSAGE_APPENDED]
    assert left == [turns - 1] * 2
    assert [event.index for event in await everything(store)] == list(range(turns * len(TURN)))


async def title(store: Store) -> str | None:
    return (await given.read_session(store)).title


async def titled(store: Store, database: Database) -> None:
    database.run("UPDATE sessions SET title = 'My secret'")
    assert await title(store) == "My secret"


async def test_the_title_goes_with_the_first_turn(store: Store, database: Database) -> None:
    await titled(store, database)
    await talk(store, 0)

    # The only turn of a session that goes on stays.
    await expire(store, Keep(messages=AT_ONCE))
    assert await title(store) == "My secret"

    await talk(store, 1)
    await expire(store, Keep(deltas=AT_ONCE, messages=A_DAY))
    assert await title(store) == "My secret"

    await expire(store, Keep(messages=AT_ONCE))
    assert await title(store) is None


async def test_what_older_code_left_goes(store: Store, database: Database) -> None:
    """It left the title, and the answers to requests."""
    await talk(store, 0)
    await store.commit(opening("r"))
    await answer(store, "r", "a")
    await store.commit(given.closing())
    await titled(store, database)
    database.run("UPDATE sessions SET expired_messages = 1")
    before = await everything(store)
    assert EventType.INPUT_RESOLVED in [each.type for each in before]

    await expire(store, Keep(deltas=AT_ONCE, messages=A_DAY))
    assert await title(store) == "My secret"

    await expire(store, Keep(messages=AT_ONCE))

    assert await title(store) is None
    after = await everything(store)
    assert EventType.INPUT_RESOLVED not in [each.type for each in after]
    assert [each.index for each in after] == [each.index for each in before]


async def test_the_title_of_a_young_import_stays(store: Store, database: Database) -> None:
    """Its first turns have no events."""
    await titled(store, database)
    await talk(store, 7)

    await expire(store, Keep(deltas=AT_ONCE, messages=A_DAY))

    assert await title(store) == "My secret"


async def answer(store: Store, request_id: str, delivery_id: str) -> None:
    answering = given.answering((request_id, given.chooses("approve")), delivery_id=delivery_id)
    await store.answer(answering, lambda row: resolved(row.request, row.status, row.answer))


async def test_answers_go_with_the_turn_that_asked(store: Store, database: Database) -> None:
    await talk(store, 0)
    await store.commit(opening("r"))
    await store.commit(opening("late"))
    await answer(store, "r", "a")
    await talk(store, 1)
    database.run("UPDATE events SET at = '2020-01-01T00:00:00.000Z' WHERE type <> 'input.resolved'")

    # It was answered today, so the turn is not over for long.
    database.run("UPDATE sessions SET created_at = '2020-01-01T00:00:00.000Z'")
    await expire(store, Keep(messages=A_DAY))
    assert EventType.INPUT_RESOLVED in [each.type for each in await everything(store)]

    await expire(store, Keep(messages=AT_ONCE))
    assert EventType.INPUT_RESOLVED not in [each.type for each in await everything(store)]

    # One that is answered after its turn has expired goes with the next one.
    await answer(store, "late", "b")
    await talk(store, 2)
    await expire(store, Keep(messages=AT_ONCE))
    assert EventType.INPUT_RESOLVED not in [each.type for each in await everything(store)]
    assert await given.dense(store)
