"""The events of a step and of a turn, each with its deterministic key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.protocol import names
from perdure.protocol.deliveries import Mode, summary
from perdure.protocol.events import EventType, FinishReason, NewEvent, Usage, step_coordinates, turn_coordinates
from perdure.protocol.inputs import InputRequest, requested
from perdure.protocol.requests import Coordinates, Failure
from perdure.session import decisions
from perdure.store.values import SessionChange, SessionStatus

from .journal import ConsumedDelivery, Outcome

#: The version of the stream's contract.
CONTRACT_VERSION = "0.13.8"


@dataclass(frozen=True)
class EventFactory:
    """Makes the events of one step or turn in one attempt."""

    at: Coordinates
    attempt: int | None = None

    def session_started(self, agent: str, model: str) -> NewEvent:
        runtime = {"agentId": agent, "agentName": agent, "eveVersion": CONTRACT_VERSION, "modelId": model}
        return self._event(EventType.SESSION_STARTED, names.session_key("started"), {"runtime": runtime})

    def turn_started(self, deliveries: tuple[str, ...]) -> NewEvent:
        return self._of_turn(EventType.TURN_STARTED, "started", {}, deliveries)

    def message_received(self, index: int, delivery: ConsumedDelivery) -> NewEvent:
        data = {"message": summary(delivery.message or "")}
        return self._of_turn(EventType.MESSAGE_RECEIVED, f"message/{index}", data, (delivery.delivery_id,))

    def step_started(self) -> NewEvent:
        return self.of_step(EventType.STEP_STARTED, "started")

    def step_completed(self, reason: FinishReason, usage: Usage) -> NewEvent:
        counted = usage.model_dump(mode="json")
        return self.of_step(EventType.STEP_COMPLETED, "completed", {"finishReason": reason, "usage": counted})

    def superseded(self, generation: int) -> NewEvent:
        return self.of_step(EventType.STEP_SUPERSEDED, f"g{generation}/superseded", {"attempt": self.attempt})

    def action_result(self, call_id: str, tool: str, outcome: Outcome, call_at: Coordinates | None = None) -> NewEvent:
        """The outcome of a call; `call_at` is the step that requested it, if it is not this one."""
        result: dict[str, Any] = {"kind": "tool-result", "callId": call_id, "toolName": tool, "output": outcome.output}
        if outcome.is_error:
            result["isError"] = True
        data: dict[str, Any] = {
            "result": result,
            # The wire has no status "unknown": readers see a failed action, and the error's code says more.
            "status": "failed" if outcome.status == "unknown" else outcome.status,
        }
        if outcome.error is not None:
            data["error"] = outcome.error
        key = action_key(call_at or self.at, call_id)
        return self._event(EventType.ACTION_RESULT, key, {**data, **step_coordinates(self.at.turn, self.at.step)})

    def inputs_requested(self, requests: Sequence[InputRequest]) -> NewEvent:
        return self.of_step(EventType.INPUT_REQUESTED, "inputs", requested(requests))

    def result_completed(self, result: Any) -> NewEvent:
        return self.of_step(EventType.RESULT_COMPLETED, "result", {"result": result})

    def parked(self) -> "Ending":
        """The end of a turn that parks; the same in both modes."""
        ended = self._of_turn(EventType.TURN_COMPLETED, "completed", {})
        waiting = self._waiting(names.turn_key(self.at.turn, "boundary"))
        return Ending((ended, waiting), "waiting", None)

    def cancelled(self, mode: Mode, failure: Failure) -> "Ending":
        """The end of a cancelled turn. Its boundary has another key, because the turn may have parked before."""
        ended = self._of_turn(EventType.TURN_CANCELLED, "cancelled", {})
        return self._ending([ended], mode, failure, "boundary/cancelled")

    def turn_failed(self, mode: Mode, failure: Failure) -> "Ending":
        """The end of a turn that failed before its first step."""
        ended = self._of_turn(EventType.TURN_FAILED, "failed", _error_data(failure))
        return self._ending([ended], mode, failure)

    def completed(self, mode: Mode, *before: NewEvent) -> "Ending":
        """The end of a turn that succeeded; `before` are the last events of its last step."""
        ended = self._of_turn(EventType.TURN_COMPLETED, "completed", {})
        return self._ending([*before, ended], mode, None)

    def failed(self, mode: Mode, failure: Failure) -> "Ending":
        """The end of a turn that failed in this step."""
        data = _error_data(failure)
        step = self.of_step(EventType.STEP_FAILED, "failed", data)
        return self._ending([step, self._of_turn(EventType.TURN_FAILED, "failed", data)], mode, failure)

    def of_step(self, type: str, what: str, data: Mapping[str, Any] | None = None) -> NewEvent:
        at = self.at
        data = {**(data or {}), **step_coordinates(at.turn, at.step)}
        return self._event(type, names.step_key(at.turn, at.step, what), data)

    def _waiting(self, key: str) -> NewEvent:
        return self._event(EventType.SESSION_WAITING, key, {"wait": "next-user-message"})

    def _ending(
        self, events: Sequence[NewEvent], mode: Mode, failure: Failure | None, what: str = "boundary"
    ) -> "Ending":
        boundary = decisions.boundary(mode, failure)
        key = names.turn_key(self.at.turn, what)
        match boundary:
            case "waiting":
                event = self._waiting(key)
            case "completed":
                event = self._event(EventType.SESSION_COMPLETED, key, None)
            case "failed":
                data = {**_error_data(failure), "sessionId": self.at.session_id} if failure else {}
                event = self._event(EventType.SESSION_FAILED, key, data)
        error = _error_data(failure) if failure and boundary == "failed" else None
        return Ending((*events, event), boundary, error)

    def _of_turn(self, type: str, what: str, data: Mapping[str, Any], delivery_ids: tuple[str, ...] = ()) -> NewEvent:
        data = {**data, **turn_coordinates(self.at.turn)}
        return self._event(type, names.turn_key(self.at.turn, what), data, delivery_ids)

    def _event(self, type: str, key: str, data: dict[str, Any] | None, delivery_ids: tuple[str, ...] = ()) -> NewEvent:
        at = self.at
        return NewEvent(
            type=type,
            key=key,
            data=data,
            turn=at.turn,
            step=at.step,
            attempt=self.attempt,
            delivery_ids=delivery_ids,
        )


def action_key(call_at: Coordinates, call_id: str) -> str:
    """The key of the event of a call's outcome. It names the step of the call, so that each call has one such event."""
    return names.step_key(call_at.turn, call_at.step, names.outcome_slot(call_id))


def results_in(events: Sequence[NewEvent]) -> int:
    """The number of call results among these events; the session counts them."""
    return sum(event.type == EventType.ACTION_RESULT for event in events)


@dataclass(frozen=True)
class Ending:
    """The last events of a turn, and the status of the session after them."""

    events: tuple[NewEvent, ...]
    status: SessionStatus
    error: dict[str, Any] | None

    @property
    def closes(self) -> bool:
        return self.status in ("completed", "failed")

    def change(self, **counts: Any) -> SessionChange:
        return SessionChange(status=self.status, error=self.error, **counts)


def _error_data(failure: Failure) -> dict[str, Any]:
    data: dict[str, Any] = {"code": failure.code, "message": failure.message}
    return data if failure.details is None else {**data, "details": failure.details}
