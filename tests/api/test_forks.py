"""The route that forks a session: who may, and what it answers."""

from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from perdure.harness.journal import DELIVERY, FAILURE, ConsumedDelivery, StoredFailure, written
from perdure.protocol.requests import Failure
from perdure.store.lifecycle import Restoration
from perdure.store.values import Commit, NewRecord, SessionChange
from tests.api.asking import known_as
from tests.api.served import Api


async def ended_turn(api: Api, session_id: str, turn: int = 0) -> None:
    """A turn that has failed: the end that needs the fewest records."""
    heard = ConsumedDelivery(delivery_id="d", message="hello")
    failed = StoredFailure(failure=Failure(code="X", message="It failed."))
    records = (written(turn, 0, "delivery/0", DELIVERY, heard), written(turn, 0, "end", FAILURE, failed))
    change = SessionChange(status="waiting", turns=turn + 1)
    await api.store.commit(Commit(session_id, records=records, change=change))


async def test_a_fork_answers_with_its_token_and_parent(api: Api) -> None:
    parent = await api.create()
    await ended_turn(api, parent["sessionId"])

    answer = await api.http.post(f"/v1/sessions/{parent['sessionId']}/fork", json={"turn": 0, "step": 0})

    assert answer.status_code == 201
    body = answer.json()
    assert body.keys() == {"sessionId", "continuationToken", "parent"}
    assert body["parent"] == {"sessionId": parent["sessionId"], "turn": 0, "step": 0}
    assert answer.headers["x-eve-session-id"] == body["sessionId"]
    assert (await api.deliver(body)).status_code == 200
    started = api.temporal.started[-1]
    assert (started["id"], started["state"]["turn"], started["state"]["told"]) == (body["sessionId"], 1, 1)
    shown = (await api.http.get(f"/v1/sessions/{body['sessionId']}")).json()
    assert shown["parent"] == body["parent"]


async def test_only_the_owner_forks(people: Api) -> None:
    parent = await people.create()
    await ended_turn(people, parent["sessionId"])
    path = f"/v1/sessions/{parent['sessionId']}/fork"

    refused = await people.http.post(path, json={"turn": 0}, headers=known_as("bob"))
    unknown = await people.http.post("/v1/sessions/ses_unknown/fork", json={"turn": 0}, headers=known_as("bob"))

    assert refused.status_code == 404
    assert refused.json() == unknown.json()
    assert (await people.http.post(path, json={"turn": 0})).status_code == 201


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"turn": "0"},
        {"turn": -1},
        {"turn": True},
        {"turn": 1.5},
        {"turn": 0, "step": "x"},
        {"turn": 2**53},
        {"turn": 0, "steps": 0},
    ],
)
async def test_a_boundary_is_named_by_numbers(api: Api, body: dict[str, Any]) -> None:
    parent = await api.create()

    answer = await api.http.post(f"/v1/sessions/{parent['sessionId']}/fork", json=body)

    assert answer.status_code == 400
    assert answer.json()["ok"] is False


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"turn": 1}, "turn_not_ended"),
        ({"turn": 1, "step": 0}, "step_not_ended"),
        ({"turn": 9}, "turn_not_begun"),
        ({"turn": 2**53 - 1}, "turn_not_begun"),
        ({"turn": 0, "step": 1}, "step_not_begun"),
        ({"turn": 0, "step": 2**53 - 1}, "step_not_begun"),
    ],
)
async def test_another_place_is_refused_with_the_reason(api: Api, body: dict[str, Any], reason: str) -> None:
    parent = await api.create()
    await ended_turn(api, parent["sessionId"])
    await api.emit(parent["sessionId"], change=SessionChange(status="running", turns=2))

    answer = await api.http.post(f"/v1/sessions/{parent['sessionId']}/fork", json=body)

    assert answer.status_code == 409
    refused = answer.json()
    assert (refused["code"], refused["reason"]) == ("fork_boundary_not_offered", reason)
    assert refused["nearest"] == ({"turn": 0, "step": 0} if body["turn"] == 0 else {"turn": 0})


async def test_a_turn_that_a_restore_left_out_is_neither_forked_nor_offered(api: Api) -> None:
    parent = (await api.create())["sessionId"]
    for turn in range(3):
        await ended_turn(api, parent, turn)
    await api.store.restore(Restoration(parent, "OPERATOR", kept=0))

    answers = [await api.http.post(f"/v1/sessions/{parent}/fork", json={"turn": turn}) for turn in (3, 2, 1, 0)]

    assert [each.json().get("reason") for each in answers] == ["turn_not_begun", "left_out", "left_out", None]
    assert [each.json().get("nearest") for each in answers] == [{"turn": 0}] * 3 + [None]


async def test_a_turn_that_cannot_be_read_is_neither_forked_nor_offered(api: Api) -> None:
    parent = (await api.create())["sessionId"]
    await ended_turn(api, parent)
    of_a_newer_build = NewRecord(1, 0, "reply", "pydantic-ai/99", {})
    await api.store.commit(Commit(parent, records=(of_a_newer_build,), change=SessionChange(status="waiting", turns=2)))

    wanted = [{"turn": 2}, {"turn": 1}, {"turn": 1, "step": 0}]
    answers = [await api.http.post(f"/v1/sessions/{parent}/fork", json=place) for place in wanted]

    assert [each.status_code for each in answers] == [409] * 3
    assert [each.json()["reason"] for each in answers] == ["turn_not_begun", "unreadable", "unreadable"]
    assert [each.json()["nearest"] for each in answers] == [{"turn": 0}] * 3


async def test_the_same_key_forks_once(api: Api) -> None:
    parent = await api.create()
    await ended_turn(api, parent["sessionId"])
    path, key = f"/v1/sessions/{parent['sessionId']}/fork", {"idempotency-key": "k"}

    first = await api.http.post(path, json={"turn": 0}, headers=key)
    second = await api.http.post(path, json={"turn": 0}, headers=key)
    other = await api.http.post(path, json={"turn": 0, "step": 0}, headers=key)

    assert first.content == second.content
    assert second.headers["idempotency-replayed"] == "true"
    assert other.status_code == 409
    assert len([each for each in api.temporal.started if each["id"] == first.json()["sessionId"]]) == 2


async def test_the_same_key_gets_its_fork_although_the_parent_was_deleted(people: Api) -> None:
    parent = await people.create()
    await ended_turn(people, parent["sessionId"])
    path, key = f"/v1/sessions/{parent['sessionId']}/fork", {"idempotency-key": "k"}
    first = await people.http.post(path, json={"turn": 0}, headers=key)
    await people.store.commit(Commit(parent["sessionId"], close=True, change=SessionChange(status="completed")))
    await people.store.begin_deletion(parent["sessionId"])
    while not await people.store.purge(parent["sessionId"], 100):
        pass

    again = await people.http.post(path, json={"turn": 0}, headers=key)

    assert (again.status_code, again.content) == (201, first.content)
    # Nobody else gets it, and no other request.
    for headers in (known_as("bob", key="k"), {}):
        assert (await people.http.post(path, json={"turn": 0}, headers=headers)).status_code == 404


async def test_a_fork_reads_no_bodies_of_its_turn_but_those_of_its_end(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = await api.create()
    await ended_turn(api, parent["sessionId"])
    monkeypatch.setattr(type(api.store), "records", None)

    path = f"/v1/sessions/{parent['sessionId']}/fork"
    inside = await api.http.post(path, json={"turn": 0, "step": 7})
    fork = await api.http.post(path, json={"turn": 0, "step": 0})

    assert (inside.status_code, inside.json()["reason"]) == (409, "step_not_begun")
    assert fork.status_code == 201


async def test_a_fork_is_accepted_while_temporal_is_away(api: Api) -> None:
    parent = await api.create()
    await ended_turn(api, parent["sessionId"])
    api.temporal.failure = RPCError("away", RPCStatusCode.UNAVAILABLE, b"")

    answer = await api.http.post(f"/v1/sessions/{parent['sessionId']}/fork", json={"turn": 0})

    assert answer.status_code == 201
    assert answer.headers["x-perdure-delayed"] == "true"
    row = await api.store.session(answer.json()["sessionId"])
    assert row is not None
    assert row.unsignalled == 1
