"""The records of runs."""

from dataclasses import replace

import pytest

from perdure.errors import IdempotencyConflict
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.store.base import Store
from perdure.store.lifecycle import Keep
from perdure.store.runs import NewRun, RunChange, RunQuery
from perdure.store.values import Attempt, Commit, Fence, Hold, NewSession, SessionChange, SessionQuery
from tests.store.conformance.conftest import Database
from tests.support import given

R = "run_1"


def a_run(run_id: str = R, name: str = "nightly", **more: object) -> NewSession:
    new = given.session(run_id)
    return replace(new, agent=name, mode="task", token_hash=f"run/{run_id}", run=NewRun(name, {"day": 1}), **more)  # type: ignore[arg-type]


def ended(run_id: str = R, status: str = "completed", **change: object) -> Commit:
    event = NewEvent(type=EventType.RUN_COMPLETED, key=names.session_key("run/ended"))
    return Commit(
        run_id,
        events=(event,),
        close=True,
        change=SessionChange(status=status, **change),  # type: ignore[arg-type]
        run=RunChange(result={"made": 3}),
    )


async def test_a_run_has_a_record_and_the_row_of_a_session(store: Store) -> None:
    await store.create_session(a_run())

    record, row = await store.run(R), await store.session(R)
    assert record is not None
    assert row is not None
    assert (record.name, record.status, record.input, record.result) == ("nightly", "active", {"day": 1}, None)
    assert (row.run, row.status, record.started_at) == ("nightly", "starting", row.created_at)


async def test_sessions_have_no_record_and_runs_are_not_listed_as_sessions(store: Store) -> None:
    await store.create_session(a_run())

    assert await store.run("s") is None
    for query in (SessionQuery(), SessionQuery(owner=given.ADA.owner), SessionQuery(status="starting")):
        assert [row.session_id for row in (await store.sessions(query)).sessions] == ["s"]


async def test_the_end_of_the_session_ends_the_record_once(store: Store) -> None:
    await store.create_session(a_run())
    await store.commit(ended())
    await store.commit(ended(status="failed", error={"code": "X", "message": "late"}))

    record = await store.run(R)
    assert record is not None
    assert (record.status, record.result, record.error) == ("completed", {"made": 3}, None)
    assert record.ended_at is not None
    assert record.duration_ms is not None


async def test_whoever_ends_the_session_the_record_says_why(store: Store) -> None:
    await store.create_session(a_run())
    await store.commit(ended(status="failed", error={"code": "SESSION_DELETED", "message": "It was deleted."}))

    record = await store.run(R)
    assert record is not None
    assert (record.status, record.error) == ("errored", {"name": "SESSION_DELETED", "message": "It was deleted."})


async def test_a_commit_says_what_a_run_waits_for(store: Store) -> None:
    await store.create_session(a_run())
    await store.commit(Commit(R, run=RunChange(enters=True)))
    await store.commit(Commit(R, run=RunChange(waiting_for="a sleep")))

    record = await store.run(R)
    assert record is not None
    assert (record.attempts, record.waiting_for) == (1, "a sleep")


async def test_to_enter_the_body_does_not_clear_the_attention(store: Store) -> None:
    await store.create_session(a_run())
    await given.attend(store, session_id=R)
    await store.commit(Commit(R, fence=Fence(0, 0, names.BODY_SCOPE, Attempt(1, 1), Hold.RAISE)))

    row = await store.session(R)
    assert row is not None
    assert row.attention is not None


async def test_runs_are_listed_newest_first_in_pages(store: Store) -> None:
    for n in range(7):
        await store.create_session(a_run(f"run_{n}", "nightly" if n % 2 else "weekly"))
    await store.commit(ended("run_3"))

    seen: list[tuple[str, str]] = []
    query = RunQuery(limit=3)
    while True:
        page = await store.runs(query)
        seen += [(each.started_at, each.run_id) for each in page.runs]
        if page.next is None:
            break
        query = replace(query, after=page.next)
    assert seen == sorted(seen, reverse=True)
    assert len({run_id for _, run_id in seen}) == 7
    assert all(each.input is None for each in page.runs)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (RunQuery(name="nightly"), {"run_1", "run_3"}),
        (RunQuery(status="completed"), {"run_3"}),
        (RunQuery(name="nightly", status="active"), {"run_1"}),
        (RunQuery(owner=given.ADA.owner, status="active"), {"run_0", "run_1", "run_2"}),
        (RunQuery(owner=given.BOB.owner), set[str]()),
    ],
)
async def test_runs_are_filtered(store: Store, query: RunQuery, found: set[str]) -> None:
    for n in range(4):
        await store.create_session(a_run(f"run_{n}", "nightly" if n % 2 else "weekly"))
    await store.commit(ended("run_3"))

    assert {each.run_id for each in (await store.runs(query)).runs} == found


async def test_a_known_key_starts_no_second_run(store: Store) -> None:
    first = replace(given.delivery("d1", session_id=R), idempotency_key="k", digest="same")
    await store.create_session(a_run(), first)
    again = await store.create_session(a_run("run_2"), replace(first, session_id="run_2", delivery_id="d2"))

    assert again is not None
    assert (again.fresh, again.delivery.session_id) == (False, R)
    assert await store.run("run_2") is None
    with pytest.raises(IdempotencyConflict):
        await store.create_session(a_run("run_3"), replace(first, session_id="run_3", digest="other"))


async def test_a_deleted_run_leaves_no_record(store: Store) -> None:
    await store.create_session(a_run())
    await store.commit(ended())
    await store.begin_deletion(R)
    while not await store.purge(R, 100):
        pass

    assert await store.run(R) is None


async def test_the_input_and_the_result_expire_with_the_records(store: Store, open_another: object) -> None:
    await store.create_session(a_run())
    await store.commit(ended())
    await store.expire(Keep(None, None, 0.0), None, 100)

    record = await store.run(R)
    assert record is not None
    assert (record.status, record.input, record.result) == ("completed", None, None)


async def with_content(store: Store) -> None:
    """A run that has logged, and was answered."""
    await store.create_session(a_run())
    said = (
        NewEvent(type=EventType.RUN_STARTED, key=names.session_key("run/started")),
        NewEvent(type=EventType.RUN_LOG, key=names.session_key("run/log/0"), data={"message": "of Ada"}),
        NewEvent(type=EventType.INPUT_REQUESTED, key=names.session_key("run/input/0"), data={"prompt": "Whose?"}),
        NewEvent(
            type=EventType.INPUT_RESOLVED, key=names.session_key("input/i/resolved"), turn=0, data={"is": "Ada's"}
        ),
    )
    await store.commit(Commit(R, events=said, change=SessionChange(status="running", turns=1)))


async def types(store: Store) -> list[str]:
    return [event.type for event in await store.events(R, 0, 100)]


async def test_what_a_run_has_said_and_asked_expires_with_the_messages(store: Store) -> None:
    await with_content(store)
    await store.commit(ended())

    await store.expire(Keep(messages=-60.0), None, 100)

    assert await types(store) == ["run.started", *["event.expired"] * 3, "run.completed"]


async def test_what_a_run_has_said_and_asked_stays_for_as_long_as_messages_are_kept(
    store: Store, database: Database
) -> None:
    await with_content(store)
    await store.commit(ended())
    # It has taken long, and has just ended.
    database.run("UPDATE sessions SET created_at = '2020-01-01T00:00:00.000Z'")

    await store.expire(Keep(messages=86_400.0), None, 100)

    assert "event.expired" not in await types(store)


async def test_what_a_run_has_said_and_asked_stays_until_its_end(store: Store) -> None:
    await with_content(store)

    await store.expire(Keep(messages=-60.0), None, 100)

    assert "event.expired" not in await types(store)
