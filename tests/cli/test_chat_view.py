"""What a chat shows of the events of a turn, where no model or worker can be made to emit them."""

import io
import json
from typing import Any

import pytest

from perdure.cli.chat.answers import Edit, Question, Unclear, read_answer
from perdure.cli.chat.screen import Screen, harmless
from perdure.cli.chat.view import TurnView
from perdure.client import Event

AT = "2026-11-20T12:00:00.000Z"


def event(type: str, attempt: int = 1, **data: Any) -> Event:
    coordinates = {"turnId": "turn_0", "stepIndex": 0}
    return Event.of({"type": type, "data": {**coordinates, **data}, "meta": {"at": AT, "attempt": attempt}})


def text(whole: str, attempt: int = 1) -> Event:
    return event("message.appended", attempt, messageDelta="", messageSoFar=whole)


def shown(*events: Event) -> str:
    out = io.StringIO()
    view = TurnView(Screen(out, colour=False))
    for each in events:
        view.show(each)
    return out.getvalue()


SUPERSEDED = event("step.superseded", 2)


def test_the_same_text_again_is_not_shown_again() -> None:
    again = [text("One ", 2), text("One two thr", 2), text("One two three", 2)]

    assert shown(event("step.started"), text("One two th"), SUPERSEDED, *again) == "One two three"


def test_another_text_is_shown_whole_with_a_word_about_the_first() -> None:
    assert shown(event("step.started"), text("One two"), SUPERSEDED, text("Three", 2), text("Three four", 2)) == (
        "One two\nThe reply was interrupted; this is another one:\nThree four"
    )


def test_a_text_that_ends_sooner_the_second_time_is_shown_whole() -> None:
    last = event("message.completed", 2, message="One", finishReason="stop")

    assert shown(event("step.started"), text("One two"), SUPERSEDED, text("One", 2), last) == (
        "One two\nThe reply was interrupted; this is another one:\nOne\n"
    )


def test_a_reply_that_a_later_attempt_goes_on_with_is_one_text() -> None:
    recovered = event("step.recovered", 2)

    assert shown(event("step.started"), text("One tw"), recovered, text("One two", 2)) == "One two"


def test_a_reply_without_pieces_is_shown_when_it_is_complete() -> None:
    assert shown(event("message.completed", message="All of it", finishReason="stop")) == "All of it\n"


def test_calls_side_by_side_have_a_line_each_when_they_end() -> None:
    calls: list[dict[str, Any]] = [{"callId": name, "toolName": name, "input": {}} for name in ("a", "b")]
    ends = [
        event("action.result", result={"callId": name, "toolName": name, "output": name * 2}, status="completed")
        for name in ("a", "b")
    ]

    lines = shown(event("actions.requested", actions=calls), *ends).splitlines()

    assert lines == ["  a {} …", "  b {} …", "  a {}: aa (0.0 s)", "  b {}: bb (0.0 s)"]


@pytest.mark.parametrize(
    "odd",
    [
        event("action.result"),
        event("action.result", result={}, status="failed", error=["x"]),
        event("action.result", result="text", status="failed", error="x"),
        event("action.result", result={"callId": 5, "output": {"deep": [1]}}, status="new"),
        event("actions.requested", actions="none"),
        event("actions.requested", actions=[{}, 5]),
        event("message.appended", messageDelta=None),
        event("input.requested", requests=None, details=5),
        event("step.completed", usage="much"),
        event("turn.failed"),
        Event.read(b"no json"),
        Event.of({"type": "never.heard", "data": None}),
    ],
    ids=lambda odd: odd.type or "unreadable",
)
def test_strange_events_end_no_chat(odd: Event) -> None:
    assert shown(odd, text("Fine")).endswith("Fine")


def test_of_control_characters_only_lines_and_tabs_stay() -> None:
    assert harmless("a\tb\r\nc\x1b[31m\x7f\x9b\u202e\u2028") == "a\tb\nc\\u001b[31m\\u007f\\u009b\\u202e\\u2028"


def test_characters_that_nobody_sees_are_shown() -> None:
    hidden = "pay\u200b\u2063\ufeff\U000e0041 ada"

    assert harmless(hidden) == "pay\\u200b\\u2063\\ufeff\\udb40\\udc41 ada"
    assert json.loads(f'"{harmless(hidden)}"') == hidden


APPROVAL = Question.of(
    {
        "requestId": "inp_1",
        "options": [{"id": "approve", "label": "Yes"}, {"id": "deny", "label": "No"}],
        "action": {"toolName": "pay", "input": {"amount": 5}},
        "details": {"kind": "approval"},
    }
)


@pytest.mark.parametrize(
    "odd",
    [
        {"requestId": "r", "action": "x", "details": "y"},
        {"requestId": "r", "action": {"input": [1, 2]}},
        {"requestId": "r", "options": "abc"},
        {"requestId": "r", "options": [5]},
        {"requestId": "r", "options": 5, "prompt": {"a": 1}},
    ],
)
def test_a_strange_request_ends_no_chat(odd: dict[str, Any]) -> None:
    assert Question.of(odd).lines()


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        *((each, {"optionId": "approve"}) for each in ("1", "yes", " Y ", "approve", "Yes")),
        *((each, {"optionId": "deny"}) for each in ("2", "no", "N", "deny")),
        *(
            (each, {"optionId": "deny", "reason": "too much"})
            for each in ("deny too much", "no, too much", "n:too much")
        ),
        ('edit {"amount": 3}', {"optionId": "approve", "arguments": {"amount": 3}}),
        ("edit {}", {"optionId": "approve", "arguments": {}}),
    ],
)
def test_an_approval_is_read(typed: str, answer: dict[str, Any]) -> None:
    assert read_answer(APPROVAL, typed) == {"requestId": "inp_1", **answer}


@pytest.mark.parametrize(
    "typed",
    ["", "3", "0", "-1", "²", "perhaps", "approve not", "yes but", "no problem", "edit [1]", "edit {", "editor"],
)
def test_what_is_no_answer_to_an_approval_is_neither_approval_nor_denial(typed: str) -> None:
    assert isinstance(read_answer(APPROVAL, typed), Unclear)


def test_editing_without_arguments_asks_for_them() -> None:
    assert read_answer(APPROVAL, "edit") == Edit()


def test_a_question_takes_its_options_and_words_where_it_wants_them() -> None:
    options = [{"id": "r", "label": "Red"}, {"id": "b", "label": "Blue"}]
    closed = Question.of({"requestId": "inp_1", "kind": "question", "options": options})
    free = Question.of({"requestId": "inp_1", "kind": "question", "options": options, "allowFreeform": True})
    words = Question.of({"requestId": "inp_1", "kind": "question"})

    assert read_answer(closed, "2") == read_answer(free, "blue") == {"requestId": "inp_1", "optionId": "b"}
    assert isinstance(read_answer(closed, "green"), Unclear)
    assert read_answer(free, "green") == read_answer(words, "green") == {"requestId": "inp_1", "text": "green"}
    assert isinstance(read_answer(words, "  "), Unclear)
