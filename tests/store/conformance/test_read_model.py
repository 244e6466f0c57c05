import pytest

from perdure.errors import TokenConflict
from perdure.protocol.events import Usage
from perdure.store.base import Store
from perdure.store.values import Commit, SessionChange
from tests.support import given


async def test_a_change_is_added_up_and_returned(store: Store) -> None:
    change = SessionChange(status="running", turns=1, steps=1, tool_calls=2, usage=Usage(input_tokens=5))
    await store.commit(Commit("s", change=change))

    committed = await store.commit(
        Commit("s", events=[given.event("a")], change=SessionChange(steps=1, usage=Usage(input_tokens=2**40)))
    )

    row = committed.session
    assert (row.status, row.turns, row.steps, row.tool_calls, row.events) == ("running", 1, 2, 2, 1)
    assert row.usage.input_tokens == 5 + 2**40
    assert row == await store.session("s")


async def test_turns_never_go_back(store: Store) -> None:
    await store.commit(Commit("s", change=SessionChange(turns=3)))

    committed = await store.commit(Commit("s", change=SessionChange(turns=2)))

    assert committed.session.turns == 3


async def test_an_error_stays(store: Store) -> None:
    await store.commit(Commit("s", change=SessionChange(status="failed", error={"code": "X"})))

    committed = await store.commit(Commit("s", change=SessionChange(steps=1)))

    assert (committed.session.status, committed.session.error) == ("failed", {"code": "X"})


async def test_a_winner_changes_nothing(store: Store) -> None:
    await store.commit(Commit("s", records=[given.record()]))

    committed = await store.commit(Commit("s", unless=(0, 0, "reply"), change=SessionChange(status="failed", steps=7)))

    assert (committed.session.status, committed.session.steps) == ("starting", 0)


async def test_a_new_route_replaces_the_old_one(store: Store) -> None:
    await store.commit(Commit("s", route="new"))

    assert await store.route("new") == "s"
    assert await store.route("token of s") is None


async def test_a_session_may_keep_its_route(store: Store) -> None:
    await store.commit(Commit("s", route="token of s"))

    assert await store.route("token of s") == "s"


async def test_a_route_of_a_live_session_is_not_taken_and_nothing_is_written(store: Store) -> None:
    await store.create_session(given.session("t"))

    with pytest.raises(TokenConflict):
        await store.commit(
            Commit("s", records=[given.record()], events=[given.event("a")], route="token of t", close_turn=0)
        )

    assert await store.route("token of t") == "t"
    assert await store.route("token of s") == "s"
    assert await given.keys(store) == []
    assert await store.records("s") == []


async def test_a_closed_session_gives_its_token_back(store: Store) -> None:
    await store.commit(Commit("s", close=True, change=SessionChange(status="completed")))

    assert await store.route("token of s") is None
    await store.create_session(given.session("t", token="token of s"))
    assert await store.route("token of s") == "t"


async def test_a_late_commit_gives_a_closed_session_no_route(store: Store) -> None:
    await store.commit(Commit("s", close=True))

    await store.commit(Commit("s", route="late"))

    assert await store.route("late") is None
