"""Answers that come at the same time, from two processes: one verdict, and all processes agree on it."""

import asyncio

from perdure.protocol.inputs import InputAnswer
from perdure.store.base import Store
from perdure.store.inputs import Answered, Answering, InputRow
from perdure.store.values import Commit, InputChanges
from tests.support import given
from tests.support.given import answer, answering, chooses, opening


async def at_once(stores: tuple[Store, Store], request_id: str, answers: list[InputAnswer]) -> list[Answered]:
    return await asyncio.gather(
        *(
            in_the_end(stores[n % 2], answering((request_id, said), delivery_id=f"{request_id}/{n}"))
            for n, said in enumerate(answers)
        )
    )


async def in_the_end(store: Store, answering: Answering) -> Answered:
    return await given.patiently(lambda: answer(store, answering))


def agreed(answers: list[Answered], row: InputRow) -> bool:
    """Whether all that saw the request closed saw the same."""
    return all(answered.rows == [row] for answered in answers if answered.rows[0].status != "open")


async def deliveries(store: Store, request_id: str, count: int) -> list[str]:
    rows = await store.deliveries("s", [f"{request_id}/{n}" for n in range(count)])
    return [row.delivery_id for row in rows]


async def test_of_fifty_identical_answers_one_closes(store: Store, other: Store) -> None:
    await store.commit(opening("r"))

    answers = await at_once((store, other), "r", [chooses("approve")] * 50)

    row = await given.input_row(store)
    assert [answered.closed for answered in answers].count(frozenset({"r"})) == 1
    assert [answered.delivery is not None for answered in answers].count(True) == 1
    assert agreed(answers, row)
    assert len(row.votes) == 1
    assert await deliveries(store, "r", 50) == [row.delivery_id]
    assert await given.keys(store) == ["resolved/r"]


async def test_of_fifty_answers_under_one_key_one_is_fresh_and_all_get_its_receipt(store: Store, other: Store) -> None:
    await store.commit(opening("r"))

    answers = await asyncio.gather(
        *(
            in_the_end(
                (store, other)[n % 2],
                answering(("r", chooses("approve")), delivery_id=f"r/{n}", key="k"),
            )
            for n in range(50)
        )
    )

    row = await given.input_row(store)
    assert [answered.fresh for answered in answers].count(True) == 1
    assert all((each.rows, each.closed) == ([row], {"r"}) for each in answers)
    assert {each.delivery.delivery_id for each in answers if each.delivery} == {row.delivery_id}
    assert await deliveries(store, "r", 50) == [row.delivery_id]


async def test_of_approve_and_deny_at_once_one_wins_and_all_readers_agree(store: Store, other: Store) -> None:
    for n in range(10):
        request_id = f"r{n}"
        await store.commit(opening(request_id))

        answers = await at_once((store, other), request_id, [chooses("approve", "ada"), chooses("deny", "bob")])

        row = await given.input_row(store, request_id)
        (winner,) = [answered for answered in answers if answered.closed]
        assert agreed(answers, row)
        assert winner.delivery is not None
        assert winner.delivery.delivery_id == row.delivery_id
        assert await other.input(request_id) == row
        assert await deliveries(store, request_id, 2) == [row.delivery_id]
        (emitted,) = [event for event in await given.everything(other) if event.key == f"resolved/{request_id}"]
        assert row.answer is not None
        assert emitted.data == {"status": "answered", "said": row.answer.option_id}


async def test_a_quorum_of_racing_principals_closes_once(store: Store, other: Store) -> None:
    await store.commit(opening("r", quorum=5))
    # Each of eight people answers three times.
    answers = await at_once((store, other), "r", [chooses("approve", f"p{n % 8}") for n in range(24)])

    row = await given.input_row(store)
    assert row.status == "answered"
    assert len(row.votes) == len({vote.principal_id for vote in row.votes}) == 5
    assert row.answer == row.votes[-1]
    assert [answered.closed for answered in answers].count(frozenset({"r"})) == 1
    assert agreed(answers, row)
    assert await given.keys(store) == ["resolved/r"]


async def test_too_few_racing_principals_close_nothing(store: Store, other: Store) -> None:
    await store.commit(opening("r", quorum=3))

    answers = await at_once((store, other), "r", [chooses("approve", f"p{n % 2}") for n in range(20)])

    row = await given.input_row(store)
    assert (row.status, len(row.votes)) == ("open", 2)
    assert not any(answered.closed or answered.delivery for answered in answers)


async def test_of_an_answer_and_an_expiry_at_once_one_wins(store: Store, other: Store) -> None:
    for n in range(10):
        request_id = f"r{n}"
        await store.commit(opening(request_id))

        answered, _ = await asyncio.gather(
            answer(store, answering((request_id, chooses("approve")), delivery_id=request_id)),
            other.commit(
                Commit(
                    "s",
                    inputs=InputChanges(
                        expires={request_id: chooses("deny", "nobody")},
                        resolved={request_id: given.event(f"expired/{request_id}")},
                    ),
                )
            ),
        )

        row = await given.input_row(store, request_id)
        emitted = [key for key in await given.keys(store) if key.endswith(f"/{request_id}")]
        consumed = [each.delivery_id for each in await store.deliveries("s", [request_id])]
        if answered.closed:
            assert (row.status, row.answer, emitted) == ("answered", chooses("approve"), [f"resolved/{request_id}"])
            assert consumed == [request_id]
        else:
            assert (row.status, row.answer, emitted) == (
                "expired",
                chooses("deny", "nobody"),
                [f"expired/{request_id}"],
            )
            assert (answered.rows, consumed) == ([row], [])
