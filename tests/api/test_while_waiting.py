"""Plain messages to a session that waits for people."""

import pytest

from perdure.protocol.inputs import Responders
from perdure.session.inputs import CONTINUED
from tests.api.asking import APPROVE, COLOURS, outcome, to, waiting
from tests.api.served import Api
from tests.api.test_answers import PAST


@pytest.mark.parametrize(
    ("message", "option"),
    [("approve", "approve"), (" YES\n", "approve"), ("1", "approve"), ("Deny", "deny"), ("no", "deny"), ("2", "deny")],
)
async def test_a_message_that_names_an_option_is_the_answer(api: Api, message: str, option: str) -> None:
    session = await waiting(api, "r")

    answer = await session.say({"message": message})

    body = await session.body(answer.json()["deliveryId"])
    assert answer.json()["inputs"] == [outcome("r", "answered", option)]
    assert (body["kind"], body["answers"], "message" in body) == ("answer", ["r"], False)


async def test_a_message_in_parts_can_name_an_option(api: Api) -> None:
    session = await waiting(api, "q", kind="question", options=COLOURS)

    answer = await session.say({"message": [{"type": "text", "text": "blue"}]})

    assert answer.json()["inputs"] == [outcome("q", "answered", "b")]


@pytest.mark.parametrize(("options", "freeform"), [((), False), (COLOURS, True)])
async def test_a_question_that_takes_text_is_answered_by_any(api: Api, options: tuple[()], freeform: bool) -> None:
    session = await waiting(api, "q", kind="question", options=options, allow_freeform=freeform)

    await session.say({"message": "a warm grey"})

    row = await session.row("q")
    assert row.answer is not None
    assert row.answer.text == "a warm grey"


@pytest.mark.parametrize("message", ["yes please", "3", "approve it"])
async def test_any_other_message_waits_behind_the_request(api: Api, message: str) -> None:
    session = await waiting(api, "r")

    answer = await session.say({"message": message})

    assert "inputs" not in answer.json()
    assert session.signalled == [("message", answer.json()["deliveryId"])]
    assert (await session.row("r")).status == "open"


async def test_of_two_requests_a_message_answers_neither(api: Api) -> None:
    session = await waiting(api, "r1", "r2")

    await session.say({"message": "yes"})

    assert [kind for kind, _ in session.signalled] == ["message"]
    assert [(await session.row(each)).status for each in ("r1", "r2")] == ["open", "open"]


async def test_a_message_answers_nothing_that_is_for_others_to_answer(people: Api) -> None:
    session = await waiting(people, "r", responders=Responders(kind="principals", values=("bob",)))

    await session.say({"message": "yes"})

    assert [kind for kind, _ in session.signalled] == ["message"]
    assert (await session.row("r")).status == "open"


async def test_a_message_answers_no_expired_request(api: Api) -> None:
    session = await waiting(api, "r", expires_at=PAST)

    await session.say({"message": "yes"})

    assert [kind for kind, _ in session.signalled] == ["message"]
    assert (await session.row("r")).status == "open"


async def test_a_hasty_agent_takes_another_message_for_a_denial(api: Api) -> None:
    session = await waiting(api, "r1", "r2", agent="hasty")

    answer = await session.say({"message": "never mind, what is the time?"})

    body = await session.body(answer.json()["deliveryId"])
    assert answer.json()["inputs"] == [outcome("r1", "answered", "deny"), outcome("r2", "answered", "deny")]
    assert (body["kind"], body["answers"], body["message"]) == ("answer", ["r1", "r2"], "never mind, what is the time?")
    row = await session.row("r1")
    assert row.answer is not None
    assert row.answer.reason == CONTINUED


@pytest.mark.parametrize("said", ["What about my train?", "no"])
async def test_a_hasty_agent_continues_also_when_the_owner_has_voted(api: Api, said: str) -> None:
    session = await waiting(api, "r", agent="hasty", responders=Responders(kind="anyone", quorum=2))
    await session.respond(to("r", APPROVE))
    assert (await session.row("r")).status == "open"

    answer = await session.say({"message": said})

    assert answer.json()["inputs"] == [outcome("r", "answered", "deny")]
    body = await session.body(answer.json()["deliveryId"])
    assert (body["kind"], body["message"]) == ("answer", said)
    row = await session.row("r")
    assert row.answer is not None
    assert (row.status, row.answer.reason) == ("answered", CONTINUED)


async def test_a_yes_after_the_same_vote_is_the_same_vote(api: Api) -> None:
    session = await waiting(api, "r", agent="hasty", responders=Responders(kind="anyone", quorum=2))
    await session.respond(to("r", APPROVE))

    answer = await session.say({"message": "yes"})

    assert answer.json()["inputs"] == [outcome("r", "open")]
    assert len((await session.row("r")).votes) == 1


async def test_a_hasty_agent_denies_no_expired_request(api: Api) -> None:
    session = await waiting(api, "r", agent="hasty", expires_at=PAST)

    answer = await session.say({"message": "hello?"})

    assert session.signalled == [("message", answer.json()["deliveryId"])]
    assert (await session.row("r")).status == "open"


async def test_a_hasty_agent_still_accepts_a_yes(api: Api) -> None:
    session = await waiting(api, "r", agent="hasty")

    answer = await session.say({"message": "yes"})

    assert answer.json()["inputs"] == [outcome("r", "answered", "approve")]


async def test_a_repeated_yes_gets_the_same_bytes_and_answers_nothing_else(api: Api) -> None:
    session = await waiting(api, "r")
    key = {"idempotency-key": "k"}
    first = await session.say({"message": "yes"}, key)
    await session.ask("another")

    again = await session.say({"message": "yes"}, key)

    assert (again.status_code, again.content) == (200, first.content)
    assert (await session.row("another")).status == "open"
