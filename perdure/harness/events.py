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

from .journal import HeardDelivery, Outcome

#: The contract that readers of the stream are promised.
CONTRACT_VERSION = "0.13.8"


@dataclass(frozen=True)
class EventFactory:
    """Tells what happens at one place, in one attempt."""

    at: Coordinates
    attempt: int | None = None

    def session_started(self, agent: str, model: str) -> NewEvent:
        runtime = {"agentId": agent, "agentName": agent, "eveVersion": CONTRACT_VERSION, "modelId": model}
        return self._event(EventType.SESSION_STARTED, names.session_key("started"), {"runtime": runtime})

    def turn_started(self, deliveries: tuple[str, ...]) -> NewEvent:
        return self._of_turn(EventType.TURN_STARTED, "started", {}, deliveries)

    def message_received(self, index: int, heard: HeardDelivery) -> NewEvent:
        said = {"message": summary(heard.message or "")}
        return self._of_turn(EventType.MESSAGE_RECEIVED, f"message/{index}", said, (heard.delivery_id,))

    def step_started(self) -> NewEvent:
        return self.of_step(EventType.STEP_STARTED, "started")

    def step_completed(self, reason: FinishReason, usage: Usage) -> NewEvent:
        counted = usage.model_dump(mode="json")
        return self.of_step(EventType.STEP_COMPLETED, "completed", {"finishReason": reason, "usage": counted})

    def superseded(self, generation: int) -> NewEvent:
        return self.of_step(EventType.STEP_SUPERSEDED, f"g{generation}/superseded", {"attempt": self.attempt})

    def action_result(self, call_id: str, tool: str, outcome: Outcome, asked: Coordinates | None = None) -> NewEvent:
        """What a call came to; `asked` is the step that asked for it, when that is another one than this."""
        result: dict[str, Any] = {"kind": "tool-result", "callId": call_id, "toolName": tool, "output": outcome.output}
        if outcome.is_error:
            result["isError"] = True
        told: dict[str, Any] = {
            "result": result,
            # The wire knows no "unknown": for a reader the action has failed, and the error says how.
            "status": "failed" if outcome.status == "unknown" else outcome.status,
        }
        if outcome.error is not None:
            told["error"] = outcome.error
        key = action_key(asked or self.at, call_id)
        return self._event(EventType.ACTION_RESULT, key, {**told, **step_coordinates(self.at.turn, self.at.step)})

    def inputs_requested(self, requests: Sequence[InputRequest]) -> NewEvent:
        return self.of_step(EventType.INPUT_REQUESTED, "inputs", requested(requests))

    def result_completed(self, result: Any) -> NewEvent:
        return self.of_step(EventType.RESULT_COMPLETED, "result", {"result": result})

    def parked(self) -> "Ending":
        """The end of a turn that waits for people, in whichever mode."""
        over = self._of_turn(EventType.TURN_COMPLETED, "completed", {})
        waiting = self._waiting(names.turn_key(self.at.turn, "boundary"))
        return Ending((over, waiting), "waiting", None)

    def cancelled(self, mode: Mode, failure: Failure) -> "Ending":
        """The end of a turn that somebody stopped; it may have parked before."""
        over = self._of_turn(EventType.TURN_CANCELLED, "cancelled", {})
        return self._ending([over], mode, failure, "boundary/cancelled")

    def turn_failed(self, mode: Mode, failure: Failure) -> "Ending":
        """The end of a turn that failed before any step."""
        over = self._of_turn(EventType.TURN_FAILED, "failed", _told(failure))
        return self._ending([over], mode, failure)

    def completed(self, mode: Mode, *before: NewEvent) -> "Ending":
        """The end of a turn that went well, after what its last step still has to say."""
        over = self._of_turn(EventType.TURN_COMPLETED, "completed", {})
        return self._ending([*before, over], mode, None)

    def failed(self, mode: Mode, failure: Failure) -> "Ending":
        """The end of a turn that did not."""
        told = _told(failure)
        step = self.of_step(EventType.STEP_FAILED, "failed", told)
        return self._ending([step, self._of_turn(EventType.TURN_FAILED, "failed", told)], mode, failure)

    def of_step(self, type: str, what: str, data: Mapping[str, Any] | None = None) -> NewEvent:
        at = self.at
        told = {**(data or {}), **step_coordinates(at.turn, at.step)}
        return self._event(type, names.step_key(at.turn, at.step, what), told)

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
                told = {**_told(failure), "sessionId": self.at.session_id} if failure else {}
                event = self._event(EventType.SESSION_FAILED, key, told)
        error = _told(failure) if failure and boundary == "failed" else None
        return Ending((*events, event), boundary, error)

    def _of_turn(self, type: str, what: str, data: Mapping[str, Any], delivery_ids: tuple[str, ...] = ()) -> NewEvent:
        told = {**data, **turn_coordinates(self.at.turn)}
        return self._event(type, names.turn_key(self.at.turn, what), told, delivery_ids)

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


def action_key(asked: Coordinates, call_id: str) -> str:
    """The key of what is told of a call's outcome: of the step that asked, wherever it is told. A call has one."""
    return names.step_key(asked.turn, asked.step, names.outcome_slot(call_id))


def results_in(events: Sequence[NewEvent]) -> int:
    """How many calls have come to their result with these events: the session counts them."""
    return sum(event.type == EventType.ACTION_RESULT for event in events)


@dataclass(frozen=True)
class Ending:
    """The last events of a turn, and how its session stands after them."""

    events: tuple[NewEvent, ...]
    status: SessionStatus
    error: dict[str, Any] | None

    @property
    def closes(self) -> bool:
        return self.status in ("completed", "failed")

    def change(self, **counts: Any) -> SessionChange:
        return SessionChange(status=self.status, error=self.error, **counts)


def _told(failure: Failure) -> dict[str, Any]:
    told: dict[str, Any] = {"code": failure.code, "message": failure.message}
    return told if failure.details is None else {**told, "details": failure.details}
