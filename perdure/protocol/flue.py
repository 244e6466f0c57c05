"""Our events in the words of Flue: a pure function from one event to the events that its readers expect instead.

An event keeps its index. One that has no counterpart there is shown as none, and its index is passed over.
Requests to the model (`turn_request`: instructions, history, tools) are nowhere in our log, and nowhere here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from . import names
from .events import RUN_ENDS, WITHDRAWN, Event, EventType, Usage
from .wire import JsonObject

#: The version of Flue's events that clients accept.
VERSION = 3

_REASONS = {names.BETWEEN_TURNS: "manual", names.BEFORE_STEP: "threshold", names.AFTER_REFUSAL: "overflow"}


@dataclass(frozen=True)
class Known:
    """What an event does not say itself."""

    # Of an agent: the name that the caller has chosen. Of a run: its id.
    instance_id: str | None = None
    run_id: str | None = None
    # Of an agent: the number of the session, among those that the name has had.
    session: int = 0
    # The deliveries that the turn of the event has read.
    submissions: tuple[str, ...] = ()
    # The deliveries that this event settles: also those of turns that had parked before.
    settles: tuple[str, ...] = ()
    started_at: str | None = None
    # When the step of the event began.
    step_at: str | None = None
    model: str | None = None
    # At the end of a message, for those who are shown the whole of it: what the model has thought before.
    reasoning: str | None = None
    # At the end of a turn: what the model has said last.
    text: str | None = None
    # At both ends of a run: `{input, result, startedAt, durationMs}`, which its events do not repeat.
    run: JsonObject | None = None


Body: TypeAlias = JsonObject


def project(event: Event, known: Known) -> tuple[JsonObject, ...]:
    """What readers of Flue's events see instead of this event."""
    shown = _PROJECTIONS.get(event.type)
    return () if shown is None else tuple({**_envelope(event, known), **each} for each in shown(event, known))


def _envelope(event: Event, known: Known) -> JsonObject:
    shared: JsonObject = {"v": VERSION, "eventIndex": event.index, "timestamp": event.at}
    if known.run_id is not None:
        shared["runId"] = known.run_id
    elif known.instance_id is not None:
        shared["instanceId"] = known.instance_id
    if known.submissions:
        shared["submissionId"] = known.submissions[0]
    if event.attempt is not None:
        shared["attempt"] = event.attempt
    if event.turn is not None:
        shared["operationId"] = names.turn_id(event.turn)
    return shared


def usage_of(usage: Usage) -> JsonObject:
    """What Flue shows of usage. Costs are not part of our events, so there are none."""
    return {
        "input": usage.input_tokens,
        "output": usage.output_tokens,
        "cacheRead": usage.cache_read_tokens,
        "cacheWrite": usage.cache_write_tokens,
        "totalTokens": usage.input_tokens + usage.output_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0, "total": 0},
    }


def model_of(model: str) -> JsonObject:
    """`openai:gpt` as its provider and its id there."""
    provider, colon, name = model.partition(":")
    return {"provider": provider, "id": name} if colon else {"provider": "", "id": model}


def _data(event: Event) -> Mapping[str, Any]:
    return event.data or {}


def _turn(event: Event) -> str:
    """What Flue calls a turn: one call of the model."""
    return f"{names.turn_id(event.turn or 0)}/step_{event.step or 0}"


def _duration(since: str | None, event: Event) -> JsonObject:
    if since is None:
        return {}
    passed = datetime.fromisoformat(event.at) - datetime.fromisoformat(since)
    return {"durationMs": max(0, round(passed.total_seconds() * 1000))}


#: Codes of failed turns for which Flue has names of its own.
_TYPES = {
    "STEP_TIMEOUT": "submission_retry_exhausted",
    "STEP_KILLS_WORKERS": "submission_retry_exhausted",
    "TURN_DEADLINE_EXCEEDED": "submission_timeout",
    "TURN_TERMINATED": "submission_interrupted",
    "TURN_FAILED": "submission_interrupted",
}


def _error(event: Event) -> JsonObject:
    data = _data(event)
    code = data.get("code", "Error")
    error = {"name": code, "type": _TYPES.get(code, data.get("code", "error")), "message": data.get("message", "")}
    if error["type"] == "submission_interrupted":
        # It ended from outside, after the submission was read.
        error["meta"] = {"phase": "after_input_application"}
    return error


# --- turns --------------------------------------------------------------------------------------------------


def _turn_started(event: Event, known: Known) -> tuple[Body, ...]:
    return {"type": "operation_start", "operationKind": "prompt"}, {"type": "agent_start"}


def _ended(event: Event, known: Known, outcome: str) -> tuple[Body, ...]:
    """The end of an operation, and the settlement of what it was for."""
    failed = outcome != "completed"
    error = {"error": _error(event)} if outcome == "failed" else {}
    operation: Body = {
        "type": "operation",
        "operationKind": "prompt",
        "isError": failed,
        **error,
        **_duration(known.started_at, event),
    }
    settled: list[Body] = [
        {"type": "submission_settled", "submissionId": each, "outcome": outcome, **error} for each in known.settles
    ]
    return (operation, {"type": "idle"}, *settled)


def _turn_completed(event: Event, known: Known) -> tuple[Body, ...]:
    return _ended(event, known, "completed")


def _turn_failed(event: Event, known: Known) -> tuple[Body, ...]:
    return _ended(event, known, "failed")


def _turn_cancelled(event: Event, known: Known) -> tuple[Body, ...]:
    return _ended(event, known, "aborted")


def _delivery_refused(event: Event, known: Known) -> tuple[Body, ...]:
    submission = _data(event).get("deliveryId")
    outcome = {"outcome": "aborted"} if is_withdrawn(event) else {"outcome": "failed", "error": _error(event)}
    return ({"type": "submission_settled", "submissionId": submission, **outcome},)


def is_withdrawn(event: Event) -> bool:
    """Whether the sender of a refused delivery has taken it back."""
    return _data(event).get("code") == WITHDRAWN


def _message_received(event: Event, known: Known) -> tuple[Body, ...]:
    message = {"role": "user", "content": _data(event).get("message", "")}
    named = {"submissionId": event.delivery_ids[0]} if event.delivery_ids else {}
    about: Body = {"message": message, "turnId": _turn(event), **named}
    return {"type": "message_start", **about}, {"type": "message_end", **about}


# --- steps --------------------------------------------------------------------------------------------------


def _step_started(event: Event, known: Known) -> tuple[Body, ...]:
    message: Body = {"role": "assistant", "content": []}
    return (
        {"type": "turn_start", "turnId": _turn(event), "purpose": "agent"},
        {"type": "message_start", "turnId": _turn(event), "message": message},
    )


def _text_delta(event: Event, known: Known) -> tuple[Body, ...]:
    return ({"type": "text_delta", "turnId": _turn(event), "text": _data(event).get("messageDelta", "")},)


def _thinking_delta(event: Event, known: Known) -> tuple[Body, ...]:
    delta: Body = {"type": "thinking_delta", "turnId": _turn(event), "delta": _data(event).get("reasoningDelta", "")}
    # The first delta of an attempt. A model that thinks begins with it.
    return ({"type": "thinking_start", "turnId": _turn(event)}, delta) if event.key.endswith("/1") else (delta,)


def _thinking_end(event: Event, known: Known) -> tuple[Body, ...]:
    return ({"type": "thinking_end", "turnId": _turn(event), "content": _data(event).get("reasoning", "")},)


def _message_completed(event: Event, known: Known) -> tuple[Body, ...]:
    content = [{"type": "text", "text": _data(event).get("message", "")}]
    return ({"type": "message_end", "turnId": _turn(event), "message": {"role": "assistant", "content": content}},)


def _step_completed(event: Event, known: Known) -> tuple[Body, ...]:
    data = _data(event)
    response: Body = {"finishReason": data.get("finishReason")}
    if "usage" in data:
        response["usage"] = usage_of(Usage.model_validate(data["usage"]))
    return ({**_model_turn(event, known), "response": response, "isError": False},)


def _step_failed(event: Event, known: Known) -> tuple[Body, ...]:
    return ({**_model_turn(event, known), "response": {"error": _error(event)}, "isError": True},)


def _model_turn(event: Event, known: Known) -> Body:
    request: Body = {}
    if known.model is not None:
        model = model_of(known.model)
        request = {"providerId": model["provider"], "providerName": model["provider"], "requestedModel": model["id"]}
    return {
        "type": "turn",
        "turnId": _turn(event),
        "purpose": "agent",
        "request": request,
        **_duration(known.step_at, event),
    }


def _step_superseded(event: Event, known: Known) -> tuple[Body, ...]:
    message = "A new attempt has begun: what the one before has streamed of this step comes again."
    return ({"type": "log", "level": "warn", "message": message, "attributes": {"turnId": _turn(event)}},)


def _step_recovered(event: Event, known: Known) -> tuple[Body, ...]:
    message = "A new attempt has begun: the model goes on from what the one before has streamed of this step."
    return ({"type": "log", "level": "info", "message": message, "attributes": {"turnId": _turn(event)}},)


def _input_requested(event: Event, known: Known) -> tuple[Body, ...]:
    requests: Sequence[Mapping[str, Any]] = _data(event).get("requests", ())
    asked = [each.get("requestId") for each in requests]
    return ({"type": "log", "level": "info", "message": "Waiting for people.", "attributes": {"requestIds": asked}},)


# --- calls --------------------------------------------------------------------------------------------------


def _calls_requested(event: Event, known: Known) -> tuple[Body, ...]:
    return tuple(
        {
            "type": "tool_start",
            "turnId": _turn(event),
            "toolName": each.get("toolName") or each.get("name"),
            "toolCallId": each.get("callId"),
            "args": each.get("input"),
        }
        for each in _data(event).get("actions", ())
    )


def _call_ended(event: Event, known: Known) -> tuple[Body, ...]:
    result: Mapping[str, Any] = _data(event).get("result") or {}
    return (
        {
            "type": "tool",
            "turnId": _turn(event),
            "toolName": result.get("toolName") or result.get("subagentName"),
            "toolCallId": result.get("callId"),
            "isError": bool(result.get("isError", False)),
            "result": result.get("output"),
        },
    )


def _child_started(event: Event, known: Known) -> tuple[Body, ...]:
    data = _data(event)
    return ({"type": "task_start", "taskId": data.get("callId"), "agent": data.get("name")},)


def _child_ended(event: Event, known: Known) -> tuple[Body, ...]:
    data = _data(event)
    ended = {"taskId": data.get("callId"), "agent": data.get("subagentName"), "isError": False}
    return ({"type": "task", **ended, "result": data.get("output")},)


def _compaction_started(event: Event, known: Known) -> tuple[Body, ...]:
    reason = next((why for key, why in _REASONS.items() if f"{key}/" in event.key), "threshold")
    tokens = _data(event).get("usageInputTokens")
    estimated = {} if tokens is None else {"estimatedTokens": tokens}
    return ({"type": "compaction_start", "reason": reason, **estimated},)


def _compaction_ended(event: Event, known: Known) -> tuple[Body, ...]:
    failed = event.type == EventType.COMPACTION_FAILED
    usage = _data(event).get("usage")
    used = {} if usage is None else {"usage": usage_of(Usage.model_validate(usage))}
    return ({"type": "compaction", "isError": failed, **({"error": _error(event)} if failed else {}), **used},)


# --- runs ---------------------------------------------------------------------------------------------------


def _run_started(event: Event, known: Known) -> tuple[Body, ...]:
    run = known.run or {}
    given = run.get("input")
    started = {"workflowName": _data(event).get("workflowName"), "startedAt": run.get("startedAt") or event.at}
    return ({"type": "run_start", **started, "input": given, "payload": given},)


def _run_step(event: Event, known: Known) -> tuple[Body, ...]:
    """A step of a run, at its end: both ends of an operation."""
    data, failed = _data(event), event.type == EventType.RUN_STEP_FAILED
    # By its place: two steps may have one name.
    operation: Body = {
        "operationId": f"{data.get('position', event.index)}/{data.get('name')}",
        "operationKind": "task",
    }
    more = {"error": data["error"]} if "error" in data else {}
    return {"type": "operation_start", **operation}, {"type": "operation", **operation, "isError": failed, **more}


def _run_log(event: Event, known: Known) -> tuple[Body, ...]:
    data = _data(event)
    attributes = {"attributes": data["attributes"]} if data.get("attributes") else {}
    level = data.get("level", "info")
    # Flue knows three levels.
    shown = {"warning": "warn", "critical": "error", "debug": "info"}.get(level, level)
    return ({"type": "log", "level": shown, "message": data.get("message", ""), **attributes},)


def _run_waiting(event: Event, known: Known) -> tuple[Body, ...]:
    return ({"type": "log", "level": "info", "message": "The run waits.", "attributes": dict(_data(event))},)


def _run_ended(event: Event, known: Known) -> tuple[Body, ...]:
    run, failed = known.run or {}, event.type != EventType.RUN_COMPLETED
    end: Body = {"type": "run_end", "isError": failed}
    if failed:
        end["error"] = _data(event).get("error") or {"name": "RunCancelled", "message": "The run was cancelled."}
    else:
        end["result"] = run.get("result")
    duration = run.get("durationMs")
    return ({**end, **({} if duration is None else {"durationMs": duration})},)


_PROJECTIONS: Mapping[str, Callable[[Event, Known], tuple[Body, ...]]] = {
    EventType.TURN_STARTED: _turn_started,
    EventType.TURN_COMPLETED: _turn_completed,
    EventType.TURN_FAILED: _turn_failed,
    EventType.TURN_CANCELLED: _turn_cancelled,
    EventType.DELIVERY_REFUSED: _delivery_refused,
    EventType.MESSAGE_RECEIVED: _message_received,
    EventType.STEP_STARTED: _step_started,
    EventType.MESSAGE_APPENDED: _text_delta,
    EventType.REASONING_APPENDED: _thinking_delta,
    EventType.REASONING_COMPLETED: _thinking_end,
    EventType.MESSAGE_COMPLETED: _message_completed,
    EventType.STEP_COMPLETED: _step_completed,
    EventType.STEP_FAILED: _step_failed,
    EventType.STEP_SUPERSEDED: _step_superseded,
    EventType.STEP_RECOVERED: _step_recovered,
    EventType.INPUT_REQUESTED: _input_requested,
    EventType.ACTIONS_REQUESTED: _calls_requested,
    EventType.ACTION_RESULT: _call_ended,
    EventType.SUBAGENT_CALLED: _child_started,
    EventType.SUBAGENT_COMPLETED: _child_ended,
    EventType.COMPACTION_REQUESTED: _compaction_started,
    EventType.COMPACTION_COMPLETED: _compaction_ended,
    EventType.COMPACTION_FAILED: _compaction_ended,
    EventType.RUN_STARTED: _run_started,
    EventType.RUN_STEP_COMPLETED: _run_step,
    EventType.RUN_STEP_FAILED: _run_step,
    EventType.RUN_LOG: _run_log,
    EventType.RUN_WAITING: _run_waiting,
    EventType.RUN_COMPLETED: _run_ended,
    EventType.RUN_FAILED: _run_ended,
    EventType.RUN_CANCELLED: _run_ended,
}

#: Of these, the record of the run knows more.
OF_RUN_RECORD = frozenset({EventType.RUN_STARTED}) | RUN_ENDS
#: These settle the deliveries of their turn.
ENDS = frozenset({EventType.TURN_COMPLETED, EventType.TURN_FAILED, EventType.TURN_CANCELLED})
