"""The routes of controls."""

from typing import Any

import pytest

from perdure.protocol.names import DELIVER
from perdure.store.values import Commit, SessionChange
from tests.api.asking import known_as
from tests.api.served import URL, Api, session_ended

CONTROLS = ["compact", "clear", "reset"]
NO_SESSION = (200, {"ok": True, "status": "no_active_session"})


async def control(api: Api, session_id: str, kind: str, **options: Any) -> tuple[int, dict[str, Any]]:
    answer = await api.http.post(f"{URL}/{session_id}/{kind}", **options)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("kind", ["compact", "clear"])
async def test_a_control_is_accepted_as_a_delivery(api: Api, kind: str) -> None:
    session_id = (await api.create())["sessionId"]

    # The official client sends an empty body with the type of JSON.
    answer = await control(api, session_id, kind, headers={"content-type": "application/json"})

    assert answer == (202, {"ok": True, "sessionId": session_id, "status": "accepted"})
    (_, name, payload) = api.temporal.signals[-1]
    assert (name, payload["kind"]) == (DELIVER, kind)
    assert await api.store.count_unread(session_id) == 2


@pytest.mark.parametrize("body", [{}, {"reason": "done"}])
async def test_a_reset_says_which_session_it_ends(api: Api, body: dict[str, str]) -> None:
    session_id = (await api.create())["sessionId"]

    answer = await control(api, session_id, "reset", json=body)

    assert answer == (200, {"ok": True, "previousSessionId": session_id, "status": "reset"})


@pytest.mark.parametrize("kind", CONTROLS)
async def test_a_repeated_control_is_one_delivery(api: Api, kind: str) -> None:
    session_id = (await api.create())["sessionId"]

    first, again = [await control(api, session_id, kind, headers={"idempotency-key": "k"}) for _ in range(2)]

    assert first == again
    assert await api.store.count_unread(session_id) == 2


async def test_a_key_of_another_request_is_refused(api: Api) -> None:
    session_id = (await api.create())["sessionId"]
    await control(api, session_id, "compact", headers={"idempotency-key": "k"})

    status, _ = await control(api, session_id, "clear", headers={"idempotency-key": "k"})

    assert status == 409


@pytest.mark.parametrize("kind", CONTROLS)
async def test_a_session_that_has_ended_is_no_active_session(api: Api, kind: str) -> None:
    session_id = (await api.create())["sessionId"]
    ended = Commit(session_id, events=(session_ended(),), close=True, change=SessionChange(status="completed"))
    await api.store.commit(ended)

    assert await control(api, session_id, kind) == NO_SESSION
    assert await control(api, "ses_unknown", kind) == NO_SESSION


@pytest.mark.parametrize("kind", CONTROLS)
async def test_a_session_of_somebody_else_is_no_active_session(people: Api, kind: str) -> None:
    created = await people.http.post(URL, json={"message": "hello"}, headers=known_as("ada"))
    session_id = created.json()["sessionId"]

    assert await control(people, session_id, kind, headers=known_as("bob")) == NO_SESSION
    assert await people.store.count_unread(session_id) == 1


@pytest.mark.parametrize(
    ("kind", "body"), [("reset", {"reason": ""}), ("reset", {"reason": 5}), ("clear", {"continuationToken": "eve:x"})]
)
async def test_a_body_that_cannot_be_meant_is_refused(api: Api, kind: str, body: dict[str, Any]) -> None:
    session_id = (await api.create())["sessionId"]

    status, _ = await control(api, session_id, kind, json=body)

    assert status == 400
    assert await api.store.count_unread(session_id) == 1
