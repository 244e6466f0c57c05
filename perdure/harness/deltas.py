"""Emits the deltas of a model's reply while they arrive.

Writing must not slow the model down, and not every word can be a transaction. So deltas are collected while the
previous batch is written, and for a short pause after it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from perdure.errors import ModelFailed
from perdure.faults import reach
from perdure.models.base import Delta, ReasoningDelta, Reply, TextDelta, ToolInputDelta
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.names import MODEL_SCOPE
from perdure.store.base import Store
from perdure.store.values import Attempt, Commit, Fence, Hold
from perdure.text import whole

from .events import EventFactory
from .reply import CallNames

#: Seconds between two writes; a batch of this many characters is written at once.
_PAUSE = 0.04
_FULL = 128
# Each delta of a text is sent to readers with the whole text so far. So the batches grow with the text: together its
# deltas send at most this many times its characters, or this many characters per second for a slow model.
_SHARE = 32
_PACE = 32_768


@dataclass
class _Chunk:
    """Consecutive deltas of one kind, merged."""

    first: Delta
    texts: list[str]

    def accepts(self, delta: Delta) -> bool:
        if isinstance(delta, ToolInputDelta) and isinstance(self.first, ToolInputDelta):
            return delta.call_id == self.first.call_id
        return type(delta) is type(self.first)


class DeltaWriter:
    """Writes the deltas of one attempt at a model call as events."""

    def __init__(
        self,
        store: Store,
        factory: EventFactory,
        attempt: Attempt,
        calls: CallNames,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
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
        self._ended = False
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()

    async def follow(self, stream: AsyncGenerator[Delta | Reply, None]) -> Reply:
        """Consume one reply of the model. If a write fails, for example after a newer attempt, the call is stopped."""
        self._ended = False
        reading = asyncio.create_task(self._read(stream))
        writing = asyncio.create_task(self._write())
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                writing.result()
            self._end()
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

    def discard(self) -> None:
        """Drop the deltas that are not written yet."""
        self._take()

    async def _read(self, stream: AsyncGenerator[Delta | Reply, None]) -> Reply:
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, Reply):
                    return item
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
        if self._size >= max(_FULL, self._emitted_chars // _SHARE):
            self._full.set()

    async def _write(self) -> None:
        while await self._wait_for_more():
            await self._commit(self.unwritten())
            reach("model_mid_stream")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._full.wait(), max(_PAUSE, self._emitted_chars / _PACE))

    async def _wait_for_more(self) -> bool:
        await self._arrived.wait()
        return not self._ended

    def _end(self) -> None:
        self._ended = True
        self._arrived.set()
        self._full.set()

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
