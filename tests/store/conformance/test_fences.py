from dataclasses import replace

import pytest

from perdure.errors import StoreBehind, Superseded, Unavailable
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.names import step_key
from perdure.store.base import Store
from perdure.store.values import Attempt, Commit, Fence, Hold, Partial
from tests.support import given


async def test_a_first_attempt_supersedes_no_other(store: Store) -> None:
    committed = await store.commit(
        replace(given.raising(1), superseding=given.event("superseded"), events=[given.event("started")])
    )

    assert not committed.superseded
    assert await given.keys(store) == ["started"]


async def test_a_scope_that_was_closed_before_an_attempt_began_is_open_to_newer_attempts(store: Store) -> None:
    closed = Fence(0, 0, given.MODEL, Attempt(number=0, generation=5), Hold.RAISE)
    await store.commit(Commit("s", fence=closed))

    with pytest.raises(Superseded):
        await store.commit(given.raising(4))
    committed = await store.commit(replace(given.raising(6), superseding=given.event("superseded")))

    assert not committed.superseded
    assert await given.keys(store) == []


async def test_a_newer_attempt_takes_over_and_emits_that_first(store: Store) -> None:
    await store.commit(given.raising(1))

    committed = await store.commit(
        replace(given.raising(2), superseding=given.event("superseded"), events=[given.event("started")])
    )

    assert committed.superseded
    assert await given.keys(store) == ["superseded", "started"]


def piece(generation: int, number: int, text: str, *, step: int = 0) -> NewEvent:
    key = step_key(0, step, f"g{generation}/{number}")
    return NewEvent(type=EventType.MESSAGE_APPENDED, key=key, data={"messageDelta": text}, turn=0, step=step)


def takeover(generation: int) -> Commit:
    """The commit of an attempt that would go on with what was said."""
    superseded, recovered = (
        NewEvent(type=type, key=step_key(0, 0, f"g{generation}/{name}"), data={}, turn=0, step=0)
        for type, name in ((EventType.STEP_SUPERSEDED, "superseded"), (EventType.STEP_RECOVERED, "recovered"))
    )
    return replace(given.raising(generation), superseding=superseded, continuing=recovered)


async def test_a_takeover_finds_what_was_said_in_the_order_in_which_it_was_said(store: Store) -> None:
    await store.commit(takeover(9))
    await store.commit(replace(given.keeping(9), events=[piece(9, 10, "Once"), piece(9, 9, " upon")]))
    await store.commit(takeover(10))
    await store.commit(replace(given.keeping(10), events=[piece(10, 1, " a"), piece(10, 1, "?", step=10)]))

    committed = await store.commit(takeover(11))

    assert committed.partial == Partial("Once upon a")
    told = [event for event in await store.events("s") if event.type.startswith("step.")]
    assert [event.type for event in told] == [EventType.STEP_RECOVERED] * 2
    assert told[0].data == {"phase": "provider_started", "decision": "continue"}


async def test_a_takeover_finds_nothing_of_what_was_retracted(store: Store) -> None:
    await store.commit(takeover(1))
    await store.commit(replace(given.keeping(1), events=[piece(1, 1, "Once")]))
    retracting = await store.commit(replace(takeover(2), continuing=None))

    committed = await store.commit(takeover(3))

    assert (retracting.partial, committed.partial) == (None, None)
    assert [event.type for event in await store.events("s")][1:] == [EventType.STEP_SUPERSEDED] * 2


async def test_an_attempt_that_raises_again_supersedes_no_other(store: Store) -> None:
    await store.commit(given.raising(2))

    committed = await store.commit(replace(given.raising(2), superseding=given.event("superseded")))

    assert not committed.superseded
    assert await given.keys(store) == []


@pytest.mark.parametrize("hold", Hold)
async def test_an_older_attempt_may_not_write(store: Store, hold: Hold) -> None:
    await store.commit(given.raising(2))

    with pytest.raises(Superseded):
        await store.commit(
            Commit("s", fence=given.fence(hold, 1), records=[given.record()], events=[given.event("late")])
        )

    assert await given.keys(store) == []
    assert await store.records("s") == []


@pytest.mark.parametrize("hold", [Hold.KEEP, Hold.RELEASE])
async def test_an_attempt_that_never_raised_its_fence_may_not_write(store: Store, hold: Hold) -> None:
    with pytest.raises(Superseded):
        await store.commit(Commit("s", fence=given.fence(hold, 1)))


@pytest.mark.parametrize("hold", [Hold.KEEP, Hold.RELEASE])
async def test_an_attempt_from_the_future_may_not_write(store: Store, hold: Hold) -> None:
    await store.commit(given.raising(1))

    with pytest.raises(Superseded):
        await store.commit(Commit("s", fence=given.fence(hold, 2)))


async def test_the_current_attempt_may_write(store: Store) -> None:
    await store.commit(given.raising(1))

    await store.commit(replace(given.keeping(1), events=[given.event("a")]))
    await store.commit(replace(given.keeping(1), events=[given.event("b")]))

    assert await given.keys(store) == ["a", "b"]


async def test_a_released_scope_is_closed(store: Store) -> None:
    await store.commit(given.raising(1))
    await store.commit(Commit("s", fence=given.fence(Hold.RELEASE, 1), events=[given.event("end")]))

    with pytest.raises(Superseded):
        await store.commit(replace(given.keeping(1), events=[given.event("late")]))

    assert await given.keys(store) == ["end"]


async def test_scopes_do_not_meet(store: Store) -> None:
    await store.commit(Commit("s", fence=given.fence(Hold.RAISE, 9, scope="call/1")))
    await store.commit(Commit("s", fence=given.fence(Hold.RAISE, 9, step=1)))

    await store.commit(given.raising(1))

    await store.commit(given.keeping(1))


async def test_a_winner_is_found_before_the_fence_is_looked_at(store: Store) -> None:
    await store.commit(replace(given.raising(2), records=[given.record(by="winner")]))

    late = await store.commit(replace(given.keeping(1), unless=(0, 0, "reply"), events=[given.event("late")]))

    assert late.existing is not None
    assert late.existing.body == {"by": "winner"}
    assert await given.keys(store) == []


async def test_a_closed_turn_has_no_attempts_left(store: Store) -> None:
    await store.commit(given.raising(1, turn=0, step=0))
    await store.commit(given.raising(1, turn=0, step=1))
    await store.commit(given.raising(1, turn=1))

    await store.commit(Commit("s", close_turn=0))

    for step in (0, 1):
        with pytest.raises(Superseded):
            await store.commit(given.keeping(1, turn=0, step=step))
    await store.commit(given.keeping(1, turn=1))


async def test_a_closed_session_has_no_attempts_left(store: Store) -> None:
    await store.commit(given.raising(1))

    await store.commit(Commit("s", close=True))

    with pytest.raises(Superseded):
        await store.commit(given.keeping(1))


async def test_a_session_that_has_lost_events_is_older_than_its_writer(store: Store) -> None:
    await store.commit(Commit("s", events=[given.event("a")], records=[given.record(by="first")]))

    with pytest.raises(StoreBehind) as behind:
        # Even a record that is there already proves nothing: it may come from before the copy was made.
        await store.commit(
            Commit("s", head=2, unless=(0, 0, "reply"), unless_cancelled=0, events=[given.event("b")], close=True)
        )

    assert behind.value.details == {"events": 1, "expected": 2}
    assert await given.keys(store) == ["a"]
    assert await store.token_of("s") == "token of s"


@pytest.mark.parametrize("head", [None, 0, 1])
async def test_a_session_with_as_many_events_or_more_is_not(store: Store, head: int | None) -> None:
    await store.commit(Commit("s", events=[given.event("a")]))

    committed = await store.commit(Commit("s", head=head, events=[given.event("b")]))

    assert committed.session.events == 2


async def test_a_session_that_has_changed_since_it_was_read_is_left_alone(store: Store) -> None:
    await store.commit(Commit("s", events=[given.event("a")]))

    with pytest.raises(Unavailable):
        await store.commit(Commit("s", head=0, current=True, events=[given.event("b")]))
    committed = await store.commit(Commit("s", head=1, current=True, events=[given.event("c")]))

    assert committed.session.events == 2
    assert await given.keys(store) == ["a", "c"]
