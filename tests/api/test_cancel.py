"""Stopping a turn."""

from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from perdure.protocol.events import EventType
from perdure.protocol.names import CANCEL
from perdure.store.values import Commit, Consumption, SessionChange
from tests.api.asking import APPROVE, known_as, to, waiting
from tests.api.served import URL, Api, session_ended, turn_events


async def cancel(api: Api, session_id: str, body: Any = None, **options: Any) -> dict[str, Any]:
    content = {} if body is None else {"json": body}
    answer = await api.http.post(f"{URL}/{session_id}/cancel", **content, **options)
    return {"status code": answer.status_code, **answer.json()}


async def running(api: Api) -> str:
    """A session in its first turn."""
    session_id = (await api.create())["sessionId"]
    await api.emit(session_id, *turn_events(0)[:2], change=SessionChange(status="running", turns=1))
    return session_id


async def idle(api: Api) -> dict[str, Any]:
    """A session that has consumed its first message and waits for the next."""
    created = await api.create()
    done = SessionChange(status="waiting", turns=1)
    await api.store.commit(
        Commit(
            created["sessionId"],
            events=turn_events(0),
            consume=Consumption(0, [created["deliveryId"]]),
            change=done,
        )
    )
    return created


async def cancel_requests(api: Api, session_id: str) -> list[Any]:
    return [each.data for each in await api.store.events(session_id) if each.type == EventType.CANCEL_REQUESTED]


def answered(session_id: str, status: str) -> dict[str, Any]:
    return {"status code": 200, "ok": True, "sessionId": session_id, "status": status}


@pytest.mark.parametrize("body", [None, {}, {"turnId": "turn_0"}])
async def test_a_running_turn_is_asked_to_stop(api: Api, body: Any) -> None:
    session_id = await running(api)

    assert await cancel(api, session_id, body) == answered(session_id, "accepted")
    assert await cancel_requests(api, session_id) == [{"turnId": "turn_0"}]
    assert api.temporal.signals == [(session_id, CANCEL, {"turnId": "turn_0"})]


async def test_cancelling_twice_is_one_cancel_request(api: Api) -> None:
    session_id = await running(api)

    answers = [await cancel(api, session_id) for _ in range(2)]

    assert answers == [answered(session_id, "accepted")] * 2
    assert len(await cancel_requests(api, session_id)) == 1


async def test_a_turn_that_waits_for_people_can_be_stopped(api: Api) -> None:
    session = await waiting(api, "r")

    assert await cancel(api, session.id) == answered(session.id, "accepted")
    assert await cancel_requests(api, session.id) == [{"turnId": "turn_0"}]


async def test_a_message_that_no_worker_has_taken_up_can_be_stopped(api: Api) -> None:
    created = await api.create()
    session_id = created["sessionId"]

    assert await cancel(api, session_id) == answered(session_id, "accepted")


async def test_a_second_message_that_no_worker_has_taken_up_can_be_stopped(api: Api) -> None:
    created = await idle(api)
    session_id = created["sessionId"]
    await api.deliver(created)

    assert await cancel(api, session_id, {"turnId": "turn_1"}) == answered(session_id, "accepted")


@pytest.mark.parametrize("body", [None, {"turnId": "turn_0"}])
async def test_an_idle_session_has_nothing_to_stop(api: Api, body: Any) -> None:
    session_id = (await idle(api))["sessionId"]

    assert await cancel(api, session_id, body) == answered(session_id, "no_active_turn")
    assert await cancel_requests(api, session_id) == []
    assert api.temporal.signals == []


async def test_a_finished_session_has_nothing_to_stop(api: Api) -> None:
    session_id = await running(api)
    await api.store.commit(
        Commit(session_id, events=[session_ended()], close=True, change=SessionChange(status="completed"))
    )

    assert await cancel(api, session_id) == answered(session_id, "no_active_turn")
    assert await cancel_requests(api, session_id) == []


@pytest.mark.parametrize("turn_id", ["turn_1", "turn_00", "x"])
async def test_another_turn_is_not_stopped(api: Api, turn_id: str) -> None:
    session_id = await running(api)

    assert await cancel(api, session_id, {"turnId": turn_id}) == answered(session_id, "no_active_turn")
    assert await cancel_requests(api, session_id) == []


async def test_a_cancel_is_accepted_while_temporal_is_away(api: Api) -> None:
    session_id = await running(api)
    api.temporal.failure = RPCError("away", RPCStatusCode.UNAVAILABLE, b"")

    answer = await cancel(api, session_id)

    assert answer == answered(session_id, "accepted")
    assert await cancel_requests(api, session_id) == [{"turnId": "turn_0"}]


@pytest.mark.parametrize("body", [{"turnId": 1}, {"turnId": ""}, "x"])
async def test_a_turn_is_named_by_its_id(api: Api, body: Any) -> None:
    assert (await cancel(api, await running(api), body))["status code"] == 400


async def test_only_the_owner_stops_a_session(people: Api) -> None:
    session = await waiting(people, "r")

    answer = await cancel(people, session.id, headers=known_as("eve"))

    assert (answer["status code"], answer["error"]) == (404, "Session not found.")
    assert await cancel_requests(people, session.id) == []


# --- what a session waits for -----------------------------------------------------------------------------------


async def test_a_session_shows_whom_it_waits_for_since_when_and_until_when(people: Api) -> None:
    session = await waiting(people, "r", expires_at="2999-01-01T00:00:00.000Z")

    shown = (await people.http.get(f"/v1/sessions/{session.id}")).json()

    since = (await session.row("r")).opened_at
    until = "until 2999-01-01T00:00:00.000Z (then: deny)"
    assert shown["waitingFor"] == f"Approval of `pay` (r) by the requester, since {since}, {until}."
    assert shown["openInputs"] == ["r"]


async def test_a_list_of_sessions_shows_it_too(people: Api) -> None:
    session = await waiting(people, "q", kind="question")
    await session.ask("r")

    (shown,) = (await people.http.get("/v1/sessions")).json()["sessions"]

    since = (await session.row("q")).opened_at
    assert shown["waitingFor"] == f"An answer to “Which colour?” (q) by the requester, since {since}. And 1 more."
    assert "openInputs" not in shown


async def test_an_answered_session_waits_for_no_one(people: Api) -> None:
    session = await waiting(people, "r")
    await session.respond(to("r", APPROVE))

    shown = (await people.http.get(f"/v1/sessions/{session.id}")).json()

    # The first message is not read either: there is no worker here.
    expected = "A worker that takes up its next turn: 2 deliveries are queued."
    assert (shown["waitingFor"], shown["openInputs"]) == (expected, [])


async def test_an_idle_session_waits_for_the_next_message_and_then_for_a_worker(api: Api) -> None:
    created = await idle(api)
    before = await waits_for(api, created)

    await api.deliver(created)

    assert before == "The next message."
    assert await waits_for(api, created) == "A worker that takes up its next turn: 1 delivery is queued."


async def test_a_session_waits_for_temporal_while_a_delivery_is_not_signalled(api: Api) -> None:
    old = await idle(api)
    api.temporal.failure = RPCError("away", RPCStatusCode.UNAVAILABLE, b"")
    new = await api.create()
    for _ in range(2):
        await api.deliver(old)

    assert await waits_for(api, old) == (
        "Temporal, which could not be reached: 2 deliveries are accepted, and signalled later."
    )
    assert await waits_for(api, new) == (
        "Temporal, which could not be reached: 1 delivery is accepted, and signalled later."
    )


async def waits_for(api: Api, session: dict[str, Any]) -> str:
    return (await api.http.get(f"/v1/sessions/{session['sessionId']}")).json()["waitingFor"]
