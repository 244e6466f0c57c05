"""Requests as their responders see them, also in sessions of other owners."""

import asyncio
from typing import Any

import pytest
from httpx2 import Response

from perdure.protocol.inputs import Option, Responders, digest
from tests.api.asking import APPROVE, COLOURS, DENY, PAYMENT, known_as, outcome, to, waiting
from tests.api.served import Api
from tests.api.test_answers import PAST

BOB, EVE = known_as("bob"), known_as("eve")
CFO = known_as("carol", role="finance")
FINANCE = Responders(kind="attribute", attribute="role", values=("finance",))
FUTURE = "2999-01-01T00:00:00.000Z"

NOT_FOUND = {"code": "input_not_found", "error": "There is no such request to answer.", "ok": False}


async def listed(api: Api, headers: dict[str, str] | None = None, **params: Any) -> list[str]:
    answer = await api.http.get("/v1/inputs", params=params, headers=headers)
    assert answer.status_code == 200, answer.text
    return [each["requestId"] for each in answer.json()["inputs"]]


async def post(api: Api, request_id: str, body: Any, headers: dict[str, str] | None = None) -> Response:
    return await api.http.post(f"/v1/inputs/{request_id}", json=body, headers=headers)


# --- looking ----------------------------------------------------------------------------------------------------


async def test_a_request_shows_all_that_its_responder_needs(people: Api) -> None:
    session = await waiting(
        people, "r", responders=FINANCE, summary="3 coins to bob", expires_at=FUTURE, on_expiry="fail"
    )

    shown = (await people.http.get("/v1/inputs/r", headers=CFO)).json()

    assert shown == {
        "requestId": "r",
        "sessionId": session.id,
        "agent": "bursar",
        "kind": "approval",
        "status": "open",
        "tool": "pay",
        "callId": "call-r",
        "prompt": "Approve tool call: pay",
        "summary": "3 coins to bob",
        "arguments": PAYMENT,
        "display": "confirmation",
        "allowFreeform": False,
        "options": [{"id": "approve", "label": "Yes"}, {"id": "deny", "label": "No"}],
        "responders": {"kind": "attribute", "attribute": "role", "values": ["finance"], "quorum": 1},
        "votes": 0,
        "openedAt": (await session.row("r")).opened_at,
        "expiresAt": FUTURE,
        "onExpiry": "fail",
        "closedAt": None,
    }
    assert (await people.http.get("/v1/inputs", headers=CFO)).json() == {"inputs": [shown]}


async def test_a_closed_request_shows_its_answer(people: Api) -> None:
    session = await waiting(people, "r")
    await session.respond(to("r", APPROVE, arguments={"amount": 1}, reason="half"))

    shown = (await people.http.get("/v1/inputs/r")).json()

    assert (shown["status"], shown["votes"]) == ("answered", 1)
    assert shown["closedAt"] is not None
    assert shown["answer"] == {
        "optionId": "approve",
        "arguments": {"amount": 1, "to": "ada"},
        "digest": digest({"amount": 1, "to": "ada"}),
        "reason": "half",
        "principalId": "ada",
        "at": shown["answer"]["at"],
    }


async def test_each_sees_what_they_may_answer_and_what_is_asked_in_their_sessions(people: Api) -> None:
    await waiting(people, "for-ada")
    await waiting(people, "for-finance", responders=FINANCE)
    await waiting(people, "for-bob", responders=Responders(kind="principals", values=("bob",)))
    await waiting(people, "for-all", responders=Responders(kind="anyone"))

    assert await listed(people) == ["for-ada", "for-finance", "for-bob", "for-all"]
    assert await listed(people, BOB) == ["for-bob", "for-all"]
    assert await listed(people, CFO) == ["for-finance", "for-all"]
    assert await listed(people, EVE) == ["for-all"]


async def test_requests_can_be_filtered(people: Api) -> None:
    first = await waiting(people, "r1", "r2")
    await waiting(people, "q", kind="question", options=COLOURS, agent="hasty")
    await first.respond(to("r1", APPROVE))

    assert await listed(people) == ["r2", "q"]
    assert await listed(people, status="answered") == ["r1"]
    assert await listed(people, kind="question") == ["q"]
    assert await listed(people, agent="hasty") == ["q"]
    assert await listed(people, sessionId=first.id) == ["r2"]


@pytest.mark.parametrize("field", ["status", "kind", "limit", "cursor", "agent"])
async def test_a_filter_that_means_nothing_is_refused(people: Api, field: str) -> None:
    answer = await people.http.get("/v1/inputs", params={field: "\u0007"})

    assert answer.status_code == 400


async def test_pages_hold_while_requests_of_others_come_between(people: Api) -> None:
    for number in range(7):
        kind = "anyone" if number % 2 == 0 else "requester"
        await waiting(people, f"r{number}", responders=Responders(kind=kind))
    pages: list[list[str]] = []
    cursor: str | None = None
    while True:
        params = {"limit": "2", **({"cursor": cursor} if cursor else {})}
        page = (await people.http.get("/v1/inputs", params=params, headers=BOB)).json()
        pages.append([each["requestId"] for each in page["inputs"]])
        if (cursor := page.get("nextCursor")) is None:
            break

    assert [each for page in pages for each in page] == ["r0", "r2", "r4", "r6"]
    assert all(len(page) <= 2 for page in pages)


@pytest.mark.parametrize("request_id", ["nothing", "r", "%C3%A9", "%00"])
async def test_what_a_caller_may_not_see_does_not_exist(people: Api, request_id: str) -> None:
    session = await waiting(people, "r")

    seen = await people.http.get(f"/v1/inputs/{request_id}", headers=EVE)
    answered = await people.http.post(f"/v1/inputs/{request_id}", json=APPROVE, headers=EVE)

    assert (seen.status_code, seen.json()) == (404, NOT_FOUND)
    assert (answered.status_code, answered.json()) == (404, NOT_FOUND)
    assert (await session.row("r")).status == "open"


async def test_callers_without_credentials_get_401(people: Api) -> None:
    del people.http.headers["x-who"]

    answers = [
        await people.http.get("/v1/inputs"),
        await people.http.get("/v1/inputs/r"),
        await people.http.post("/v1/inputs/r", json={}),
    ]

    assert [answer.status_code for answer in answers] == [401, 401, 401]


# --- answering --------------------------------------------------------------------------------------------------


async def test_a_responder_answers_without_owning_the_session(people: Api) -> None:
    session = await waiting(people, "r", responders=FINANCE)

    answer = await post(people, "r", APPROVE, CFO)

    assert answer.status_code == 200
    assert answer.json() == {**outcome("r", "answered", "approve"), "sessionId": session.id}
    row = await session.row("r")
    assert row.answer is not None
    assert (row.answer.principal_id, session.signalled) == ("carol", [("answer", row.delivery_id)])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "Expected an 'optionId' ('approve' or 'deny' for an approval) or a 'text'."),
        ({"reason": "too much"}, "Expected an 'optionId'"),
        ({"option": "approve"}, "Unknown field 'option'; an answer has 'optionId', 'text', 'arguments' and 'reason'."),
        ({"optionId": "approve", "Reason": "fine"}, "Unknown field 'Reason'"),
        ({"optionId": "aprove"}, "Request r is an approval: answer 'approve' or 'deny'."),
        ({"text": "approve"}, "Request r is an approval: answer 'approve' or 'deny'."),
    ],
)
async def test_a_slip_is_no_denial(people: Api, body: Any, problem: str) -> None:
    session = await waiting(people, "r", responders=FINANCE)

    answer = await post(people, "r", body, CFO)

    assert answer.status_code == 400
    assert answer.json()["error"].startswith(problem)
    assert (await session.row("r")).status == "open"


async def test_a_slip_of_a_caller_who_may_not_answer_or_comes_too_late_gets_the_same_as_an_answer(people: Api) -> None:
    session = await waiting(people, "r", responders=FINANCE)

    forbidden = await post(people, "r", {"optionId": "aprove"})
    await post(people, "r", APPROVE, CFO)
    late = await post(people, "r", {"optionId": "aprove"}, CFO)

    assert (forbidden.status_code, late.status_code) == (403, 409)
    assert (await session.row("r")).status == "answered"


async def test_the_owner_of_the_session_sees_but_may_not_answer_what_is_for_others(people: Api) -> None:
    session = await waiting(people, "r", responders=FINANCE)

    answer = await post(people, "r", APPROVE)

    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden_responder")
    assert (await session.row("r")).status == "open"


async def test_the_same_answer_again_is_the_same_answer(people: Api) -> None:
    session = await waiting(people, "r")

    first, again = [await post(people, "r", DENY) for _ in range(2)]

    assert (again.status_code, again.content) == (200, first.content)
    assert len(session.signalled) == 1


async def test_another_answer_gets_the_outcome(people: Api) -> None:
    session = await waiting(people, "r")
    await post(people, "r", DENY)

    answer = await post(people, "r", APPROVE)

    assert answer.status_code == 409
    assert answer.json() == {
        "code": "input_closed",
        "error": "The request is closed with another outcome.",
        "ok": False,
        "optionId": "deny",
        "status": "answered",
    }
    assert len(session.signalled) == 1


async def test_other_arguments_are_another_answer(people: Api) -> None:
    await waiting(people, "r")
    await post(people, "r", APPROVE)

    answer = await post(people, "r", {**APPROVE, "arguments": {"amount": 1000}})

    assert (answer.status_code, answer.json()["code"]) == (409, "input_closed")


async def test_of_approve_and_deny_at_once_one_side_gets_a_conflict(people: Api) -> None:
    session = await waiting(people, "r", responders=Responders(kind="anyone"))

    answers = await asyncio.gather(
        *(post(people, "r", APPROVE, BOB) for _ in range(5)), *(post(people, "r", DENY, EVE) for _ in range(5))
    )

    row = await session.row("r")
    assert row.answer is not None
    assert len(session.signalled) == 1
    assert {answer.json()["optionId"] for answer in answers} == {row.answer.option_id}
    approved, denied = {each.status_code for each in answers[:5]}, {each.status_code for each in answers[5:]}
    assert (approved, denied) == (({200}, {409}) if row.answer.approves else ({409}, {200}))


@pytest.mark.parametrize(("how", "code"), [("expire", "input_expired"), ("withdraw", "input_closed")])
async def test_a_late_answer_is_refused(people: Api, how: str, code: str) -> None:
    session = await waiting(people, "r")
    await getattr(session, how)("r")

    answer = await post(people, "r", APPROVE)

    assert (answer.status_code, answer.json()["code"]) == (409, code)
    assert (await session.row("r")).status in ("expired", "withdrawn")


async def test_a_request_counts_as_expired_before_its_expiry_is_recorded(people: Api) -> None:
    await waiting(people, "r", expires_at=PAST)

    answer = await post(people, "r", APPROVE)

    assert (answer.status_code, answer.json()["code"], answer.json()["status"]) == (409, "input_expired", "expired")


@pytest.mark.parametrize(
    "body", [[], "x", {"optionId": 1}, {"text": None}, {"reason": []}, {"optionId": "approve", "arguments": "x"}]
)
async def test_an_answer_of_the_wrong_shape_is_refused(people: Api, body: Any) -> None:
    session = await waiting(people, "q", kind="question", options=[Option(id="a", label="A")])

    answer = await post(people, "q", body)

    assert answer.status_code == 400
    assert (await session.row("q")).status == "open"


async def test_text_is_limited_as_in_a_message(people: Api) -> None:
    await waiting(people, "q", kind="question")

    answer = await post(people, "q", {"text": "x" * 1_100_000})

    assert answer.status_code == 413


async def test_a_repeated_answer_with_a_key_gets_the_same_bytes(people: Api) -> None:
    session = await waiting(people, "r")
    key = known_as("ada", key="k")

    first, again = [await post(people, "r", APPROVE, key) for _ in range(2)]

    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    assert "idempotency-replayed" not in first.headers
    assert len(session.signalled) == 1


# --- several people ---------------------------------------------------------------------------------------------


async def test_as_many_must_agree_as_the_quorum_requires(people: Api) -> None:
    session = await waiting(people, "r", responders=Responders(kind="anyone", quorum=2))

    first = await post(people, "r", APPROVE, BOB)
    again = await post(people, "r", APPROVE, BOB)
    votes = (await people.http.get("/v1/inputs/r")).json()["votes"]
    second = await post(people, "r", APPROVE, EVE)

    assert [each.json()["status"] for each in (first, again, second)] == ["open", "open", "answered"]
    assert votes == 1
    assert [kind for kind, _ in session.signalled] == ["answer"]


async def test_one_denial_is_enough(people: Api) -> None:
    session = await waiting(people, "r", responders=Responders(kind="anyone", quorum=3))
    await post(people, "r", APPROVE, BOB)

    answer = await post(people, "r", DENY, EVE)

    assert answer.json() == {**outcome("r", "answered", "deny"), "sessionId": session.id}


@pytest.mark.parametrize(("vote", "option"), [(APPROVE, "approve"), (DENY, "deny")])
async def test_a_namesake_has_a_vote_of_its_own(people: Api, vote: dict[str, Any], option: str) -> None:
    session = await waiting(people, "r", responders=Responders(kind="anyone", quorum=2))
    await post(people, "r", APPROVE, {**BOB, "x-by": "api-key"})

    answer = await post(people, "r", vote, BOB)

    assert answer.json() == {**outcome("r", "answered", option), "sessionId": session.id}
    shown = (await people.http.get("/v1/inputs/r")).json()
    assert "owner" not in shown["answer"]
    assert "owner" not in str((await session.resolved())[0].data)


async def test_a_quorum_is_of_one_and_the_same_answer(people: Api) -> None:
    session = await waiting(people, "r", responders=Responders(kind="anyone", quorum=2))
    await post(people, "r", APPROVE, BOB)

    await post(people, "r", {**APPROVE, "arguments": {"amount": 1000}}, EVE)

    assert (await session.row("r")).status == "open"


async def test_a_racing_quorum_is_one_delivery(people: Api) -> None:
    session = await waiting(people, "r", responders=Responders(kind="anyone", quorum=3))

    await asyncio.gather(*(post(people, "r", APPROVE, known_as(f"voter-{number % 5}")) for number in range(20)))

    row = await session.row("r")
    assert (row.status, len(row.votes)) == ("answered", 3)
    assert session.signalled == [("answer", row.delivery_id)]
