import asyncio

import pytest

from perdure.errors import Invalid, Superseded
from perdure.protocol.events import NewEvent
from perdure.protocol.inputs import InputRequest, InputStatus
from perdure.store.base import Store
from perdure.store.inputs import InputPage, InputQuery
from perdure.store.values import Commit, Consumption, DeliveryTaken, InputChanges, SessionChange
from tests.support import given
from tests.support.given import answer, answering, chooses, opening
from tests.support.waiting import until


def expiring(*request_ids: str) -> Commit:
    return Commit(
        "s",
        events=[given.event("before")],
        inputs=InputChanges(
            expires={each: chooses("deny", "nobody") for each in request_ids}, resolved=closed_events(*request_ids)
        ),
    )


def withdrawing(*request_ids: str) -> Commit:
    return Commit("s", inputs=InputChanges(withdraws=request_ids, resolved=closed_events(*request_ids)))


def closed_events(*request_ids: str) -> dict[str, NewEvent]:
    return {each: given.event(f"closed/{each}") for each in request_ids}


def ids(page: InputPage) -> list[str]:
    return [row.request.request_id for row in page.rows]


async def pages(store: Store, query: InputQuery) -> list[list[str]]:
    """All pages from this one on."""
    page = await store.inputs(query)
    found = [ids(page)]
    while page.next_cursor is not None:
        page = await store.inputs(InputQuery(status=query.status, limit=query.limit, cursor=page.next_cursor))
        found.append(ids(page))
    return found


async def test_an_open_request_is_read_back_as_it_was_asked(store: Store) -> None:
    asked = given.request(summary="NUL \0, half a pair \ud800, ünïcödé", quorum=2)

    await store.commit(Commit("s", inputs=InputChanges(opens=[asked])))

    row = await given.input_row(store)
    assert (row.request, row.status, row.requester) == (asked, "open", given.ADA)
    assert (row.votes, row.answer, row.closed_at, row.delivery_id) == ((), None, None, None)
    assert row.opened_at.endswith("Z")


async def test_an_unknown_request_is_none(store: Store) -> None:
    assert await store.input("unknown") is None


async def test_asking_twice_is_asking_once(store: Store) -> None:
    await store.commit(Commit("s", inputs=InputChanges(opens=[given.request(summary="first")])))
    first = await given.input_row(store)

    await store.commit(Commit("s", inputs=InputChanges(opens=[given.request(summary="second")])))

    assert await given.input_row(store) == first


async def test_a_request_that_was_answered_is_not_opened_again(store: Store) -> None:
    await store.commit(opening("r"))
    await answer(store, answering(("r", chooses("approve"))))

    await store.commit(opening("r"))

    assert (await given.input_row(store)).status == "answered"


async def test_a_commit_that_fails_opens_nothing(store: Store) -> None:
    with pytest.raises(DeliveryTaken):
        await store.commit(
            Commit(
                "s",
                records=[given.record()],
                events=[given.event("a")],
                consume=Consumption(0, ["unknown"]),
                inputs=InputChanges(opens=[given.request()]),
            )
        )

    assert await store.input("r") is None
    assert await given.keys(store) == []
    assert await store.records("s") == []


async def test_a_commit_that_came_second_opens_nothing(store: Store) -> None:
    await store.commit(Commit("s", records=[given.record()]))

    await store.commit(Commit("s", unless=(0, 0, "reply"), inputs=InputChanges(opens=[given.request()])))

    assert await store.input("r") is None


async def test_a_request_belongs_to_the_session_that_asks(store: Store) -> None:
    with pytest.raises(ValueError, match="its own session"):
        await store.commit(Commit("s", inputs=InputChanges(opens=[given.request(session_id="t")])))

    assert await store.input("r") is None


async def test_an_expired_request_has_the_answer_that_silence_means(store: Store) -> None:
    await store.commit(opening("r"))

    await store.commit(expiring("r"))

    row = await given.input_row(store)
    assert (row.status, row.answer, row.votes) == ("expired", chooses("deny", "nobody"), ())
    assert row.closed_at is not None
    assert await given.keys(store) == ["before", "closed/r"]


async def test_a_withdrawn_request_has_no_answer(store: Store) -> None:
    await store.commit(opening("r"))

    await store.commit(withdrawing("r"))

    row = await given.input_row(store)
    assert (row.status, row.answer) == ("withdrawn", None)
    assert await given.keys(store) == ["closed/r"]


@pytest.mark.parametrize("late", [expiring("r", "q"), withdrawing("r", "q")])
async def test_only_open_requests_are_closed_and_emitted(store: Store, late: Commit) -> None:
    await store.commit(opening("r", "q"))
    await answer(store, answering(("r", chooses("approve"))))
    answered = await given.input_row(store)

    await store.commit(late)

    assert await given.input_row(store) == answered
    assert (await given.input_row(store, "q")).status in ("expired", "withdrawn")
    assert [key for key in await given.keys(store) if key != "before"] == ["resolved/r", "closed/q"]


async def test_a_repeated_expiry_changes_nothing(store: Store) -> None:
    await store.commit(opening("r"))
    await store.commit(expiring("r"))
    expired = await given.input_row(store)

    await store.commit(expiring("r"))

    assert await given.input_row(store) == expired
    assert await given.keys(store) == ["before", "closed/r"]


async def test_a_commit_cannot_close_the_request_of_another_session(store: Store) -> None:
    await store.create_session(given.session("t"))
    await store.commit(opening("r", session_id="t"))

    await store.commit(expiring("r"))
    await store.commit(withdrawing("r"))

    assert (await given.input_row(store)).status == "open"
    assert await given.keys(store) == ["before"]


async def test_the_row_of_the_session_counts_the_events_of_its_requests(store: Store) -> None:
    await store.commit(opening("r", "q"))

    committed = await store.commit(expiring("r", "q"))

    assert committed.session.events == 3
    assert [event.index for event in await given.everything(store)] == [0, 1, 2]
    assert await store.session("s") == committed.session


async def test_a_closed_session_has_no_open_requests(store: Store) -> None:
    await store.commit(opening("r", "q"))
    await answer(store, answering(("q", chooses("approve"))))

    await store.commit(
        Commit("s", close=True, inputs=InputChanges(opens=[given.request("p")], resolved=closed_events("p", "q", "r")))
    )

    statuses = [(await given.input_row(store, name)).status for name in ("p", "q", "r")]
    assert statuses == ["withdrawn", "answered", "withdrawn"]
    # The answer to `q` was not read, and is refused.
    assert await given.keys(store) == ["resolved/q", "closed/p", "closed/r", "session/refused/a"]


async def test_a_late_commit_does_not_make_a_closed_session_ask(store: Store) -> None:
    await store.commit(Commit("s", close=True, change=SessionChange(status="completed")))

    with pytest.raises(Superseded):
        await store.commit(opening("r"))

    assert await store.input("r") is None


async def test_the_requests_of_other_sessions_outlive_a_session(store: Store) -> None:
    await store.create_session(given.session("t"))
    await store.commit(opening("r", session_id="t"))

    await store.commit(Commit("s", close=True))

    assert (await given.input_row(store)).status == "open"


async def test_open_requests_come_oldest_first(store: Store) -> None:
    for name in ("b", "c", "a"):
        before = [row.opened_at for row in (await store.inputs(InputQuery())).rows]
        await until(lambda before=before: _clock_moved(store, before))
        await store.commit(opening(name))

    assert ids(await store.inputs(InputQuery())) == ["b", "c", "a"]


async def _clock_moved(store: Store, before: list[str]) -> bool:
    """Whether the next timestamp differs from those."""
    committed = await store.commit(Commit("s"))
    return committed.session.updated_at not in before


async def test_each_filter_narrows(store: Store) -> None:
    await store.create_session(given.session("t", agent="clerk"))
    asked: list[InputRequest] = [
        given.request("a"),
        given.request("b", kind="question"),
        given.request("c"),
        given.request("d", session_id="t", agent="clerk"),
        given.request("e", session_id="t", agent="clerk", kind="question"),
    ]
    for request in asked:
        await store.commit(Commit(request.session_id, inputs=InputChanges(opens=[request])))
    await store.commit(withdrawing("c"))

    async def found(query: InputQuery) -> str:
        return "".join(sorted(ids(await store.inputs(query))))

    assert await found(InputQuery()) == "abde"
    assert await found(InputQuery(status=None)) == "abcde"
    assert await found(InputQuery(status="withdrawn")) == "c"
    assert await found(InputQuery(session_id="s")) == "ab"
    assert await found(InputQuery(session_id="s", status=None)) == "abc"
    assert await found(InputQuery(session_id="t", kind="question")) == "e"
    assert await found(InputQuery(agent="clerk")) == "de"
    assert await found(InputQuery(agent="clerk", kind="approval", status=None)) == "d"
    assert await found(InputQuery(kind="question")) == "be"
    assert await found(InputQuery(session_id="s", agent="clerk")) == ""


@pytest.mark.parametrize("status", ["open", None])
@pytest.mark.parametrize("limit", [1, 3, 7, 8])
async def test_pages_hold_each_request_once(store: Store, limit: int, status: InputStatus | None) -> None:
    names = [f"r{n}" for n in range(7)]
    # Three at once: the same timestamp does not confuse the pages.
    for batch in (names[:3], names[3:6], names[6:]):
        await store.commit(opening(*batch))

    found = await pages(store, InputQuery(status=status, limit=limit))

    assert [name for page in found for name in page] == names
    assert [len(page) for page in found[:-1]] == [limit] * (len(found) - 1)


async def test_pages_stay_where_they_are_while_requests_open_and_close(store: Store) -> None:
    names = [f"r{n}" for n in range(6)]
    await store.commit(opening(*names))
    first = await store.inputs(InputQuery(limit=2))

    await asyncio.gather(
        store.commit(withdrawing("r0", "r1", "r3")),
        answer(store, answering(("r4", chooses("approve")))),
        store.commit(opening("r9")),
    )
    rest = await pages(store, InputQuery(limit=2, cursor=first.next_cursor))

    assert ids(first) == ["r0", "r1"]
    assert rest == [["r2", "r5"], ["r9"]]


async def test_a_made_up_cursor_is_invalid(store: Store) -> None:
    with pytest.raises(Invalid):
        await store.inputs(InputQuery(cursor="nonsense"))
