"""Sessions that cannot continue by themselves, and how they are known to continue."""

import asyncio
from dataclasses import replace

import pytest

from perdure.errors import Superseded
from perdure.protocol.events import EventType
from perdure.store.base import Store
from perdure.store.values import Commit, Hold, SessionChange, SessionQuery, ShownStatus
from tests.support import given
from tests.support.given import attend


async def types(store: Store) -> list[str]:
    return [event.type for event in await given.everything(store)]


async def test_a_session_that_needs_attention_emits_it(store: Store) -> None:
    await store.commit(given.running())

    assert await attend(store)

    row = await given.read_session(store)
    assert row.attention is not None
    assert (row.attention["code"], row.attention["message"]) == ("AGENT_GONE", "AGENT_GONE happened.")
    assert row.attention["since"].endswith("Z")
    assert (row.status, row.shown_status) == ("running", "needs_attention")
    (event,) = await given.everything(store)
    assert event.type == EventType.SESSION_ATTENTION
    assert event.data == {"code": "AGENT_GONE", "message": "AGENT_GONE happened."}
    assert await given.dense(store)


@pytest.mark.parametrize("owner", [None, given.ADA.owner])
async def test_sessions_that_need_attention_are_listed_as_such_and_as_nothing_else(
    store: Store, owner: str | None
) -> None:
    await store.commit(given.running())
    await attend(store)

    async def found(status: ShownStatus) -> list[str]:
        return [row.session_id for row in (await store.sessions(SessionQuery(owner=owner, status=status))).sessions]

    assert (await found("needs_attention"), await found("running")) == (["s"], [])
    await store.commit(Commit("s", change=SessionChange(status="waiting")))
    assert (await found("needs_attention"), await found("waiting")) == ([], ["s"])


async def test_the_same_attention_twice_is_emitted_once(store: Store) -> None:
    assert [await attend(store) for _ in range(3)] == [True, False, False]

    assert await types(store) == [EventType.SESSION_ATTENTION]


async def test_of_twenty_equal_attentions_at_once_one_is_emitted(store: Store, other: Store) -> None:
    said = await asyncio.gather(*(attend((store, other)[n % 2]) for n in range(20)))

    assert sorted(said) == [False] * 19 + [True]
    assert await types(store) == [EventType.SESSION_ATTENTION]
    assert await given.dense(store)


async def test_another_reason_is_emitted_too(store: Store) -> None:
    await attend(store, "AGENT_GONE")

    await attend(store, "STORE_BEHIND")

    attention = (await given.read_session(store)).attention
    assert attention is not None
    assert attention["code"] == "STORE_BEHIND"
    assert await types(store) == [EventType.SESSION_ATTENTION] * 2


async def test_an_ended_or_unknown_session_needs_none(store: Store) -> None:
    await store.commit(given.closing())

    assert not await attend(store)
    assert not await attend(store, session_id="unknown")

    assert (await given.read_session(store)).attention is None
    assert await types(store) == [EventType.SESSION_COMPLETED]


@pytest.mark.parametrize(
    "commit",
    [
        given.raising(1),
        Commit("s", change=SessionChange(status="waiting", turns=1)),
        given.parking("r"),
        Commit("s", recovers=True),
    ],
    ids=["a fence raised", "a turn ended", "a turn parked", "recovers"],
)
async def test_a_session_that_continues_needs_none_any_more_and_readers_know(store: Store, commit: Commit) -> None:
    await attend(store)

    await store.commit(replace(commit, events=[given.event("on")]))

    row = await given.read_session(store)
    assert (row.attention, row.shown_status) == (None, row.status)
    events = await given.everything(store)
    assert [event.type for event in events] == [EventType.SESSION_ATTENTION, EventType.SESSION_RECOVERED, "test.event"]
    assert events[1].data == {"code": "AGENT_GONE"}
    assert await given.dense(store)


async def test_a_session_that_ends_has_recovered_before_its_end(store: Store) -> None:
    await attend(store)

    await store.commit(given.closing())

    assert await types(store) == [
        EventType.SESSION_ATTENTION,
        EventType.SESSION_RECOVERED,
        EventType.SESSION_COMPLETED,
    ]
    assert (await given.read_session(store)).attention is None


async def test_a_session_that_is_closed_without_an_event_needs_none(store: Store) -> None:
    await attend(store)

    await store.commit(Commit("s", close=True))

    assert (await given.read_session(store)).attention is None


@pytest.mark.parametrize("hold", [Hold.KEEP, Hold.RELEASE])
async def test_what_an_attempt_writes_later_shows_nothing(store: Store, hold: Hold) -> None:
    await store.commit(given.raising(1))
    await attend(store)

    await store.commit(Commit("s", fence=given.fence(hold, 1), change=SessionChange(status="running", steps=1)))

    assert (await given.read_session(store)).attention is not None
    assert await types(store) == [EventType.SESSION_ATTENTION]


async def test_an_attempt_that_comes_too_late_shows_nothing(store: Store) -> None:
    await store.commit(given.raising(2))
    await attend(store)

    with pytest.raises(Superseded):
        await store.commit(given.raising(1))

    assert (await given.read_session(store)).attention is not None


async def test_a_commit_that_another_process_has_written_shows_nothing(store: Store) -> None:
    await store.commit(Commit("s", records=[given.record()]))
    await attend(store)

    await store.commit(Commit("s", unless=(0, 0, "reply"), recovers=True))

    assert (await given.read_session(store)).attention is not None


async def test_each_need_and_each_recovery_is_emitted_once(store: Store) -> None:
    for _ in range(3):
        await attend(store)
        await store.commit(given.raising(1))
        await store.commit(given.raising(1))

    assert await types(store) == [EventType.SESSION_ATTENTION, EventType.SESSION_RECOVERED] * 3
    assert await given.dense(store)


async def test_needs_and_recoveries_at_once_leave_a_log_that_agrees_with_the_session(
    store: Store, other: Store
) -> None:
    async def recover() -> None:
        await other.commit(given.raising(1))

    await asyncio.gather(*(attend(store) if n % 2 else recover() for n in range(30)))

    emitted = await types(store)
    assert emitted == [EventType.SESSION_ATTENTION, EventType.SESSION_RECOVERED] * (len(emitted) // 2) + (
        [EventType.SESSION_ATTENTION] if len(emitted) % 2 else []
    )
    assert ((await given.read_session(store)).attention is not None) == bool(len(emitted) % 2)
    assert await given.dense(store)


async def test_an_attempt_that_takes_over_from_an_older_one_emits_the_recovery_first(store: Store) -> None:
    await store.commit(given.raising(1))
    await attend(store)

    await store.commit(replace(given.raising(2), superseding=given.event("superseded"), events=[given.event("on")]))

    assert (await given.keys(store))[-2:] == ["superseded", "on"]
    assert (await types(store))[1] == EventType.SESSION_RECOVERED


async def test_readers_wake(store: Store) -> None:
    async with store.watch("s") as watch:
        while await watch.changed(0.05):
            pass

        await attend(store)

        assert await watch.changed(5)
