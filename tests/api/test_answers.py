"""Answers from the session's owner: what counts, what does not, and what is delivered to the session."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from perdure.errors import Unavailable
from perdure.protocol.events import NewEvent
from perdure.protocol.inputs import Option, Responders, digest
from perdure.store.inputs import Answered, Answering, InputRow
from tests.api.asking import APPROVE, COLOURS, DENY, PAYMENT, Waiting, outcome, to, waiting
from tests.api.served import URL, Api

PAST = "2020-01-01T00:00:00.000Z"


async def test_an_approval_closes_the_request_and_is_delivered(api: Api) -> None:
    session = await waiting(api, "r")

    answer = await session.respond(to("r", APPROVE))

    body = answer.json()
    assert (answer.status_code, body["ok"], body["inputs"]) == (200, True, [outcome("r", "answered", "approve")])
    assert session.signalled == [("answer", body["deliveryId"])]
    assert (await session.body(body["deliveryId"]))["answers"] == ["r"]
    row = await session.row("r")
    assert row.answer is not None
    assert (row.status, row.answer.approves, row.answer.digest) == ("answered", True, digest(PAYMENT))
    assert (row.answer.principal_id, row.delivery_id) == ("local-dev", body["deliveryId"])


@pytest.mark.parametrize(
    "denial", [DENY, {"optionId": "APPROVE"}, {"optionId": "yes"}, {"text": "approve"}, {}, {"optionId": ""}]
)
async def test_whatever_does_not_approve_denies(api: Api, denial: dict[str, Any]) -> None:
    session = await waiting(api, "r")

    answer = await session.respond(to("r", denial))

    assert answer.json()["inputs"] == [outcome("r", "answered", "deny")]
    row = await session.row("r")
    assert row.answer is not None
    assert not row.answer.approves


@pytest.mark.parametrize("words", [{"text": "too much"}, {"reason": "too much"}])
async def test_a_denial_may_have_a_reason(api: Api, words: dict[str, str]) -> None:
    session = await waiting(api, "r")

    await session.respond(to("r", DENY, **words))

    row = await session.row("r")
    assert row.answer is not None
    assert row.answer.reason == "too much"


@pytest.mark.parametrize(
    ("said", "option", "text"),
    [
        ({"optionId": "b"}, "b", None),
        ({"text": " blue "}, "b", None),
        ({"text": "B"}, "b", None),
        ({"text": "2"}, "b", None),
        ({"text": "mauve"}, None, "mauve"),
        ({"optionId": "r", "text": "a dark one"}, "r", "a dark one"),
    ],
)
async def test_a_question_is_answered_by_option_or_by_text(
    api: Api, said: dict[str, str], option: str | None, text: str | None
) -> None:
    session = await waiting(api, "q", kind="question", options=COLOURS)

    answer = await session.respond(to("q", said))

    assert answer.json()["inputs"] == [outcome("q", "answered", option)]
    row = await session.row("q")
    assert row.answer is not None
    assert (row.answer.option_id, row.answer.text) == (option, text)


async def test_a_text_that_names_two_options_names_none(api: Api) -> None:
    session = await waiting(api, "q", kind="question", options=[Option(id=each, label="Same") for each in "ab"])

    await session.respond(to("q", text="same"))

    row = await session.row("q")
    assert row.answer is not None
    assert (row.answer.option_id, row.answer.text) == (None, "same")


@pytest.mark.parametrize("said", [{"optionId": "green"}, {}, {"optionId": "b", "arguments": {}}])
async def test_an_answer_that_means_nothing_is_refused(api: Api, said: dict[str, Any]) -> None:
    session = await waiting(api, "q", kind="question", options=COLOURS)

    answer = await session.respond(to("q", said))

    assert answer.status_code == 400
    assert (await session.row("q")).status == "open"
    assert session.signalled == []


async def test_several_answers_and_a_message_are_one_delivery(api: Api) -> None:
    session = await waiting(api, "r1", "r2")

    answer = await session.respond(to("r1", APPROVE), to("r2", DENY), message="and hurry", clientContext="page 1")

    body = await session.body(answer.json()["deliveryId"])
    assert answer.json()["inputs"] == [outcome("r1", "answered", "approve"), outcome("r2", "answered", "deny")]
    assert (body["kind"], body["answers"]) == ("answer", ["r1", "r2"])
    assert (body["message"], body["clientContext"]) == ("and hurry", ["page 1"])
    assert len(session.signalled) == 1


async def test_what_an_answer_omits_stays_open(api: Api) -> None:
    session = await waiting(api, "r1", "r2", "r3")

    await session.respond(to("r1", APPROVE), to("r3", APPROVE))

    assert [(await session.row(each)).status for each in ("r1", "r2", "r3")] == ["answered", "open", "answered"]


async def test_one_request_cannot_be_answered_twice_at_once(api: Api) -> None:
    session = await waiting(api, "r")

    answer = await session.respond(to("r", APPROVE), to("r", DENY))

    assert (answer.status_code, answer.json()["error"]) == (400, "Expected each request to be answered once.")
    assert (await session.row("r")).status == "open"


async def test_readers_get_one_event(api: Api) -> None:
    session = await waiting(api, "r")

    for _ in range(2):
        await session.respond(to("r", APPROVE))

    (event,) = await session.resolved()
    assert event.data is not None
    assert (event.data["requestId"], event.data["status"]) == ("r", "answered")


# --- changed arguments ------------------------------------------------------------------------------------------


async def test_an_approval_may_change_the_arguments(api: Api) -> None:
    session = await waiting(api, "r")

    await session.respond(to("r", APPROVE, arguments={"amount": 2}))

    row = await session.row("r")
    assert row.answer is not None
    # With the default of what was left out: what is approved is what runs.
    approved = {"amount": 2, "to": "ada"}
    assert (row.answer.arguments, row.answer.digest) == (approved, digest(approved))


async def test_the_same_changed_arguments_again_are_the_same_answer(api: Api) -> None:
    session = await waiting(api, "r")
    await session.respond(to("r", APPROVE, arguments={"amount": 2}))
    before = await session.row("r")

    for again in ({"amount": 2}, {"amount": "2", "to": "ada"}):
        answer = await session.respond(to("r", APPROVE, arguments=again))

        assert answer.json()["inputs"] == [{"requestId": "r", "status": "answered", "optionId": "approve"}]
        assert answer.json()["deliveryId"] == before.delivery_id
    assert await session.row("r") == before


async def test_arguments_in_another_order_are_not_changed(api: Api) -> None:
    session = await waiting(api, "r")

    await session.respond(to("r", APPROVE, arguments={"to": "bob", "amount": 3}))

    row = await session.row("r")
    assert row.answer is not None
    assert (row.answer.arguments, row.answer.digest) == (None, digest(PAYMENT))


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        ({"amount": "much", "whom": "eve"}, ["amount: ", "whom: "]),
        ({}, ["amount: Field required"]),
        ([], ["'arguments' to be a JSON object"]),
        (None, ["'arguments' to be a JSON object"]),
    ],
)
async def test_changed_arguments_must_fit_the_tool(api: Api, arguments: Any, problems: list[str]) -> None:
    session = await waiting(api, "r")

    answer = await session.respond(to("r", APPROVE, arguments=arguments))

    assert answer.status_code == 400
    assert all(problem in answer.json()["error"] for problem in problems)
    assert (await session.row("r")).status == "open"


async def test_a_denial_changes_no_arguments(api: Api) -> None:
    session = await waiting(api, "r")

    answer = await session.respond(to("r", DENY, arguments={"amount": 2}))

    assert answer.status_code == 400
    assert (await session.row("r")).status == "open"


# --- twice, late, unknown ---------------------------------------------------------------------------------------


async def test_fifty_equal_answers_at_once_are_one_delivery(api: Api) -> None:
    session = await waiting(api, "r")

    answers = await asyncio.gather(*(session.respond(to("r", APPROVE)) for _ in range(50)))

    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert len(session.signalled) == 1
    assert len(await session.resolved()) == 1


async def test_of_approve_and_deny_at_once_one_wins_and_both_callers_learn_which(api: Api) -> None:
    session = await waiting(api, "r")

    answers = await asyncio.gather(*(session.respond(to("r", each)) for each in [APPROVE, DENY] * 5))

    row = await session.row("r")
    assert row.answer is not None
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["inputs"][0]["optionId"] for answer in answers} == {row.answer.option_id}
    assert len(await session.resolved()) == 1


async def test_the_same_answer_again_is_no_second_delivery(api: Api) -> None:
    session = await waiting(api, "r")
    first = await session.respond(to("r", APPROVE))

    again = await session.respond(to("r", APPROVE))

    assert (again.status_code, again.content) == (200, first.content)
    assert len(session.signalled) == 1


async def test_another_answer_to_a_closed_request_is_delivered_and_changes_nothing(api: Api) -> None:
    session = await waiting(api, "r")
    await session.respond(to("r", DENY))

    late = await session.respond(to("r", APPROVE))

    assert late.status_code == 200
    assert late.json()["inputs"] == [outcome("r", "answered", "deny")]
    row = await session.row("r")
    assert row.answer is not None
    assert not row.answer.approves
    assert row.delivery_id != late.json()["deliveryId"]
    body = await session.body(late.json()["deliveryId"])
    assert (body["kind"], body["answers"], body["inputResponses"]) == ("answer", ["r"], [to("r", APPROVE)])


async def test_an_answer_to_an_unknown_request_is_delivered_and_authorises_nothing(api: Api) -> None:
    session = await waiting(api, "r")

    answer = await session.respond(to("nothing", APPROVE))

    assert answer.json()["inputs"] == [outcome("nothing", "unknown")]
    assert (await session.row("r")).status == "open"
    assert session.signalled == [("answer", answer.json()["deliveryId"])]


async def test_the_request_of_another_session_is_unknown_here(api: Api) -> None:
    mine, other = await waiting(api, "r1"), await waiting(api, "r2")

    answer = await mine.respond(to("r2", APPROVE))

    assert answer.json()["inputs"] == [outcome("r2", "unknown")]
    assert (await other.row("r2")).status == "open"


async def test_a_withdrawn_request_cannot_be_approved(api: Api) -> None:
    session = await waiting(api, "r")
    await session.withdraw("r")

    answer = await session.respond(to("r", APPROVE))

    assert answer.json()["inputs"] == [outcome("r", "withdrawn")]
    assert (await session.row("r")).answer is None


async def test_an_expired_request_cannot_be_answered(api: Api) -> None:
    session = await waiting(api, "r")
    await session.expire("r")

    answer = await session.respond(to("r", APPROVE))

    assert answer.status_code == 409
    assert answer.json() == {
        "code": "input_expired",
        "error": "The time to answer this request is over.",
        "ok": False,
        "optionId": "deny",
        "status": "expired",
    }
    assert session.signalled == []


async def test_a_request_counts_as_expired_before_its_expiry_is_recorded(api: Api) -> None:
    session = await waiting(api, "r", expires_at=PAST)

    answer = await session.respond(to("r", APPROVE))

    assert (answer.status_code, answer.json()["code"]) == (409, "input_expired")
    assert (await session.row("r")).answer is None


async def test_a_message_beside_a_late_answer_is_delivered(api: Api) -> None:
    session = await waiting(api, "late", expires_at=PAST)
    await session.ask("r")

    answer = await session.respond(to("late", APPROVE), to("r", APPROVE), message="go on")

    assert answer.json()["inputs"] == [outcome("late", "expired"), outcome("r", "answered", "approve")]
    assert (await session.row("late")).status == "open"
    assert (await session.body(answer.json()["deliveryId"]))["message"] == "go on"


# --- idempotency and failures -----------------------------------------------------------------------------------

KEY = {"idempotency-key": "k-1"}


async def test_a_repeated_answer_gets_the_same_bytes(api: Api) -> None:
    session = await waiting(api, "r")

    first, again = [await session.respond(to("r", APPROVE), message="go", headers=KEY) for _ in range(2)]

    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert len(session.signalled) == 1


class Losing:
    """Counts an answer, and lets something happen before or after that."""

    def __init__(self, session: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
        self._store = session.api.store
        self._count = self._store.answer
        self.before: Callable[[], Awaitable[object]] | None = None
        self.after: Callable[[], None] | None = None
        monkeypatch.setattr(self._store, "answer", self._answer)

    async def _answer(self, answering: Answering, emit: Callable[[InputRow], NewEvent]) -> Answered:
        if self.before is not None:
            await self.before()
            self.before = None
        answered = await self._count(answering, emit)
        if self.after is not None:
            self.after()
        return answered


@pytest.mark.parametrize("said", [{"inputResponses": [to("r", APPROVE)]}, {"message": "yes"}], ids=["answer", "yes"])
async def test_an_answer_that_loses_a_race_is_the_same_when_it_is_repeated(
    api: Api, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]
) -> None:
    session = await waiting(api, "r")
    Losing(session, monkeypatch).before = lambda: session.withdraw("r")

    first, again = [await session.say(said, KEY) for _ in range(2)]

    assert (first.status_code, first.json()["inputs"]) == (200, [outcome("r", "withdrawn")])
    assert (again.status_code, again.json()["deliveryId"]) == (200, first.json()["deliveryId"])
    assert again.headers["idempotency-replayed"] == "true"
    assert session.signalled == [("answer", first.json()["deliveryId"])]


@pytest.mark.parametrize("headers", [None, KEY], ids=["without a key", "with a key"])
async def test_a_store_that_leaves_once_an_answer_was_counted_makes_no_error_of_it(
    api: Api, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str] | None
) -> None:
    async def away(*_: object) -> None:
        raise Unavailable

    session = await waiting(api, "r")
    first = await session.respond(to("r", APPROVE), headers=headers)

    def leave() -> None:
        for read in ("input", "inputs", "deliveries"):
            monkeypatch.setattr(api.store, read, away)

    Losing(session, monkeypatch).after = leave

    again = await session.respond(to("r", APPROVE), headers=headers)

    assert (again.status_code, again.content) == (200, first.content)


async def test_one_key_for_two_answers_is_a_conflict(api: Api) -> None:
    session = await waiting(api, "r1", "r2")
    await session.respond(to("r1", APPROVE), headers=KEY)

    answer = await session.respond(to("r2", APPROVE), headers=KEY)

    assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_key_reused")
    assert (await session.row("r2")).status == "open"


async def test_an_answer_is_accepted_while_temporal_is_away_and_signalled_later(api: Api) -> None:
    session = await waiting(api, "r")
    api.temporal.failure = RPCError("away", RPCStatusCode.UNAVAILABLE, b"")
    answer = await session.respond(to("r", APPROVE))
    api.temporal.failure = None

    again = await session.respond(to("r", APPROVE))

    assert (answer.status_code, answer.headers["x-perdure-delayed"]) == (200, "true")
    assert (again.content, "x-perdure-delayed" in again.headers) == (answer.content, False)
    # What came before it may not have been signalled either, and goes first.
    assert [kind for kind, _ in session.signalled] == ["message", "answer"]
    assert session.signalled[-1] == ("answer", answer.json()["deliveryId"])


async def test_a_vote_of_several_is_no_delivery(people: Api) -> None:
    session = await waiting(people, "r", responders=Responders(kind="anyone", quorum=2))

    answer = await session.respond(to("r", APPROVE))

    assert answer.status_code == 200
    assert (answer.json()["inputs"], answer.json()["deliveryId"]) == ([outcome("r", "open")], None)
    assert session.signalled == []


async def test_only_responders_may_answer(people: Api) -> None:
    session = await waiting(people, "r", responders=Responders(kind="attribute", attribute="role", values=("finance",)))
    await session.ask("mine")

    answer = await session.respond(to("mine", APPROVE), to("r", APPROVE))

    assert answer.status_code == 403
    assert answer.json() == {
        "code": "forbidden_responder",
        "error": "This request is for somebody else to answer; it stays open.",
        "ok": False,
    }
    assert [(await session.row(each)).status for each in ("r", "mine")] == ["open", "open"]
    assert session.signalled == []


async def test_too_many_answers_are_refused(api: Api) -> None:
    session = await waiting(api, "r")

    answer = await session.respond(*(to(f"r{number}", APPROVE) for number in range(201)))

    assert (answer.status_code, answer.json()["error"]) == (400, "Expected at most 200 'inputResponses'.")


async def test_the_token_is_still_needed(api: Api) -> None:
    session = await waiting(api, "r")
    body = {"continuationToken": "eve:forged", "inputResponses": [to("r", APPROVE)]}

    answer = await api.http.post(f"{URL}/{session.id}", json=body)

    assert (answer.status_code, answer.json()["code"]) == (409, "session_not_active")
    assert (await session.row("r")).status == "open"
