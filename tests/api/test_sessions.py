"""Starting sessions and delivering to them."""

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from temporalio.service import RPCError, RPCStatusCode

from api.routes.inspection import summary
from perdure.errors import SchemaUnknown
from perdure.protocol.deliveries import Bounds
from perdure.store.inputs import Waits
from perdure.store.values import Commit, SessionChange
from tests.api.served import URL, Api, session_ended


async def test_create_answers_with_the_receipt_of_the_contract(api: Api) -> None:
    answer = await api.http.post(URL, json={"message": "hello"})

    assert answer.status_code == 202
    body = answer.json()
    assert body.keys() == {"continuationToken", "deliveryId", "ok", "sessionId"}
    assert body["ok"] is True
    assert body["continuationToken"].startswith("eve:")
    assert answer.headers["x-eve-session-id"] == body["sessionId"]
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-type"].startswith("application/json")


async def test_create_starts_one_workflow_and_keeps_the_message_out_of_it(api: Api) -> None:
    created = await api.create("a secret plan")

    (started,) = api.temporal.started
    assert started["id"] == created["sessionId"]
    assert "a secret plan" not in str(started["state"])


async def test_the_content_of_a_delivery_waits_in_the_store(api: Api) -> None:
    created = await api.create(
        "hello", clientContext={"page": "/home"}, outputSchema={"type": "object"}, mode="task", unknown="ignored"
    )

    (delivery,) = await api.store.deliveries(created["sessionId"], [created["deliveryId"]])
    assert delivery.body is not None
    assert delivery.body["message"] == "hello"
    assert delivery.body["clientContext"] == ['{"page":"/home"}']
    assert delivery.body["outputSchema"] == {"type": "object"}
    assert delivery.body["principal"]["principalId"] == "local-dev"


@pytest.mark.parametrize(("mode", "can_answer"), [("conversation", True), ("task", False)])
async def test_only_a_conversation_can_be_asked_for_input(api: Api, mode: str, can_answer: bool) -> None:
    created = await api.create(mode=mode)

    row = await api.store.session(created["sessionId"])
    assert row is not None
    assert (row.mode, row.capabilities.request_input) == (mode, can_answer)


async def test_continue_signals_the_session(api: Api) -> None:
    created = await api.create()

    answer = await api.deliver(created, "more")

    assert answer.status_code == 200
    body = answer.json()
    assert body == {"deliveryId": body["deliveryId"], "ok": True, "sessionId": created["sessionId"]}
    assert answer.headers["x-eve-session-id"] == created["sessionId"]
    assert answer.headers["cache-control"] == "no-store"
    ((session_id, name, signal),) = api.temporal.signals
    assert (session_id, name, signal["id"]) == (created["sessionId"], "deliver", body["deliveryId"])
    assert signal["coalesce"] is False


async def test_a_caller_may_ask_for_its_deliveries_to_be_folded(api: Api) -> None:
    created = await api.create()

    await api.deliver(created, coalesce=True)

    assert api.temporal.signals[0][2]["coalesce"] is True


async def test_answers_reach_the_store_as_they_were_given(api: Api) -> None:
    created = await api.create()
    responses = [{"requestId": "r1", "optionId": "approve"}, {"requestId": "r2", "text": "blue"}]

    answer = await api.http.post(
        f"{URL}/{created['sessionId']}",
        json={"continuationToken": created["continuationToken"], "inputResponses": responses},
    )

    (delivery,) = await api.store.deliveries(created["sessionId"], [answer.json()["deliveryId"]])
    assert delivery.body is not None
    assert delivery.body["inputResponses"] == responses
    assert "message" not in delivery.body


async def test_a_message_of_parts_is_kept_in_parts(api: Api) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "file", "mediaType": "image/png", "data": "AAAA"}]

    created = await api.create(parts)  # pyright: ignore[reportArgumentType]

    (delivery,) = await api.store.deliveries(created["sessionId"], [created["deliveryId"]])
    assert delivery.body is not None
    assert delivery.body["message"] == parts


NOT_ACTIVE = {
    "code": "session_not_active",
    "error": "No session waits on this continuation token; start one.",
    "ok": False,
}


async def test_an_unknown_token_starts_nothing(api: Api) -> None:
    created = await api.create()

    answer = await api.deliver({**created, "continuationToken": "eve:unknown"})

    assert (answer.status_code, answer.json()) == (409, NOT_ACTIVE)
    assert len(api.temporal.started) == 1


async def test_the_token_must_belong_to_the_session_of_the_path(api: Api) -> None:
    one, other = await api.create(), await api.create()

    answer = await api.deliver({"sessionId": one["sessionId"], "continuationToken": other["continuationToken"]})

    assert (answer.status_code, answer.json()) == (409, NOT_ACTIVE)
    assert api.temporal.signals == []


async def test_the_token_of_a_finished_session_is_stale(api: Api) -> None:
    created = await api.create()
    closed = SessionChange(status="completed")
    await api.store.commit(Commit(created["sessionId"], events=[session_ended()], close=True, change=closed))

    answer = await api.deliver(created)

    assert (answer.status_code, answer.json()) == (409, NOT_ACTIVE)


async def test_continuing_an_unknown_session_is_404(api: Api) -> None:
    answer = await api.deliver({"sessionId": "ses_unknown", "continuationToken": "eve:t"})

    assert (answer.status_code, answer.json()) == (404, {"error": "Session not found.", "ok": False})


async def test_what_is_committed_is_accepted_while_temporal_is_away(api: Api) -> None:
    created = await api.create()
    api.temporal.failure = RPCError("away", RPCStatusCode.UNAVAILABLE, b"")

    started, delivered = await api.http.post(URL, json={"message": "x"}), await api.deliver(created)

    for answer, status in ((started, 202), (delivered, 200)):
        assert (answer.status_code, answer.headers["x-perdure-delayed"]) == (status, "true")
        [row] = await api.store.deliveries(answer.json()["sessionId"], [answer.json()["deliveryId"]])
        assert row.unread
    rows = (await api.http.get("/v1/sessions")).json()["sessions"]
    assert {row["sessionId"] for row in rows} == {created["sessionId"], started.json()["sessionId"]}


async def test_a_repeated_key_gets_the_first_receipt_whatever_became_of_the_first_signal(api: Api) -> None:
    created = await api.create()
    api.temporal.failure = RPCError("away", RPCStatusCode.DEADLINE_EXCEEDED, b"")

    first = await api.deliver(created, key="k")
    api.temporal.failure = None
    again = await api.deliver(created, key="k")

    assert (first.content, again.headers["idempotency-replayed"]) == (again.content, "true")
    assert "x-perdure-delayed" not in again.headers


async def test_a_session_lets_only_so_many_deliveries_wait(api: Api) -> None:
    created = await api.create()

    answers = [await api.deliver(created) for _ in range(101)]

    assert [answer.status_code for answer in answers] == [200] * 99 + [429] * 2
    assert (answers[-1].json()["code"], answers[-1].headers["retry-after"]) == ("inbox_full", "1")
    assert len(await api.store.unread(created["sessionId"])) == 100


async def test_errors_of_the_database_are_only_logged(
    api: Api, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(sqlite3.connect(tmp_path / "test.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")

        answer = await api.http.post(URL, json={"message": "x"})

    body = {
        "code": "unavailable",
        "error": "The service cannot take this right now; nothing was accepted.",
        "ok": False,
    }
    assert (answer.status_code, answer.headers["retry-after"], answer.json()) == (503, "1", body)
    assert "database is locked" in caplog.text


async def test_a_store_that_cannot_be_read_is_503(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise SchemaUnknown("The file is not an SQLite database.")

    monkeypatch.setattr(api.store, "create_session", broken)

    answer = await api.http.post(URL, json={"message": "x"})

    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")


async def test_a_surprise_is_hidden_behind_an_id(
    api: Api, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ValueError("the password is hunter2")

    monkeypatch.setattr(api.store, "create_session", broken)

    answer = await api.http.post(URL, json={"message": "x"})

    assert answer.status_code == 500
    body = answer.json()
    assert body == {"error": "Channel handler failed.", "errorId": body["errorId"], "ok": False}
    assert body["errorId"] in caplog.text


# --- idempotency ------------------------------------------------------------------------------------------------

KEY = {"idempotency-key": "k-1"}


async def test_a_repeated_create_is_answered_with_the_same_bytes(api: Api) -> None:
    first, again = [await api.http.post(URL, json={"message": "x"}, headers=KEY) for _ in range(2)]

    assert (again.status_code, again.content) == (202, first.content)
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert len((await api.http.get("/v1/sessions")).json()["sessions"]) == 1


async def test_many_creates_at_once_with_one_key_are_one_session(api: Api) -> None:
    answers = await asyncio.gather(*(api.http.post(URL, json={"message": "x"}, headers=KEY) for _ in range(20)))

    assert len({answer.content for answer in answers}) == 1
    assert {answer.status_code for answer in answers} == {202}
    assert len({started["id"] for started in api.temporal.started}) == 1


async def test_many_deliveries_at_once_with_one_key_are_one_delivery(api: Api) -> None:
    created = await api.create()
    body = {"continuationToken": created["continuationToken"], "message": "x"}

    answers = await asyncio.gather(
        *(api.http.post(f"{URL}/{created['sessionId']}", json=body, headers=KEY) for _ in range(20))
    )

    assert len({answer.content for answer in answers}) == 1
    assert len({signal["id"] for _, _, signal in api.temporal.signals}) == 1


async def test_one_key_for_two_requests_is_a_conflict(api: Api) -> None:
    await api.http.post(URL, json={"message": "x"}, headers=KEY)

    answer = await api.http.post(URL, json={"message": "y"}, headers=KEY)

    assert answer.status_code == 409
    assert answer.json()["code"] == "idempotency_key_reused"
    assert answer.json()["ok"] is False


@pytest.mark.parametrize("commit", [{"close": True}, {"route": "another"}])
async def test_a_repeated_delivery_gets_its_receipt_when_the_token_is_stale_by_now(
    api: Api, commit: dict[str, Any]
) -> None:
    created = await api.create()
    path = f"{URL}/{created['sessionId']}"
    body = {"continuationToken": created["continuationToken"], "message": "x"}
    first = await api.http.post(path, json=body, headers=KEY)
    await api.store.commit(Commit(created["sessionId"], **commit))

    again = await api.http.post(path, json=body, headers=KEY)
    other = await api.http.post(path, json=body, headers={"idempotency-key": "k-2"})

    assert (again.status_code, again.content) == (200, first.content)
    assert (other.status_code, other.json()) == (409, NOT_ACTIVE)
    assert len(api.temporal.signals) == 1


@pytest.mark.parametrize("length", [0, 256])
async def test_a_key_has_1_to_255_characters(api: Api, length: int) -> None:
    answer = await api.http.post(URL, json={"message": "x"}, headers={"idempotency-key": "k" * length})

    assert answer.status_code == 400
    assert answer.json() == {"error": "Expected the Idempotency-Key header to have 1 to 255 characters.", "ok": False}


# --- agents -----------------------------------------------------------------------------------------------------


async def test_the_bare_prefix_starts_the_default_agent(api: Api) -> None:
    await api.create()
    await api.create(prefix="/agents/clerk")

    assert [started["state"]["agent"] for started in api.temporal.started] == ["concierge", "clerk"]


@pytest.mark.parametrize(("prefix", "status"), [("", 200), ("/agents/clerk", 200), ("/agents/concierge", 404)])
async def test_a_session_lives_under_its_own_agent_and_the_bare_prefix(api: Api, prefix: str, status: int) -> None:
    created = await api.create(prefix="/agents/clerk")
    body = {"continuationToken": created["continuationToken"], "message": "more"}

    answer = await api.http.post(f"{prefix}{URL}/{created['sessionId']}", json=body)

    assert answer.status_code == status


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "health"), ("GET", "info"), ("POST", "session"), ("POST", "session/x"), ("GET", "session/x/stream")],
)
async def test_an_unknown_agent_is_404_everywhere(api: Api, method: str, path: str) -> None:
    answer = await api.http.request(method, f"/agents/nobody/eve/v1/{path}")

    assert answer.status_code == 404
    assert answer.json()["code"] == "agent_not_found"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/eve/v1/nothing"), ("GET", "/eve/v1/session"), ("DELETE", "/v1/sessions"), ("POST", "/eve/v1/session/")],
)
async def test_an_unmatched_route_or_method_is_404_in_json(api: Api, method: str, path: str) -> None:
    answer = await api.http.request(method, f"{path}?a=b")

    message = f"Cannot find any route matching [{method}] {path}?a=b"
    assert (answer.status_code, answer.json()) == (404, {"error": True, "message": message, "status": 404})


async def test_no_other_origin_is_let_in(api: Api) -> None:
    answer = await api.http.get("/eve/v1/health", headers={"origin": "https://elsewhere.example"})

    assert not [name for name in answer.headers if name.startswith("access-control")]


def nested(depth: int) -> bytes:
    return b'{"message":' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize("depth", [1000, 90_000])
async def test_deep_nesting_is_a_bad_request(api: Api, depth: int) -> None:
    answer = await api.http.post(URL, content=nested(depth))

    assert answer.status_code == 400


@pytest.mark.parametrize("field", ["outputSchema", "clientContext"])
async def test_a_deep_object_is_refused_before_anything_breaks_on_it(api: Api, field: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}

    answer = await api.http.post(
        URL, content=orjson.dumps({"message": "x"})[:-1] + b',"%s":' % field.encode() + dump(deep) + b"}"
    )

    assert answer.status_code == 400
    assert answer.json()["error"] == f"Expected '{field}' to be a JSON-serializable object."


def dump(value: dict[str, Any]) -> bytes:
    return b'{"a":' * 300 + b"{}" + b"}" * 300 if value else b"{}"


@pytest.mark.parametrize("text", [r"\u0000", r"a\u0000b", r"\\u0000", r"\ud83d\ude00", "\x7f"])
async def test_odd_characters_are_taken(api: Api, text: str) -> None:
    answer = await api.http.post(URL, content=b'{"message":"%s","clientContext":"%s"}' % (text.encode(), text.encode()))

    assert answer.status_code == 202
    (delivery,) = await api.store.deliveries(answer.json()["sessionId"], [answer.json()["deliveryId"]])
    assert delivery.body is not None
    assert delivery.body["message"] == orjson.loads(f'"{text}"')


async def test_a_deadline_that_no_date_can_show_hides_no_session(api: Api) -> None:
    """An older build has stored it."""
    session_id = (await api.create())["sessionId"]
    row = await api.store.session(session_id)
    assert row is not None

    shown = summary(replace(row, bounds=Bounds(deadline=253_402_329_600.0)), Waits())

    assert shown["deadline"] == "9999-12-31T23:59:59.000Z"
