import asyncio
from dataclasses import replace

import pytest

from perdure.errors import Conflict, IdempotencyConflict, Invalid, TokenConflict
from perdure.protocol.deliveries import Bounds, Capabilities
from perdure.protocol.events import Usage
from perdure.store.base import Store
from perdure.store.lifecycle import NewFork
from perdure.store.values import Commit, SessionChange, SessionQuery
from tests.support import given


async def test_a_new_session_is_read_back_as_it_was_written(empty: Store) -> None:
    new = replace(
        given.session(),
        mode="task",
        capabilities=Capabilities(request_input=True),
        parent={"sessionId": "p", "rootSessionId": "r", "callId": "c"},
        title="Überblick 🧭",
    )

    await empty.create_session(given.session("p"))

    await empty.create_session(new)

    row = await empty.session("s")
    assert row is not None
    assert (row.agent, row.mode, row.status, row.principal) == ("echo", "task", "starting", given.ADA)
    assert (row.capabilities, row.parent, row.title) == (new.capabilities, new.parent, new.title)
    assert (row.turns, row.steps, row.events, row.usage, row.error) == (0, 0, 0, Usage(), None)
    assert row.created_at == row.updated_at
    assert row.created_at.endswith("Z")


async def test_an_unknown_session_is_none(empty: Store) -> None:
    assert await empty.session("s") is None


async def test_a_title_loses_only_what_no_database_can_hold(empty: Store) -> None:
    await empty.create_session(replace(given.session(), title="a\0b\ud800c"))

    row = await empty.session("s")
    assert row is not None
    assert row.title == "a\N{REPLACEMENT CHARACTER}b?c"


async def test_a_session_is_found_by_its_token(store: Store) -> None:
    assert await store.route("token of s") == "s"
    assert await store.route("another token") is None


async def test_a_token_of_a_live_session_cannot_be_taken_and_nothing_is_left(store: Store) -> None:
    with pytest.raises(TokenConflict):
        await store.create_session(given.session("t", token="token of s"), given.delivery(session_id="t", key="k"))

    assert await store.session("t") is None
    assert await store.deliveries("t", ["d"]) == []


async def test_a_session_id_is_used_once(store: Store) -> None:
    with pytest.raises(Conflict):
        await store.create_session(given.session("s", token="another"))

    assert await store.route("another") is None


async def test_the_first_delivery_is_written_with_its_session(empty: Store) -> None:
    accepted = await empty.create_session(given.session(), given.delivery(body={"message": "hi"}))

    assert accepted is not None
    assert accepted.fresh
    assert [accepted.delivery] == await empty.deliveries("s", ["d"])
    assert accepted.delivery.body == {"message": "hi"}


async def test_a_repeated_creation_gets_the_first_delivery_and_writes_nothing(empty: Store) -> None:
    first = await empty.create_session(given.session(), given.delivery(key="k"))

    again = await empty.create_session(given.session("t"), given.delivery("e", session_id="t", key="k"))

    assert first is not None
    assert again is not None
    assert (again.fresh, again.delivery) == (False, first.delivery)
    assert await empty.session("t") is None


async def test_a_repeated_creation_under_the_same_token_is_no_conflict(empty: Store) -> None:
    await empty.create_session(given.session(), given.delivery(key="k"))

    again = await empty.create_session(
        given.session("t", token="token of s"), given.delivery("e", session_id="t", key="k")
    )

    assert again is not None
    assert again.delivery.session_id == "s"


async def test_one_key_cannot_identify_two_requests(empty: Store) -> None:
    await empty.create_session(given.session(), given.delivery(key="k", digest="one"))

    with pytest.raises(IdempotencyConflict):
        await empty.create_session(given.session("t"), given.delivery("e", session_id="t", key="k", digest="two"))

    assert await empty.session("t") is None


async def test_keys_of_two_owners_never_meet(empty: Store) -> None:
    await empty.create_session(given.session(), given.delivery(key="k", owner=given.ADA.owner))

    other = await empty.create_session(
        given.session("t", who=given.BOB), given.delivery(session_id="t", key="k", owner=given.BOB.owner)
    )

    assert other is not None
    assert other.fresh


async def test_of_twenty_creations_under_one_key_one_is_fresh(empty: Store) -> None:
    accepted = await asyncio.gather(
        *(
            empty.create_session(given.session(f"s{n}"), given.delivery(f"d{n}", session_id=f"s{n}", key="k"))
            for n in range(20)
        )
    )

    assert sum(each is not None and each.fresh for each in accepted) == 1
    assert len({each.delivery.session_id for each in accepted if each}) == 1
    assert len((await empty.sessions(SessionQuery())).sessions) == 1


async def test_the_token_of_a_session_is_found(store: Store) -> None:
    assert await store.token_of("s") == "token of s"
    await store.commit(Commit("s", route="another"))
    assert await store.token_of("s") == "another"
    await store.commit(given.closing())
    assert await store.token_of("s") is None
    assert await store.token_of("unknown") is None


async def test_open_sessions_come_in_pages_and_in_order(empty: Store) -> None:
    for name in ("d", "a", "c", "b", "over"):
        await empty.create_session(given.session(name))
    await empty.commit(given.closing("over"))
    await empty.commit(given.running(session_id="b"))

    first = await empty.open_sessions("", 3)
    second = await empty.open_sessions(first[-1], 3)

    assert (first, second) == (["a", "b", "c"], ["d"])
    assert await empty.open_sessions("d", 3) == []


async def test_pages_show_every_session_once_while_others_are_added(empty: Store) -> None:
    for n in range(7):
        await empty.create_session(given.session(f"old-{n}"))

    seen: list[str] = []
    page = await empty.sessions(SessionQuery(limit=3))
    seen += [row.session_id for row in page.sessions]
    while page.next_cursor:
        await empty.create_session(given.session(f"zz-new-{len(seen)}"))
        page = await empty.sessions(SessionQuery(limit=3, cursor=page.next_cursor))
        seen += [row.session_id for row in page.sessions]

    old = [session_id for session_id in seen if session_id.startswith("old")]
    assert sorted(old) == [f"old-{n}" for n in range(7)]
    assert len(seen) == len(set(seen))


async def test_sessions_come_newest_first(empty: Store) -> None:
    for n in range(5):
        await empty.create_session(given.session(f"s{n}"))

    rows = (await empty.sessions(SessionQuery())).sessions

    ages = [(row.created_at, row.session_id) for row in rows]
    assert ages == sorted(ages, reverse=True)


@pytest.mark.parametrize("owner", [None, given.ADA.owner])
async def test_pages_of_one_status_show_its_sessions_once_and_newest_first(empty: Store, owner: str | None) -> None:
    for n in range(9):
        await empty.create_session(given.session(f"s{n}"))
    for n in (1, 3, 4, 6, 8):
        await empty.commit(Commit(f"s{n}", change=SessionChange(status="failed")))

    page = await empty.sessions(SessionQuery(owner=owner, status="failed", limit=2))
    seen = [row.session_id for row in page.sessions]
    while page.next_cursor:
        page = await empty.sessions(SessionQuery(owner=owner, status="failed", limit=2, cursor=page.next_cursor))
        seen += [row.session_id for row in page.sessions]

    assert sorted(seen) == ["s1", "s3", "s4", "s6", "s8"]
    rows = [row for each in seen if (row := await empty.session(each))]
    ages = [(row.created_at, row.session_id) for row in rows]
    assert ages == sorted(ages, reverse=True)


async def test_sessions_are_filtered_by_owner_agent_mode_and_status(empty: Store) -> None:
    await empty.create_session(given.session("a", agent="one"))
    await empty.create_session(given.session("b", agent="two", who=given.BOB))
    await empty.create_session(replace(given.session("c", agent="two"), mode="task"))
    await empty.commit(Commit("b", change=SessionChange(status="waiting")))

    async def found(query: SessionQuery) -> set[str]:
        return {row.session_id for row in (await empty.sessions(query)).sessions}

    assert await found(SessionQuery(owner=given.ADA.owner)) == {"a", "c"}
    assert await found(SessionQuery(owner=given.BOB.owner, status="starting")) == set()
    assert await found(SessionQuery(owner=given.BOB.owner, status="waiting")) == {"b"}
    assert await found(SessionQuery(agent="two", status="starting", mode="task")) == {"c"}
    assert await found(SessionQuery(agent="two")) == {"b", "c"}
    assert await found(SessionQuery(mode="task")) == {"c"}
    assert await found(SessionQuery(status="waiting")) == {"b"}


@pytest.mark.parametrize("cursor", ["", "!", "e30", "WzFd", "🧭", "WyJhIiwxXQ"])
async def test_a_made_up_cursor_is_refused(empty: Store, cursor: str) -> None:
    with pytest.raises(Invalid):
        await empty.sessions(SessionQuery(cursor=cursor))


async def test_the_bounds_of_a_session_are_kept_with_values_of_newer_builds(empty: Store) -> None:
    bounds = Bounds.model_validate({"deadline": 1.5, "idleSeconds": 60, "steps": 7})

    await empty.create_session(replace(given.session("bounded"), bounds=bounds))
    await empty.create_session(given.session("free"))
    await empty.fork(NewFork("fork", "token of the fork", "bounded", 0, bounds=Bounds(attempts=0)))

    row = await given.read_session(empty, "bounded")
    assert row.bounds == bounds
    assert row.bounds is not None
    assert row.bounds.model_extra == {"steps": 7}
    assert (await given.read_session(empty, "free")).bounds is None
    assert (await given.read_session(empty, "fork")).bounds == Bounds(attempts=0)
    listed = {each.session_id: each.bounds for each in (await empty.sessions(SessionQuery())).sessions}
    assert listed == {"bounded": bounds, "free": None, "fork": Bounds(attempts=0)}
