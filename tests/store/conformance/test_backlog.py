"""How much runs and waits in all sessions, counted up to a bound."""

from perdure.store.base import Store
from tests.support import given


async def test_a_session_that_has_ended_is_no_backlog(store: Store) -> None:
    await store.commit(given.closing())

    backlog = await store.attempts.backlog(10)

    assert backlog.sessions == {"starting": 0, "running": 0, "waiting": 0}
    assert (backlog.in_need, backlog.open_inputs, backlog.deliveries) == (0, 0, 0)


async def test_a_backlog_has_what_runs_and_what_waits(store: Store) -> None:
    for session_id in ("new", "busy", "asks", "stuck", "over"):
        await store.create_session(given.session(session_id))
    await store.commit(given.running(session_id="busy"))
    await store.commit(given.running(session_id="asks"))
    await store.commit(given.parking("r1", "r2", session_id="asks"))
    await given.attend(store, session_id="stuck")
    await store.commit(given.closing("over"))
    await store.commit(given.closing())
    await store.accept(given.delivery("d1", session_id="busy"))

    backlog = await store.attempts.backlog(10)

    assert backlog.sessions == {"starting": 2, "running": 1, "waiting": 1}
    assert (backlog.in_need, backlog.open_inputs, backlog.deliveries) == (1, 2, 1)


async def test_nothing_is_counted_beyond_the_bound(store: Store) -> None:
    for number in range(4):
        await store.create_session(given.session(f"s{number}"))
        await store.accept(given.delivery(f"d{number}", session_id=f"s{number}"))

    backlog = await store.attempts.backlog(3)

    assert (backlog.sessions["starting"], backlog.deliveries) == (3, 3)
