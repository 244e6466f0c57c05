"""What the store reports of attempts. The fences decide; a report must agree with them, and end with its attempt."""

from dataclasses import replace
from typing import LiteralString

import pytest

from perdure.errors import Invalid, Superseded
from perdure.protocol.events import EventType, NewEvent, Usage
from perdure.store.attempts import AttemptKey, AttemptQuery, AttemptReport, AttemptRow
from perdure.store.base import Store
from perdure.store.values import Attempt, Commit, Fence, Hold, SessionChange
from tests.store.conformance.conftest import Database
from tests.support import given

A_DAY = 86_400.0
USED = Usage(input_tokens=7, output_tokens=2)
LONG_AGO = 1_000_000_000.0


def raising(generation: int, *, number: int = 1, lease_until: float | None = None, turn: int = 0) -> Commit:
    attempt = Attempt(number, generation, worker=f"host:{generation}:b", lease_until=lease_until)
    return Commit("s", fence=Fence(turn, 0, given.MODEL, attempt, Hold.RAISE))


def releasing(generation: int, *, turn: int = 0) -> Commit:
    return Commit("s", fence=given.fence(Hold.RELEASE, generation, turn=turn))


async def attempts(store: Store, session_id: str = "s") -> list[AttemptRow]:
    return [*(await store.attempts.list(AttemptQuery(session_id))).attempts]


async def ends(store: Store) -> list[tuple[int, str, str | None]]:
    return [(each.number, each.status, (each.error or {}).get("message")) for each in await attempts(store)]


async def test_an_attempt_begins_with_its_fence(store: Store) -> None:
    await store.commit(raising(5))

    [attempt] = await attempts(store)

    assert (attempt.status, attempt.number, attempt.worker, attempt.ended_at) == ("running", 1, "host:5:b", None)
    assert attempt.attempt_id.startswith("att_")
    assert attempt.lease_expires_at > attempt.started_at


async def test_an_attempt_that_repeats_its_first_commit_begins_once(store: Store) -> None:
    await store.commit(raising(5))
    await store.commit(raising(5))

    assert [each.number for each in await attempts(store)] == [1]


async def test_an_attempt_succeeds_when_it_gives_its_fence_back(store: Store) -> None:
    await store.commit(raising(5))

    await store.commit(releasing(5))

    [attempt] = await attempts(store)
    assert (attempt.status, attempt.error) == ("succeeded", None)
    assert attempt.ended_at is not None


async def test_an_attempt_says_how_it_has_failed(store: Store) -> None:
    await store.commit(raising(5))
    fence, error = given.fence(Hold.RELEASE, 5), {"type": "MODEL_CALL_FAILED", "message": "It answered 503."}

    await store.commit(Commit("s", fence=fence, report=fence.report("failed", error)))

    [attempt] = await attempts(store)
    assert (attempt.status, attempt.error) == ("failed", error)


async def test_a_report_without_a_commit_ends_the_attempt_once(store: Store) -> None:
    await store.commit(raising(5))
    key = AttemptKey(0, 0, given.MODEL, 5)

    await store.attempts.report("s", AttemptReport(key, "failed", {"type": "A", "message": "a"}))
    await store.attempts.report("s", AttemptReport(key, "cancelled", {"type": "B", "message": "b"}))

    assert await ends(store) == [(1, "failed", "a")]


async def test_a_takeover_after_the_lease_ends_the_older_attempt(store: Store) -> None:
    await store.commit(raising(5, lease_until=LONG_AGO))

    await store.commit(raising(6, number=2))

    assert await ends(store) == [
        (1, "superseded", "lease expired; taken over by host:6:b"),
        (2, "running", None),
    ]


async def test_a_takeover_within_the_lease_does_not_say_that_it_has_expired(store: Store) -> None:
    await store.commit(raising(5))

    await store.commit(raising(6, number=2))

    assert (await ends(store))[0] == (1, "superseded", "taken over by host:6:b")


async def test_a_retry_after_a_failure_leaves_the_failure_as_it_is(store: Store) -> None:
    await store.commit(raising(5))
    report = AttemptReport(AttemptKey(0, 0, given.MODEL, 5), "failed", {"type": "A", "message": "a"})
    await store.attempts.report("s", report)

    await store.commit(raising(6, number=2))

    assert await ends(store) == [(1, "failed", "a"), (2, "running", None)]


async def test_work_that_is_scheduled_again_goes_on_counting(store: Store) -> None:
    """Temporal's numbers begin with 1 again, and an attempt that never began leaves a gap."""
    for generation, number in ((5, 1), (6, 3), (7, 1)):
        await store.commit(raising(generation, number=number))

    assert [each.number for each in await attempts(store)] == [1, 3, 4]


async def test_what_a_commit_adds_to_the_usage_is_that_of_its_attempt(store: Store) -> None:
    await store.commit(raising(5))
    used = SessionChange(usage=USED, cost=3)

    await store.commit(Commit("s", fence=given.fence(Hold.KEEP, 5), change=used))
    await store.commit(Commit("s", fence=given.fence(Hold.RELEASE, 5), change=used))

    [attempt] = await attempts(store)
    assert (attempt.usage, attempt.cost) == (USED + USED, 6)
    assert (await given.read_session(store)).usage == attempt.usage


async def test_a_superseded_attempt_gets_its_usage_when_it_wakes(store: Store) -> None:
    await store.commit(raising(5))
    await store.commit(raising(6, number=2))
    with pytest.raises(Superseded):
        await store.commit(Commit("s", fence=given.fence(Hold.RELEASE, 5), change=SessionChange(usage=USED)))

    report = AttemptReport(AttemptKey(0, 0, given.MODEL, 5))
    await store.commit(Commit("s", report=report, change=SessionChange(usage=USED), late=True))

    assert [(each.status, each.usage) for each in await attempts(store)] == [
        ("superseded", USED),
        ("running", Usage()),
    ]


async def test_an_attempt_that_finds_its_work_done_ends(store: Store) -> None:
    await store.commit(raising(5))
    await store.commit(Commit("s", records=[given.record(by="another")]))

    lost = replace(releasing(5), unless=(0, 0, "reply"), change=SessionChange(usage=USED))
    assert (await store.commit(lost)).existing is not None

    assert await ends(store) == [(1, "superseded", "another attempt was faster")]
    assert (await attempts(store))[0].usage == Usage()


async def test_an_attempt_that_repeats_its_last_commit_has_succeeded_once(store: Store) -> None:
    await store.commit(raising(5))
    used = SessionChange(usage=USED)
    last = replace(releasing(5), unless=(0, 0, "reply"), records=[given.record(by="me")], change=used)

    await store.commit(last)
    await store.commit(last)

    [attempt] = await attempts(store)
    assert (attempt.status, attempt.usage) == ("succeeded", USED)


async def test_the_end_of_a_turn_ends_its_attempts(store: Store) -> None:
    await store.commit(raising(5))
    await store.commit(raising(6, turn=1, lease_until=LONG_AGO))

    await store.commit(Commit("s", close_turn=1))

    assert [each.status for each in await attempts(store)] == ["cancelled", "timed_out"]
    assert [each.ended_at is not None for each in await attempts(store)] == [True, True]


async def test_a_cancelled_turn_cancels_its_attempts(store: Store) -> None:
    await store.commit(raising(5, lease_until=LONG_AGO))
    cancelled = NewEvent(type=EventType.TURN_CANCELLED, key="t0/cancelled", turn=0)

    await store.commit(Commit("s", close_turn=0, events=[cancelled]))

    assert await ends(store) == [(1, "cancelled", "its turn was cancelled")]


async def test_the_end_of_a_turn_leaves_the_attempts_of_the_next_one(store: Store) -> None:
    await store.commit(raising(5, turn=1))

    await store.commit(Commit("s", close_turn=0))

    assert (await ends(store))[0][1] == "running"


async def test_the_end_of_a_session_ends_its_attempts(store: Store) -> None:
    await store.commit(raising(5))
    fence = given.fence(Hold.KEEP, 5)

    await store.commit(Commit("s", fence=fence, report=fence.report("succeeded"), close=True))

    assert await ends(store) == [(1, "succeeded", None)]


async def test_a_turn_that_ends_before_its_work_has_no_attempt(store: Store) -> None:
    await store.commit(replace(raising(5), close_turn=0))

    assert await attempts(store) == []


async def test_a_closed_scope_is_no_attempt_and_ends_those_before_it(store: Store) -> None:
    await store.commit(raising(5))

    await store.commit(Commit("s", fence=Fence(0, 0, given.MODEL, Attempt(0, 6), Hold.RAISE)))

    assert await ends(store) == [(1, "superseded", "taken over by a rebuild of its session")]


@pytest.mark.parametrize(
    "as_older_code_does",
    ["DELETE FROM fences", "UPDATE fences SET generation = 6, attempt = 2"],
    ids=["it ends the turn", "it takes over"],
)
async def test_an_attempt_that_older_code_has_ended_is_not_shown_as_running(
    store: Store, database: Database, as_older_code_does: LiteralString
) -> None:
    await store.commit(raising(5))

    database.run(as_older_code_does)

    [attempt] = await attempts(store)
    assert attempt.status == "superseded"
    assert (await store.attempts.leases(10)).attempts == []


async def test_running_attempts_are_leases(store: Store) -> None:
    await store.create_session(given.session("t"))
    await store.commit(raising(5))
    await store.commit(replace(raising(6), session_id="t"))
    await store.commit(raising(7, turn=1))
    await store.commit(releasing(7, turn=1))

    first = await store.attempts.leases(1)
    second = await store.attempts.leases(1, first.next_cursor)

    assert {each.session_id for each in (*first.attempts, *second.attempts)} == {"s", "t"}
    assert second.next_cursor is None


async def test_a_lease_is_renewed_while_its_attempt_runs(store: Store) -> None:
    await store.commit(raising(5, lease_until=LONG_AGO))
    key = AttemptKey(0, 0, given.MODEL, 5)

    await store.attempts.renew("s", key, 60)

    [attempt] = await attempts(store)
    assert attempt.lease_expires_at > attempt.started_at
    await store.commit(releasing(5))
    await store.attempts.renew("s", key, 3600)
    assert (await attempts(store))[0].lease_expires_at == attempt.lease_expires_at


async def test_attempts_are_listed_in_pages_and_by_turn(store: Store) -> None:
    for generation in range(5):
        await store.commit(raising(generation + 1, turn=generation, number=1))

    found: list[int] = []
    cursor = None
    while True:
        page = await store.attempts.list(AttemptQuery("s", limit=2, cursor=cursor))
        found += [each.key.turn for each in page.attempts]
        cursor = page.next_cursor
        if cursor is None:
            break

    assert found == [0, 1, 2, 3, 4]
    of_turn = await store.attempts.list(AttemptQuery("s", turn=3))
    assert [each.key.turn for each in of_turn.attempts] == [3]


@pytest.mark.parametrize("cursor", ["x", "W10", "WzEsMiwiYSIsIngiXQ"])
async def test_a_cursor_that_was_never_given_out_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(Invalid):
        await store.attempts.list(AttemptQuery("s", cursor=cursor))


async def test_old_reports_are_forgotten_unless_their_attempt_runs(store: Store, database: Database) -> None:
    for turn in range(3):
        await store.commit(raising(turn + 1, turn=turn))
    await store.commit(releasing(1))
    assert await store.attempts.forget(A_DAY, 10) == 0
    database.run("UPDATE attempts SET started_at = '2001-01-01T00:00:00.000Z'")
    database.run("DELETE FROM fences WHERE turn = 1")

    assert await store.attempts.forget(A_DAY, 10) == 2

    assert [each.key.turn for each in await attempts(store)] == [2]
