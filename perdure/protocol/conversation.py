"""Our events as the changes of a conversation that Flue's newer clients apply: a pure function, as `flue`."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from . import names
from .events import Event, EventType, Usage
from .flue import Known, is_withdrawn, model_of, usage_of
from .wire import JsonObject

Change: TypeAlias = JsonObject


def changes(event: Event, known: Known) -> tuple[JsonObject, ...]:
    """What changes in the conversation with this event. A client drops what it has applied, by the position."""
    shown = _CHANGES.get(event.type)
    found = () if shown is None else shown(event, known)
    # The next session of the instance counts its events from 0 again. JavaScript reads integers below 2**53.
    batch = known.session * 2**32 + event.index
    return tuple(
        {**each, "conversationId": known.instance_id, "position": {"batch": batch, "index": index}}
        for index, each in enumerate(found)
    )


def _data(event: Event) -> Mapping[str, Any]:
    return event.data or {}


def _message_id(event: Event, known: Known) -> str:
    """The message of the step: what one call of the model has said."""
    return f"{_turn_id(event, known)}/step_{event.step or 0}"


def _turn_id(event: Event, known: Known) -> str:
    """Sessions of one instance count their turns from 0, and their messages are in one conversation."""
    turn = names.turn_id(event.turn or 0)
    return f"{known.session}/{turn}" if known.session else turn


def _submission(known: Known) -> JsonObject:
    return {"submissionId": known.submissions[0]} if known.submissions else {}


def _text(text: str) -> JsonObject:
    return {"type": "text", "text": text, "state": "done"}


def _reasoning(text: str) -> JsonObject:
    return {"type": "reasoning", "text": text, "state": "done"}


def _received(event: Event, known: Known) -> tuple[Change, ...]:
    named = {"submissionId": event.delivery_ids[0]} if event.delivery_ids else {}
    message = {
        "id": f"{_turn_id(event, known)}/{event.index}",
        "role": "user",
        **named,
        "parts": [_text(_data(event).get("message", ""))],
        "metadata": {"timestamp": event.at},
    }
    return ({"type": "message-appended", "message": message},)


def _started(event: Event, known: Known) -> tuple[Change, ...]:
    return (
        {
            "type": "message-started",
            "messageId": _message_id(event, known),
            **_submission(known),
            "timestamp": event.at,
        },
    )


def _text_delta(event: Event, known: Known) -> tuple[Change, ...]:
    return (_delta(event, known, "text", _data(event).get("messageDelta", "")),)


def _reasoning_delta(event: Event, known: Known) -> tuple[Change, ...]:
    return (_delta(event, known, "reasoning", _data(event).get("reasoningDelta", "")),)


def _delta(event: Event, known: Known, kind: str, text: str) -> Change:
    return {"type": "message-delta", "messageId": _message_id(event, known), "kind": kind, "delta": text}


def _superseded(event: Event, known: Known) -> tuple[Change, ...]:
    # What the attempts before have streamed of the message comes again.
    return (_whole(event, known, ()),)


def _thought(event: Event, known: Known) -> tuple[Change, ...]:
    return (_whole(event, known, (_reasoning(_data(event).get("reasoning", "")),)),)


def _said(event: Event, known: Known) -> tuple[Change, ...]:
    reasoning = () if known.reasoning is None else (_reasoning(known.reasoning),)
    return (_whole(event, known, (*reasoning, _text(_data(event).get("message", "")))),)


def _whole(event: Event, known: Known, parts: tuple[JsonObject, ...]) -> Change:
    """The message takes the place of what its deltas have made: they may have been of several attempts, or be gone."""
    metadata = {} if known.step_at is None else {"metadata": {"timestamp": known.step_at}}
    about = {"id": _message_id(event, known), "role": "assistant", **_submission(known), "parts": list(parts)}
    return {"type": "message-appended", "message": {**about, **metadata}}


def _calls(event: Event, known: Known) -> tuple[Change, ...]:
    return tuple(
        {
            "type": "tool-input",
            "messageId": _message_id(event, known),
            "toolCallId": each.get("callId"),
            "toolName": each.get("toolName") or each.get("name"),
            "input": each.get("input"),
        }
        for each in _data(event).get("actions", ())
    )


def _result(event: Event, known: Known) -> tuple[Change, ...]:
    data = _data(event)
    result: Mapping[str, Any] = data.get("result") or {}
    if not result.get("isError"):
        return ({"type": "tool-output", "toolCallId": result.get("callId"), "output": result.get("output")},)
    error: Mapping[str, Any] = data.get("error") or {}
    text = str(error.get("message") or result.get("output"))
    return ({"type": "tool-output-error", "toolCallId": result.get("callId"), "errorText": text},)


def _completed(event: Event, known: Known) -> tuple[Change, ...]:
    usage = _data(event).get("usage")
    used = {} if usage is None else {"usage": usage_of(Usage.model_validate(usage))}
    return ({"type": "message-completed", "messageId": _message_id(event, known), **used},)


def _settled(event: Event, known: Known) -> tuple[Change, ...]:
    match event.type:
        case EventType.TURN_COMPLETED:
            model = {} if known.model is None else {"model": model_of(known.model)}
            end: Change = {"outcome": "completed", "result": {"text": known.text or "", **model}}
        case EventType.TURN_CANCELLED:
            end = {"outcome": "aborted"}
        case _:
            end = {"outcome": "failed", "error": _error(event)}
    return tuple({"type": "submission-settled", "submissionId": each, **end} for each in known.settles)


def _refused(event: Event, known: Known) -> tuple[Change, ...]:
    submission = _data(event).get("deliveryId")
    outcome = {"outcome": "aborted"} if is_withdrawn(event) else {"outcome": "failed", "error": _error(event)}
    return ({"type": "submission-settled", "submissionId": submission, **outcome},)


def _error(event: Event) -> JsonObject:
    return {"name": _data(event).get("code", "Error"), "message": _data(event).get("message", "")}


_CHANGES: Mapping[str, Callable[[Event, Known], tuple[Change, ...]]] = {
    EventType.MESSAGE_RECEIVED: _received,
    EventType.STEP_STARTED: _started,
    EventType.MESSAGE_APPENDED: _text_delta,
    EventType.REASONING_APPENDED: _reasoning_delta,
    EventType.REASONING_COMPLETED: _thought,
    EventType.MESSAGE_COMPLETED: _said,
    EventType.STEP_SUPERSEDED: _superseded,
    EventType.ACTIONS_REQUESTED: _calls,
    EventType.ACTION_RESULT: _result,
    EventType.STEP_COMPLETED: _completed,
    EventType.TURN_COMPLETED: _settled,
    EventType.TURN_FAILED: _settled,
    EventType.TURN_CANCELLED: _settled,
    EventType.DELIVERY_REFUSED: _refused,
}
