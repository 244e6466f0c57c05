"""What is known of a call that another server does, and the results that it may bring."""

from typing import Any

import pytest

from perdure.session.remote import RemoteState, derive_callback_token, progress, read_depth, reported

STATE = RemoteState(call_id="c", name="away", ends_at=1.0)


def said(text: str) -> dict[str, Any]:
    return {"type": "message.completed", "data": {"message": text}}


STREAMS: list[tuple[list[dict[str, Any]], Any]] = [
    ([said("a"), said("b"), {"type": "session.completed"}], {"output": "b"}),
    (
        [said("a"), {"type": "result.completed", "data": {"result": None}}, {"type": "session.completed"}],
        {"output": None},
    ),
    ([{"type": "session.completed"}], {"output": ""}),
    (
        [{"type": "session.failed", "data": {"code": "X", "message": "no"}}],
        {"error": {"code": "SESSION_FAILED", "message": "no"}},
    ),
    (
        [{"type": "session.failed", "data": 5}],
        {"error": {"code": "SESSION_FAILED", "message": "Remote agent failed."}},
    ),
    ([said("a"), {"type": "session.waiting"}, {"type": 5, "data": []}, {}], None),
]


@pytest.mark.parametrize(("events", "ended"), STREAMS)
def test_the_result_is_read_from_a_stream_in_any_pieces(events: list[dict[str, Any]], ended: Any) -> None:
    at_once, state, last = progress(STATE, events), STATE, None
    for event in events:
        piece = progress(state, [event])
        state, last = piece.state, piece.ended

    assert at_once.ended == last == ended
    assert at_once.state == state
    assert state.next == len(events)


def resulted(value: Any) -> dict[str, Any]:
    return {"type": "result.completed", "data": {"result": value}}


def test_what_few_can_read_is_repaired() -> None:
    half = "half \ud83d of"
    ends = [
        progress(STATE, [said(half), {"type": "session.completed"}]).ended,
        progress(STATE, [resulted({half: [float("nan"), 1e999]}), {"type": "session.completed"}]).ended,
        progress(STATE, [{"type": "session.failed", "data": {"message": half}}]).ended,
    ]

    assert ends == [
        {"output": "half \ufffd of"},
        {"output": {"half \ufffd of": [None, None]}},
        {"error": {"code": "SESSION_FAILED", "message": "half \ufffd of"}},
    ]


@pytest.mark.parametrize("depth", [101, 300, 900])
def test_a_result_that_is_nested_too_deep_is_a_failure(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]

    message = "The other server has sent a result that is nested too deep."

    ended = progress(STATE, [resulted(value)]).ended
    assert ended == {"error": {"code": "REMOTE_AGENT_FAILED", "message": message}}


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ({"kind": "session.completed", "output": {"a": 1}}, {"output": {"a": 1}}),
        ({"kind": "session.completed"}, {"output": ""}),
        ({"kind": "session.failed"}, {"error": {"code": "REMOTE_AGENT_FAILED", "message": "Remote agent failed."}}),
        (
            {"kind": "session.failed", "error": {"code": "SESSION_FAILED", "message": "no"}},
            {"error": {"code": "SESSION_FAILED", "message": "no"}},
        ),
        (
            {"kind": "session.failed", "error": [5]},
            {"error": {"code": "REMOTE_AGENT_FAILED", "message": "Remote agent failed."}},
        ),
    ],
)
def test_a_callback_brings_a_result_with_the_defaults_of_the_contract(body: dict[str, Any], result: Any) -> None:
    assert reported(body) == result


def test_a_long_error_of_another_server_is_cut() -> None:
    error = reported({"kind": "session.failed", "error": {"code": "c" * 10_000, "message": "m" * 10_000}})["error"]

    assert (len(error["code"]), len(error["message"])) == (200, 2_000)


def test_a_call_that_has_ended_keeps_no_content() -> None:
    state = STATE.model_copy(update={"text": "secret", "result": {"value": "secret"}, "session_id": "wrun"})

    assert "secret" not in str(state.after_end())
    assert RemoteState.model_validate(state.after_end()).session_id == "wrun"


def test_tokens_differ_by_call_and_by_secret() -> None:
    places = ("s/0/0/a", "s/0/0/b", "s/0/1/a", "t/0/0/a")
    tokens = {derive_callback_token(secret, place) for secret in (b"x", b"y") for place in places}

    assert len(tokens) == 8


@pytest.mark.parametrize(
    ("text", "depth"), [(None, 0), ("2", 2), ("-1", 0), ("x", 0), ("²", 0), ("9999", 1000), ("9" * 99, 0)]
)
def test_a_depth_is_a_small_number_or_none(text: str | None, depth: int) -> None:
    assert read_depth(text) == depth
