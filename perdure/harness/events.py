"""The events of a step and of a turn, each with its deterministic key, and the deltas of a reply."""

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from pydantic_ai.messages import ModelResponse, ToolCallPart

from perdure.bounds import whole
from perdure.errors import ModelFailed
from perdure.faults import reach
from perdure.models.base import Delta, Item, ReasoningDelta, Reply, TextDelta, ToolInputDelta, UsageSoFar
from perdure.protocol import names
from perdure.protocol.deliveries import Mode, Principal, summary
from perdure.protocol.events import EventType, FinishReason, NewEvent, Usage, step_coordinates, turn_coordinates
from perdure.protocol.inputs import InputRequest, requested
from perdure.protocol.names import MODEL_SCOPE
from perdure.protocol.requests import Coordinates, Failure
from perdure.session import decisions
from perdure.store.base import Store
from perdure.store.values import Attempt, Commit, Fence, Hold, Partial, SessionChange, SessionRow, SessionStatus
from perdure.telemetry.spans import Work

from .journal import ConsumedDelivery
from .tools.records import Outcome

#: The version of the stream's contract.
CONTRACT_VERSION = "0.13.8"

#: The longest id of a call: ids are part of keys.
_LONGEST_ID = 200
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # Providers reject tools with other names.
_UNNAMED = "tool_without_a_usable_name"

#: A batch of this many characters is written at once; of more, if deltas are collected for longer than so many
#: milliseconds, which is the default of the setting.
_FULL = 96
_USUAL_MS = 30.0
#: Milliseconds before the first write: a reply that has ended by then is written once, with the end of its step.
_FIRST_MS = 5.0
# Each delta of a text is sent to readers with the whole text so far. So the batches grow with the text: together its
# deltas send at most this many times its characters, or this many characters per second for a slow model.
_SHARE = 32
_PACE = 32_768


@dataclass(frozen=True)
class EventFactory:
    """Makes the events of one step or turn in one attempt."""

    at: Coordinates
    attempt: int | None = None

    def of_another_step(self, step: int) -> "EventFactory":
        return replace(self, at=self.at.model_copy(update={"step": step}))

    def session_started(self, agent: str, model: str) -> NewEvent:
        runtime = {"agentId": agent, "agentName": agent, "eveVersion": CONTRACT_VERSION, "modelId": model}
        return self._event(EventType.SESSION_STARTED, names.session_key("started"), {"runtime": runtime})

    def turn_started(self, deliveries: tuple[str, ...]) -> NewEvent:
        return self.of_turn(EventType.TURN_STARTED, "started", {}, deliveries)

    def message_received(self, index: int, delivery: ConsumedDelivery) -> NewEvent:
        data = {"message": summary(delivery.message or "")}
        return self.of_turn(EventType.MESSAGE_RECEIVED, f"message/{index}", data, (delivery.delivery_id,))

    def steer_applied(self, index: int, deliveries: tuple[str, ...]) -> NewEvent:
        """`index`: of the first of them in the turn. Another attempt may find more of them."""
        data = {"deliveryIds": list(deliveries), **step_coordinates(self.at.turn, self.at.step)}
        key = names.step_key(self.at.turn, self.at.step, f"steered/{index}")
        return self._event(EventType.STEER_APPLIED, key, data, deliveries)

    def step_started(self) -> NewEvent:
        return self.of_step(EventType.STEP_STARTED, "started")

    def step_completed(self, reason: FinishReason, usage: Usage) -> NewEvent:
        counted = usage.model_dump(mode="json")
        return self.of_step(EventType.STEP_COMPLETED, "completed", {"finishReason": reason, "usage": counted})

    def superseded(self, generation: int) -> NewEvent:
        return self.of_step(EventType.STEP_SUPERSEDED, f"g{generation}/superseded", {"attempt": self.attempt})

    def recovered(self, generation: int) -> NewEvent:
        return self.of_step(EventType.STEP_RECOVERED, f"g{generation}/recovered", {"attempt": self.attempt})

    def action_result(
        self,
        call_id: str,
        tool: str,
        outcome: Outcome,
        call_at: Coordinates | None = None,
        *,
        of_child: bool = False,
    ) -> NewEvent:
        """The outcome of a call; `call_at` is the step that requested it, if it is not this one."""
        kind, name = ("subagent-result", "subagentName") if of_child else ("tool-result", "toolName")
        result: dict[str, Any] = {"kind": kind, "callId": call_id, name: tool, "output": outcome.output}
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

    def inputs_requested(
        self, requests: Sequence[InputRequest], first: str | None = None, first_shown: tuple[int, int] | None = None
    ) -> NewEvent:
        """The requests that wait for people; `first`: names those of descendants, which come one after the other.

        `first_shown`: the turn and the step of the event that has shown these requests first, if it was another one.
        """
        data = requested(requests)
        for each in requests:
            if each.session_id != self.at.session_id:
                data["details"][each.request_id] |= {"sessionId": each.session_id, "agent": each.agent}
        if first_shown is None or first_shown == self.at.place:
            return self.of_step(EventType.INPUT_REQUESTED, f"inputs/{first}" if first else "inputs", data)
        # Clients find what they show of a request by the coordinates: with others they would show it twice.
        turn, step = first_shown
        key = names.step_key(self.at.turn, self.at.step, f"inputs/again/{turn}/{step}")
        return self._event(EventType.INPUT_REQUESTED, key, {**data, **step_coordinates(turn, step)})

    def result_completed(self, result: Any) -> NewEvent:
        return self.of_step(EventType.RESULT_COMPLETED, "result", {"result": result})

    def parked(self) -> "Ending":
        """The end of a turn that parks; the same in both modes."""
        ended = self.of_turn(EventType.TURN_COMPLETED, "completed", {})
        waiting = self._waiting(names.turn_key(self.at.turn, "boundary"))
        return Ending((ended, waiting), "waiting", None)

    def cancelled(self, mode: Mode, failure: Failure) -> "Ending":
        """The end of a cancelled turn. Its boundary has another key, because the turn may have parked before."""
        ended = self.of_turn(EventType.TURN_CANCELLED, "cancelled", {})
        return self._ending([ended], mode, failure, "boundary/cancelled")

    def turn_failed(self, mode: Mode, failure: Failure) -> "Ending":
        """The end of a turn that failed before its first step."""
        ended = self.of_turn(EventType.TURN_FAILED, "failed", _error_data(failure))
        return self._ending([ended], mode, failure)

    def completed(self, mode: Mode, *before: NewEvent) -> "Ending":
        """The end of a turn that succeeded; `before` are the last events of its last step."""
        ended = self.of_turn(EventType.TURN_COMPLETED, "completed", {})
        return self._ending([*before, ended], mode, None)

    def failed(self, mode: Mode, failure: Failure) -> "Ending":
        """The end of a turn that failed in this step."""
        data = _error_data(failure)
        step = self.of_step(EventType.STEP_FAILED, "failed", data)
        return self._ending([step, self.of_turn(EventType.TURN_FAILED, "failed", data)], mode, failure)

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

    def of_turn(self, type: str, what: str, data: Mapping[str, Any], delivery_ids: tuple[str, ...] = ()) -> NewEvent:
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
    return names.step_key(call_at.turn, call_at.step, names.outcome_key(call_id))


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


class CallNames:
    """Makes ids of calls unique in their session, as readers expect, and names of tools valid, as providers demand."""

    def __init__(self, at: Coordinates, taken: frozenset[str], tools: Collection[str]) -> None:
        self._at = at
        self._taken = taken
        self._tools = tools

    def of(self, call_id: str) -> str:
        usable = _usable(call_id)
        return usable if usable not in self._taken else self._unique(usable)

    def tool(self, name: str) -> str:
        return name if name in self._tools or _NAME.fullmatch(name) else _UNNAMED

    def applied(self, response: ModelResponse) -> ModelResponse:
        """The response with a unique id for each call and valid names of tools."""
        names: set[str] = set()
        parts: list[Any] = []
        for part in response.parts:
            if isinstance(part, ToolCallPart):
                name = self.of(part.tool_call_id)
                unique, number = self._unique(_usable(part.tool_call_id)), len(names)
                while name in names:
                    name, number = f"{unique}_{number}", number + 1
                names.add(name)
                part = replace(part, tool_call_id=name, tool_name=self.tool(part.tool_name))
            parts.append(part)
        return replace(response, parts=parts)

    def _unique(self, call_id: str) -> str:
        return f"{call_id}_{self._at.turn}_{self._at.step}"


def _usable(call_id: str) -> str:
    """The id, or a hash of it if it cannot be part of keys."""
    if call_id and call_id.isprintable() and len(call_id) <= _LONGEST_ID:
        return call_id
    return "call_" + hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:24]


@dataclass
class _Chunk:
    """Consecutive deltas of one kind, merged."""

    first: Delta
    texts: list[str]

    def accepts(self, delta: Delta) -> bool:
        if isinstance(delta, ToolInputDelta) and isinstance(self.first, ToolInputDelta):
            return delta.call_id == self.first.call_id
        return type(delta) is type(self.first)


def work_of(row: SessionRow, at: Coordinates, agent: str, attempt: Attempt, speaker: Principal | None) -> Work:
    """What an attempt works at, for its spans; `speaker` is the principal for whom the turn acts, if known."""
    return Work(at, agent, attempt.number, row.root_id or row.session_id, speaker or row.principal)


class DeltaWriter:
    """Writes the deltas of one attempt at a model call as events."""

    def __init__(
        self,
        store: Store,
        factory: EventFactory,
        attempt: Attempt,
        calls: CallNames,
        buffer_ms: float,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        """`buffer_ms`: for how long deltas are collected. The first ones wait less, to show that it begins."""
        self._first_pause, self._pause = min(_FIRST_MS, buffer_ms) / 1000, buffer_ms / 1000
        self._full_at = _FULL * max(1.0, buffer_ms / _USUAL_MS)
        self._store = store
        self._factory = factory
        self._attempt = attempt
        self._calls = calls
        # Tools whose calls readers do not see as actions.
        self._hidden = hidden
        self._buffer: list[_Chunk] = []
        self._size = 0
        self._emitted_events = 0
        self._emitted_chars = 0
        #: What all replies of this attempt have used so far, as far as the provider has said.
        self.usage = Usage()
        self._ended = False
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()

    async def follow(self, stream: AsyncGenerator[Item, None]) -> Reply:
        """Consume one reply of the model. If a write fails, for example after a newer attempt, the call is stopped."""
        self._ended = False
        reading = asyncio.create_task(self._read(stream))
        writing = asyncio.create_task(self._write())
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                writing.result()
            self._ended = True
            self._arrived.set()
            self._full.set()
            await writing
            return await reading
        finally:
            reading.cancel()
            writing.cancel()
            # Both must have ended, and the provider's stream be closed, before anything else is written.
            await asyncio.wait({reading, writing})

    def unwritten(self) -> tuple[NewEvent, ...]:
        """The events that are not written yet; they are committed with the end of the step."""
        return tuple(self._event(chunk) for chunk in self._take())

    def go_on_from(self, partial: Partial) -> None:
        """Readers have seen this already: the next deltas are sent with the whole text so far, too."""
        self._emitted_chars = len(partial.text) + len(partial.reasoning)

    def discard(self) -> None:
        """Drop the deltas that are not written yet."""
        self._take()

    async def _read(self, stream: AsyncGenerator[Item, None]) -> Reply:
        before = self.usage
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, Reply | UsageSoFar):
                    self.usage = before + item.usage
                if isinstance(item, Reply):
                    return item
                if not isinstance(item, UsageSoFar):
                    self._add(item)
        raise ModelFailed("The model ended without an answer.", transient=True)

    def _add(self, delta: Delta) -> None:
        _check(delta)
        if isinstance(delta, ToolInputDelta) and delta.tool in self._hidden:
            return
        if not self._buffer or not self._buffer[-1].accepts(delta):
            self._buffer.append(_Chunk(delta, []))
        self._buffer[-1].texts.append(delta.text)
        self._size += len(delta.text)
        self._arrived.set()
        if self._size >= max(self._full_at, self._emitted_chars // _SHARE):
            self._full.set()

    async def _write(self) -> None:
        await self._arrived.wait()
        await self._filled(self._first_pause)
        while not self._ended:
            await self._commit(self.unwritten())
            reach("model_mid_stream")
            await self._filled(max(self._pause, self._emitted_chars / _PACE))
            await self._arrived.wait()

    async def _filled(self, within: float) -> None:
        """Wait for a full batch or the end of the reply, or until the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._full.wait()

    async def _commit(self, events: tuple[NewEvent, ...]) -> None:
        at = self._factory.at
        fence = Fence(at.turn, at.step, MODEL_SCOPE, self._attempt, Hold.KEEP)
        await self._store.commit(Commit(at.session_id, fence=fence, events=events))

    def _take(self) -> list[_Chunk]:
        taken, self._buffer, self._size = self._buffer, [], 0
        self._arrived.clear()
        self._full.clear()
        return taken

    def _event(self, chunk: _Chunk) -> NewEvent:
        self._emitted_events += 1
        what = f"g{self._attempt.generation}/{self._emitted_events}"
        text = whole("".join(chunk.texts))
        if isinstance(chunk.first, TextDelta | ReasoningDelta):
            self._emitted_chars += len(text)
        match chunk.first:
            case TextDelta():
                return self._factory.of_step(EventType.MESSAGE_APPENDED, what, {"messageDelta": text})
            case ReasoningDelta():
                return self._factory.of_step(EventType.REASONING_APPENDED, what, {"reasoningDelta": text})
            case ToolInputDelta(call_id=call_id, tool=tool):
                named = {"callId": self._calls.of(call_id), "toolName": self._calls.tool(tool)}
                data = {**named, "inputTextDelta": text}
                return self._factory.of_step(EventType.ACTION_INPUT_APPENDED, what, data)


def _check(delta: Delta) -> None:
    """Raise unless the delta can become an event. Later it would make the commit of the whole step fail."""
    match delta:
        case TextDelta(text=str()) | ReasoningDelta(text=str()):
            return
        case ToolInputDelta(call_id=str(), tool=str(), text=str()):
            return
        case _:
            raise TypeError("a model has sent a delta that is not made of text")
