"""What a deployment does not show to readers: alike in every form, for old events, and beside APIs that show all."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import Invalid
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.stream_policy import EXCLUDABLE, REDACTABLE, stream_policy
from perdure.settings import Settings
from tests.api.served import Api, of_turn, serving, step, text_delta
from tests.api.test_events import indices, listed, ndjson, sse

AGENT = "/agents/concierge/42"
PIECES = "message.appended, reasoning.appended,action.input.appended"
CONTENT = ("reasoning.completed", "actions.requested", "action.result", "subagent.completed")
SECRETS = ("secret thought", "secret argument", "secret outcome", "secret piece")


def turn(turn: int, submission: str) -> list[NewEvent]:
    """A turn with all kinds of content: 14 events."""
    call: dict[str, Any] = {"callId": f"call_{turn}", "toolName": "weather"}
    ended = {"kind": "tool-result", **call, "output": {"note": "secret outcome"}, "isError": True}
    return [
        of_turn(turn, "started", EventType.TURN_STARTED).model_copy(update={"delivery_ids": (submission,)}),
        step(turn, 0, "started", EventType.STEP_STARTED),
        step(turn, 0, "g1/1", EventType.REASONING_APPENDED, reasoningDelta="secret "),
        step(turn, 0, "g1/2", EventType.REASONING_APPENDED, reasoningDelta="thought"),
        text_delta(turn, 0, 1, "Hel"),
        text_delta(turn, 0, 2, "lo"),
        step(turn, 0, "g1/5", EventType.ACTION_INPUT_APPENDED, **call, inputTextDelta="secret piece"),
        step(turn, 0, "reasoning", EventType.REASONING_COMPLETED, reasoning="secret thought"),
        step(turn, 0, "message", EventType.MESSAGE_COMPLETED, message="Hello", finishReason="tool-calls"),
        step(turn, 0, "actions", EventType.ACTIONS_REQUESTED, actions=[{**call, "input": {"x": "secret argument"}}]),
        step(
            turn,
            0,
            names.outcome_key(call["callId"]),
            EventType.ACTION_RESULT,
            result=ended,
            status="failed",
            error={"code": "ACTION_RESULT_FAILED", "message": "secret outcome"},
        ),
        step(turn, 0, "completed", EventType.STEP_COMPLETED, finishReason="stop"),
        of_turn(turn, "completed", EventType.TURN_COMPLETED),
        NewEvent(type=EventType.SESSION_WAITING, key=names.turn_key(turn, "boundary"), data={"wait": "x"}, turn=turn),
    ]


EVENTS = 14


async def prompted(api: Api, turns: int = 1) -> str:
    answer = await api.http.post(AGENT, json={"message": "hello"})
    session_id = api.temporal.started[0]["id"]
    for number in range(turns):
        await api.emit(session_id, *turn(number, answer.json()["submissionId"]))
    return session_id


async def frames_of(api: Api, session_id: str, count: int) -> list[tuple[str | None, str | None]]:
    """The frames up to the one that ends with this index."""
    async with sse(api, session_id) as frames:
        read = [await frames.next()]
        while read[-1].id != str(count - 1):
            read.append(await frames.next())
    return [(frame.id, frame.event) for frame in read[1:]]


@asynccontextmanager
async def with_policy(directory: Path, exclude: str = "", redact: Sequence[str] = ()) -> AsyncGenerator[Api]:
    async with serving(directory, stream_exclude=exclude, stream_redact=",".join(redact)) as api:
        yield api


async def test_what_is_left_out_is_in_no_form_and_moves_no_index(tmp_path: Path) -> None:
    async with with_policy(tmp_path, PIECES) as api:
        session_id = await prompted(api)

        lines = await ndjson(api, session_id)
        page = await listed(api, session_id)
        frames = await frames_of(api, session_id, EVENTS)
        durable = await api.http.get(AGENT)

    # Clients of NDJSON count the lines.
    assert indices(lines) == list(range(EVENTS))
    gone = [line for line in lines if line["type"] == "event.excluded"]
    assert indices(gone) == [2, 3, 4, 5, 6]
    assert all("data" not in line for line in gone)
    assert page == [line for line in lines if line not in gone]
    assert [int(id) for id, event in frames if id and event] == indices(page)
    assert not any((event or "").endswith((".appended", ".excluded")) for _, event in frames)
    assert durable.headers["stream-next-offset"] == f"0000000000000000_{EVENTS:016d}"
    shown = [element["type"] for element in durable.json()]
    assert not {"text_delta", "thinking_delta"} & set(shown)
    assert {"message_end", "thinking_end", "tool"} <= set(shown)


async def test_a_redacted_event_stays_without_its_content_in_every_form(tmp_path: Path) -> None:
    async with with_policy(tmp_path, redact=REDACTABLE) as api:
        session_id = await prompted(api)

        lines = await ndjson(api, session_id)
        texts = [
            (await api.http.get(f"/eve/v1/session/{session_id}/stream", params={"follow": "false"})).text,
            (await api.http.get(f"/eve/v1/session/{session_id}/stream?follow=false&startIndex=5")).text,
            (await api.http.get(f"/v1/sessions/{session_id}/events")).text,
            (await api.http.get(f"/v1/sessions/{session_id}/events?after=2&order=desc")).text,
            (await api.http.get(f"/v1/sessions/{session_id}/transcript?format=events")).text,
            (await api.http.get(AGENT)).text,
            (await api.http.get(AGENT, params={"view": "updates", "offset": "-1"})).text,
        ]
        async with sse(api, session_id) as frames:
            texts.append(str([(await frames.next()).data for _ in range(EVENTS)]))

    assert all("Hello" in text for text in texts)
    assert not [secret for secret in SECRETS for text in texts if secret in text]
    shown = {line["type"]: line["data"] for line in lines}
    assert (shown["reasoning.appended"]["reasoningDelta"], shown["reasoning.appended"]["reasoningSoFar"]) == ("", "")
    assert (shown["message.appended"]["messageDelta"], shown["message.appended"]["messageSoFar"]) == ("", "")
    assert shown["action.input.appended"]["inputTextDelta"] == ""
    assert shown["reasoning.completed"]["reasoning"] == "[redacted]"
    assert shown["actions.requested"]["actions"][0]["input"] == {"redacted": True}
    result = shown["action.result"]
    assert (result["result"]["output"], result["result"]["callId"]) == ("[redacted]", "call_0")
    assert result["error"] == {"code": "ACTION_RESULT_FAILED", "message": "[redacted]"}


async def test_the_updates_of_a_conversation_have_the_text_without_its_pieces(tmp_path: Path) -> None:
    async with with_policy(tmp_path, PIECES) as api:
        await prompted(api)

        changes = (await api.http.get(AGENT, params={"view": "updates", "offset": "-1"})).json()

    assert "message-delta" not in [change["type"] for change in changes]
    assert parts(changes) == [("reasoning", "secret thought"), ("text", "Hello")]


def parts(changes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What a client that applies the changes has of the first reply."""
    assembled: list[tuple[str, str]] = []
    for change in changes:
        match change["type"]:
            case "message-delta" if assembled and assembled[-1][0] == change["kind"]:
                assembled[-1] = (change["kind"], assembled[-1][1] + change["delta"])
            case "message-delta":
                assembled.append((change["kind"], change["delta"]))
            case "message-appended" if change["message"]["role"] == "assistant":
                assembled = [(part["type"], part["text"]) for part in change["message"]["parts"]]
            case _:
                pass
    return assembled


@pytest.mark.parametrize("hides_first", [True, False])
async def test_a_reader_of_two_apis_with_different_policies_gets_all_once(tmp_path: Path, hides_first: bool) -> None:
    # Two APIs over one store; each read goes to the other one, as through a balancer.
    async with with_policy(tmp_path, PIECES) as hiding, with_policy(tmp_path) as showing:
        session_id = await prompted(showing, turns=2)
        apis = [hiding, showing] if hides_first else [showing, hiding]

        lines: list[dict[str, Any]] = []
        while len(lines) < 2 * EVENTS:
            api = apis[len(lines) % 2]
            async with api.stream(session_id, len(lines)) as reading:
                lines.append(await reading.event())
        changes: list[dict[str, Any]] = []
        offset = "-1"
        for number in range(EVENTS):
            read = await apis[number % 2].http.get(AGENT, params={"view": "updates", "offset": offset})
            offset = f"0000000000000000_{number + 1:016d}"
            changes += [each for each in read.json() if each["position"]["batch"] == number]

    assert indices(lines) == list(range(2 * EVENTS))
    assert parts(changes) == [("reasoning", "secret thought"), ("text", "Hello")]


async def test_a_policy_holds_for_old_events_and_can_be_taken_back(tmp_path: Path) -> None:
    async with with_policy(tmp_path) as api:
        session_id = await prompted(api)
        whole = await ndjson(api, session_id)

    async with with_policy(tmp_path, PIECES, CONTENT) as api:
        hidden = (await api.http.get(f"/eve/v1/session/{session_id}/stream?follow=false")).text
    async with with_policy(tmp_path) as api:
        again = await ndjson(api, session_id)

    assert not [secret for secret in SECRETS if secret in hidden]
    assert again == whole


async def test_caches_do_not_take_a_page_of_another_policy_for_this_one(tmp_path: Path) -> None:
    async with with_policy(tmp_path) as showing, with_policy(tmp_path, PIECES) as hiding:
        await prompted(showing)
        tag = (await showing.http.get(AGENT)).headers["etag"]

        answers = [await api.http.get(AGENT, headers={"if-none-match": tag}) for api in (showing, hiding)]

    assert [answer.status_code for answer in answers] == [304, 200]


@pytest.mark.parametrize("type", sorted(value for name, value in vars(EventType).items() if name.isupper()))
def test_only_what_clients_can_do_without_may_be_hidden(type: str) -> None:
    for name, allowed in (("stream_exclude", EXCLUDABLE), ("stream_redact", REDACTABLE)):
        if type not in allowed:
            with pytest.raises(Invalid, match=rf"^PERDURE_{name.upper()}: '{type}' has to be shown as it is"):
                _ = Settings.model_validate({name: type}).stream_policy


@pytest.mark.parametrize(
    ("exclude", "redact", "problem"),
    [
        ("reasoning.completed", "", "'reasoning.appended' shows the content of 'reasoning.completed'"),
        ("", "actions.requested", "'action.input.appended' shows the content of 'actions.requested'"),
        ("", "action.result", "'subagent.completed' shows the content of 'action.result'"),
        ("reasoning.completed", "reasoning.appended", "'reasoning.completed' is left out only with"),
        ("message.append", "", "'message.append' has to be shown as it is"),
    ],
)
def test_what_would_be_shown_elsewhere_is_not_half_hidden(exclude: str, redact: str, problem: str) -> None:
    with pytest.raises(Invalid, match=problem):
        _ = Settings(stream_exclude=exclude, stream_redact=redact).stream_policy


def test_nothing_that_only_a_newer_build_knows_of_a_plan_is_shown_where_plans_are_hidden() -> None:
    step = {"stepId": 1, "title": "a", "status": "done", "doneAt": "2026-01-01", "reason": "secret"}
    newer = {"objective": "o", "status": "completed", "summary": "secret", "steps": [step]}

    hidden = stream_policy(
        (), ("plan.updated", "actions.requested", "action.result", "subagent.completed", "action.input.appended")
    )

    shown = {"stepId": 1, "title": "[redacted]", "status": "done", "doneAt": "2026-01-01"}
    assert hidden.plan(newer) == {"objective": "[redacted]", "status": "completed", "steps": [shown]}
