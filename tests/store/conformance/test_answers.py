import json
from typing import LiteralString, cast

import pytest

from perdure.errors import IdempotencyConflict, NotFound, SessionGone, Unavailable
from perdure.protocol.inputs import InputAnswer, InputStatus
from perdure.store.base import Store
from perdure.store.values import Commit, Consumption, InputChanges, SessionChange
from tests.store.conformance.conftest import Database
from tests.support import given
from tests.support.given import answer, answering, chooses, opening


async def delivered(store: Store, *delivery_ids: str) -> list[str]:
    return [row.delivery_id for row in await store.deliveries("s", delivery_ids)]


async def test_an_answer_closes_the_request_delivers_and_emits(store: Store) -> None:
    await store.commit(opening("r"))

    answered = await answer(store, answering(("r", chooses("approve"))))

    row = await given.input_row(store)
    assert (row.status, row.answer, list(row.votes), row.delivery_id) == (
        "answered",
        chooses("approve"),
        [chooses("approve")],
        "a",
    )
    assert row.closed_at is not None
    assert (answered.rows, answered.closed, answered.fresh) == ([row], {"r"}, True)
    assert answered.delivery is not None
    assert await store.deliveries("s", ["a"]) == [answered.delivery]
    (event,) = await given.everything(store)
    assert (event.key, event.data) == ("resolved/r", {"status": "answered", "said": "approve"})
    assert (await given.read_session(store)).events == 1


async def test_one_denial_of_many_is_enough(store: Store) -> None:
    await store.commit(opening("r", quorum=3))

    answered = await answer(store, answering(("r", chooses("deny"))))

    assert (answered.rows[0].status, answered.rows[0].answer) == ("answered", chooses("deny"))


async def test_some_votes_of_a_quorum_close_nothing_and_deliver_nothing(store: Store) -> None:
    await store.commit(opening("r", quorum=3))

    await answer(store, answering(("r", chooses("approve", "ada")), delivery_id="a0"))
    answered = await answer(store, answering(("r", chooses("approve", "bob")), delivery_id="a1"))

    assert (answered.closed, answered.delivery, answered.fresh) == (frozenset(), None, True)
    row = await given.input_row(store)
    assert (row.status, row.answer, row.closed_at, row.delivery_id) == ("open", None, None, None)
    assert list(row.votes) == [chooses("approve", "ada"), chooses("approve", "bob")]
    assert await delivered(store, "a0", "a1") == []
    assert await given.keys(store) == []


async def test_the_vote_that_completes_a_quorum_closes(store: Store) -> None:
    await store.commit(opening("r", quorum=2))
    await answer(store, answering(("r", chooses("approve", "ada")), delivery_id="a"))

    answered = await answer(store, answering(("r", chooses("approve", "bob")), delivery_id="b"))

    assert answered.closed == {"r"}
    assert answered.rows[0].delivery_id == "b"
    assert await delivered(store, "a", "b") == ["b"]


async def test_only_the_first_vote_of_a_principal_counts(store: Store) -> None:
    await store.commit(opening("r", quorum=2))
    await answer(store, answering(("r", chooses("approve", "ada")), delivery_id="a"))

    answered = await answer(store, answering(("r", chooses("deny", "ada")), delivery_id="b"))

    assert answered.closed == frozenset()
    assert list((await given.input_row(store)).votes) == [chooses("approve", "ada")]


async def test_one_caller_may_answer_some_of_the_requests(store: Store) -> None:
    await store.commit(
        Commit("s", inputs=InputChanges(opens=[given.request("p"), given.request("q", quorum=2), given.request("r")]))
    )

    answered = await answer(
        store, answering(("r", chooses("approve")), ("q", chooses("approve")), ("p", chooses("deny")))
    )

    assert [(row.request.request_id, row.status) for row in answered.rows] == [
        ("r", "answered"),
        ("q", "open"),
        ("p", "answered"),
    ]
    assert answered.closed == {"p", "r"}
    assert await given.keys(store) == ["resolved/r", "resolved/p"]
    assert await delivered(store, "a") == ["a"]


async def test_of_two_votes_on_one_request_by_one_caller_the_first_counts(store: Store) -> None:
    await store.commit(opening("r"))

    answered = await answer(store, answering(("r", chooses("approve")), ("r", chooses("deny"))))

    assert [row.answer for row in answered.rows] == [chooses("approve"), chooses("approve")]
    assert await given.keys(store) == ["resolved/r"]


@pytest.mark.parametrize("status", ["answered", "expired", "withdrawn"])
async def test_a_vote_on_a_closed_request_changes_nothing(store: Store, status: InputStatus) -> None:
    await store.commit(opening("r"))
    match status:
        case "answered":
            await answer(store, answering(("r", chooses("approve")), delivery_id="first"))
        case "expired":
            await store.commit(Commit("s", inputs=InputChanges(expires={"r": chooses("deny")})))
        case _:
            await store.commit(Commit("s", inputs=InputChanges(withdraws=["r"])))
    before = await given.input_row(store)
    emitted = await given.keys(store)

    answered = await answer(store, answering(("r", chooses("deny", "bob")), delivery_id="late"))

    assert before.status == status
    assert (answered.rows, answered.closed, answered.delivery) == ([before], frozenset(), None)
    assert await given.input_row(store) == before
    assert await delivered(store, "late") == []
    assert await given.keys(store) == emitted


async def test_what_carries_more_than_answers_is_always_delivered(store: Store) -> None:
    await store.commit(opening("r"))
    await answer(store, answering(("r", chooses("approve")), delivery_id="first"))

    answered = await answer(store, answering(("r", chooses("deny")), delivery_id="more", always=True))

    assert answered.closed == frozenset()
    assert answered.rows[0].delivery_id == "first"
    assert await delivered(store, "more") == ["more"]


async def test_what_comes_too_late_is_delivered_when_that_is_wanted(store: Store) -> None:
    await store.commit(opening("r", "q"))
    await answer(store, answering(("r", chooses("approve")), delivery_id="a0"))
    await store.commit(Commit("s", inputs=InputChanges(withdraws=["q"])))

    same = await answer(store, answering(("r", chooses("approve")), delivery_id="a1", late=True))
    other = await answer(store, answering(("r", chooses("deny")), delivery_id="a2", late=True, key="k"))
    gone = await answer(store, answering(("q", chooses("approve")), delivery_id="a3", late=True))

    assert same.delivery is None
    assert other.delivery is not None
    assert gone.delivery is not None
    assert (other.rows[0].answer, other.closed) == (chooses("approve"), frozenset())
    again = await answer(store, answering(("r", chooses("deny")), delivery_id="a4", late=True, key="k"))
    assert (again.delivery, again.fresh) == (other.delivery, False)


@pytest.mark.parametrize("request_id", ["unknown", "theirs"])
async def test_a_request_that_the_session_does_not_have_is_not_found_and_nothing_is_written(
    store: Store, request_id: str
) -> None:
    await store.create_session(given.session("t"))
    await store.commit(opening("theirs", session_id="t"))
    await store.commit(opening("ours"))

    with pytest.raises(NotFound):
        await answer(store, answering(("ours", chooses("approve")), (request_id, chooses("approve")), always=True))

    assert (await given.input_row(store, "ours")).votes == ()
    assert (await given.input_row(store, "theirs")).votes == ()
    assert await delivered(store, "a") == []
    assert await given.keys(store) == []


async def test_an_unknown_session_has_no_requests(store: Store) -> None:
    await store.commit(opening("r"))

    with pytest.raises(NotFound):
        await answer(store, answering(("r", chooses("approve")), session_id="unknown"))
    with pytest.raises(SessionGone):
        await answer(store, answering(session_id="unknown", always=True))


async def test_an_ended_session_takes_no_answer(store: Store) -> None:
    await store.commit(opening("r"))
    await store.commit(Commit("s", close=True, change=SessionChange(status="completed")))

    answered = await answer(store, answering(("r", chooses("approve"))))

    assert (answered.rows[0].status, answered.delivery) == ("withdrawn", None)
    with pytest.raises(SessionGone):
        await answer(store, answering(("r", chooses("approve")), always=True))


async def test_a_session_that_ended_without_being_closed_takes_no_verdict(store: Store) -> None:
    await store.commit(opening("r"))
    await store.commit(Commit("s", change=SessionChange(status="failed")))

    with pytest.raises(SessionGone):
        await answer(store, answering(("r", chooses("approve"))))

    row = await given.input_row(store)
    assert (row.status, row.votes) == ("open", ())
    assert await delivered(store, "a") == []


async def test_a_repeated_key_gets_the_first_receipt(store: Store) -> None:
    await store.commit(opening("r", "q"))
    first = await answer(store, answering(("r", chooses("approve")), delivery_id="a", key="k"))

    again = await answer(store, answering(("r", chooses("approve")), delivery_id="b", key="k"))

    assert (again.rows, again.closed, again.delivery) == (first.rows, first.closed, first.delivery)
    assert (first.fresh, again.fresh) == (True, False)
    assert await delivered(store, "a", "b") == ["a"]
    assert await given.keys(store) == ["resolved/r"]


async def test_a_repeated_key_with_another_request_is_a_conflict(store: Store) -> None:
    await store.commit(opening("r", "q"))
    await answer(store, answering(("r", chooses("approve")), delivery_id="a", key="k", digest="one"))

    with pytest.raises(IdempotencyConflict):
        await answer(store, answering(("q", chooses("approve")), delivery_id="b", key="k", digest="two"))

    assert (await given.input_row(store, "q")).status == "open"


async def test_a_repeated_key_gets_its_receipt_after_the_session_has_ended(store: Store) -> None:
    await store.commit(opening("r"))
    await answer(store, answering(("r", chooses("approve")), key="k"))
    await store.commit(Commit("s", consume=Consumption(1, ["a"])))
    await store.commit(Commit("s", close=True, change=SessionChange(status="completed")))

    again = await answer(store, answering(("r", chooses("approve")), delivery_id="b", key="k"))

    assert (again.closed, again.fresh) == ({"r"}, False)
    assert again.delivery is not None
    assert (again.delivery.delivery_id, again.delivery.turn) == ("a", 1)


async def test_an_answer_wakes_the_readers(store: Store) -> None:
    await store.commit(opening("r"))
    async with store.watch("s") as watch:
        while await watch.changed(0.05):
            pass

        await answer(store, answering(("r", chooses("approve"))))

        assert await watch.changed(5)
    assert await given.keys(store) == ["resolved/r"]


async def test_a_vote_keeps_what_a_newer_build_has_stored_with_the_others(store: Store, database: Database) -> None:
    await store.commit(opening("r", quorum=3))
    later = InputAnswer.model_validate({"optionId": "approve", "principalId": "ada", "device": "phone"})
    await answer(store, answering(("r", later), delivery_id="a"))

    await answer(store, answering(("r", chooses("approve", "bob")), delivery_id="b"))

    ((votes,),) = database.run("SELECT votes FROM inputs")
    assert [vote.get("device") for vote in json.loads(votes)] == ["phone", None]
    # Callers see what this build knows to be theirs to see.
    assert "device" not in (await given.input_row(store)).votes[0].shown()


@pytest.mark.parametrize("newer", ["request", "votes"])
async def test_a_request_of_a_newer_build_is_shown_and_not_answered(
    store: Store, database: Database, newer: str
) -> None:
    await store.commit(opening("r", quorum=2))
    await answer(store, answering(("r", chooses("approve", "ada")), delivery_id="a"))
    make_newer = {
        "request": """UPDATE inputs SET request = REPLACE(request, '"version":1', '"version":2,"rule":"all"')""",
        "votes": """UPDATE inputs SET votes = REPLACE(votes, '"version":1', '"version":2')""",
    }
    database.run(cast("LiteralString", make_newer[newer]))

    with pytest.raises(Unavailable, match="newer version"):
        await answer(store, answering(("r", chooses("approve", "bob")), delivery_id="b"))

    row = await given.input_row(store)
    assert (row.status, len(row.votes)) == ("open", 1)
    assert await delivered(store, "b") == []
