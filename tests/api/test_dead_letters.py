"""Failed turns over HTTP: those of the caller's own sessions, and delivering their messages again once."""

from dataclasses import replace
from typing import Any

import pytest
from httpx2 import Response

from perdure.harness.journal import DELIVERY, END, PARK, ConsumedDelivery, StoredPark, written
from perdure.protocol import names
from perdure.protocol.events import EventType
from perdure.store.values import Commit, Consumption, SessionChange
from tests.api.asking import known_as
from tests.api.served import Api, of_turn, session_ended
from tests.support.given import ending

EVE = known_as("eve")
NOT_FOUND = {"code": "dead_letter_not_found", "error": "There is no such failed turn.", "ok": False}


async def fail(api: Api, session: dict[str, Any], turn: int = 0, **end: Any) -> None:
    """Let a turn read all that waits, and fail."""
    session_id = session["sessionId"]
    waiting = await api.store.unread(session_id)
    bodies = await api.store.deliveries(session_id, [each.delivery_id for each in waiting])
    consumed = [
        ConsumedDelivery.model_validate({**(each.body or {}), "deliveryId": each.delivery_id}) for each in bodies
    ]
    failed = of_turn(turn, "failed", EventType.TURN_FAILED)
    failed = failed.model_copy(update={"data": {**(failed.data or {}), "code": "TOO_BAD", "message": "It was bad."}})
    commit = Commit(
        session_id,
        records=[written(turn, 0, names.delivery_key(index), DELIVERY, each) for index, each in enumerate(consumed)],
        events=[failed],
        consume=Consumption(turn, [each.delivery_id for each in consumed]),
        change=SessionChange(status="waiting", turns=turn + 1),
    )
    await api.store.commit(replace(commit, **end))


async def listed(api: Api, headers: dict[str, str] | None = None, **params: Any) -> list[dict[str, Any]]:
    answer = await api.http.get("/v1/dead-letters", params=params, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["deadLetters"]


async def requeue(
    api: Api, session: dict[str, Any], turn: str = "turn_0", headers: dict[str, str] | None = None
) -> Response:
    return await api.http.post(f"/v1/dead-letters/{session['sessionId']}/{turn}/requeue", headers=headers)


async def test_a_failed_turn_is_listed_for_the_owner_of_its_session_only(people: Api) -> None:
    session = await people.create()
    await fail(people, session)

    (letter,) = await listed(people)

    assert letter.pop("failedAt") > "2026"
    assert letter == {
        "sessionId": session["sessionId"],
        "turnId": "turn_0",
        "agent": "concierge",
        "code": "TOO_BAD",
        "message": "It was bad.",
    }
    assert await listed(people, EVE) == []
    assert await listed(people, agent="clerk") == []


async def test_its_messages_are_delivered_again_once_and_in_their_order(people: Api) -> None:
    session = await people.create("first", clientContext=["about it"])
    await people.deliver(session, "second")
    await fail(people, session)
    people.temporal.signals.clear()

    answer = await requeue(people, session)
    again = await requeue(people, session)

    assert answer.status_code == 200, answer.text
    ids = answer.json()["deliveryIds"]
    rows = await people.store.deliveries(session["sessionId"], ids)
    assert [row.body and row.body["message"] for row in rows] == ["first", "second"]
    assert [row.body and row.body.get("clientContext") for row in rows] == [["about it"], []]
    assert [row.unread for row in rows] == [True, True]
    assert (again.json()["deliveryIds"], again.headers["idempotency-replayed"]) == (ids, "true")
    assert await people.store.count_unread(session["sessionId"]) == 2
    assert set(ids) <= {payload["id"] for _, _, payload in people.temporal.signals}
    assert await listed(people) == []
    (letter,) = await listed(people, status="requeued")
    assert letter["requeuedAt"] >= letter["failedAt"]


async def test_what_it_answered_is_not_answered_again(people: Api) -> None:
    session = await people.create("first")
    (first,) = await people.store.unread(session["sessionId"])
    body = {"kind": "answer", "message": "and this", "inputResponses": [{"requestId": "r", "optionId": "a"}]}
    consumed = ConsumedDelivery.model_validate({**body, "answers": ["r"], "deliveryId": first.delivery_id})
    await fail(people, session, records=[written(0, 0, names.delivery_key(0), DELIVERY, consumed)])

    (delivery_id,) = (await requeue(people, session)).json()["deliveryIds"]

    (row,) = await people.store.deliveries(session["sessionId"], [delivery_id])
    assert row.body is not None
    assert (row.kind, row.body["message"], row.body["inputResponses"], row.body["answers"]) == (
        "message",
        "and this",
        [],
        [],
    )


async def test_a_turn_that_resumed_has_the_messages_of_the_turn_that_asked(people: Api) -> None:
    session = await people.create("the question of all")
    await fail(people, session, events=[])
    asked = written(0, 0, END, PARK, StoredPark(open=()))
    await people.store.commit(Commit(session["sessionId"], records=[asked]))
    await fail(people, session, 1)

    (delivery_id,) = (await requeue(people, session, "turn_1")).json()["deliveryIds"]

    (row,) = await people.store.deliveries(session["sessionId"], [delivery_id])
    assert row.body is not None
    assert row.body["message"] == "the question of all"


async def test_a_late_answer_has_no_messages_of_a_turn_that_has_ended(people: Api) -> None:
    session = await people.create("pay")
    await fail(people, session, events=[])
    await fail(people, session, 1)

    answer = await requeue(people, session, "turn_1")

    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert await people.store.count_unread(session["sessionId"]) == 0


@pytest.mark.parametrize("turn", ["turn_1", "turn_", "0", "turn_99999999999", "%00"])
async def test_a_turn_that_has_not_failed_is_not_found(people: Api, turn: str) -> None:
    session = await people.create()
    await fail(people, session)

    answer = await requeue(people, session, turn)

    assert (answer.status_code, answer.json()) == (404, NOT_FOUND)


async def test_a_session_of_somebody_else_is_not_found(people: Api) -> None:
    session = await people.create()
    await fail(people, session)

    answer = await requeue(people, session, headers=EVE)

    assert (answer.status_code, answer.json()) == (404, NOT_FOUND)
    assert await people.store.count_unread(session["sessionId"]) == 0


async def test_a_session_that_has_ended_takes_nothing(people: Api) -> None:
    session = await people.create()
    await fail(people, session)
    end = replace(ending(1, session["sessionId"]), events=[session_ended()], close=True)
    await people.store.commit(replace(end, change=SessionChange(status="completed")))

    answer = await requeue(people, session)

    assert (answer.status_code, answer.json()["code"]) == (409, "session_not_active")
    assert len(await listed(people)) == 1


@pytest.mark.parametrize("params", [{"status": "closed"}, {"limit": 0}, {"cursor": "x"}])
async def test_bad_parameters_are_refused(people: Api, params: dict[str, Any]) -> None:
    answer = await people.http.get("/v1/dead-letters", params=params)

    assert answer.status_code == 400, answer.text
