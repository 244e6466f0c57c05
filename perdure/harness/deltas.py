"""Deltas on their way to the readers.

Writing must never hold the model up, and a model that talks fast must not make a transaction of every word:
deltas gather while the one before is being written, and for a moment longer.
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

#: How long and how much may gather before it is written.
_PAUSE = 0.04
_FULL = 128
# Readers are given the text so far with each delta. So what is long grows in larger pieces: all deltas of a text
# together have at most this many times its characters, or this many characters a second while the model is slow.
_SHARE = 32
_PACE = 32_768


@dataclass
class _Gathered:
    """Neighbouring deltas of one kind, as one."""

    first: Delta
    texts: list[str]

    def takes(self, delta: Delta) -> bool:
        if isinstance(delta, ToolInputDelta) and isinstance(self.first, ToolInputDelta):
            return delta.call_id == self.first.call_id
        return type(delta) is type(self.first)


class DeltaWriter:
    """Tells readers what one attempt of a model call says, while it says it."""

    def __init__(
        self,
        store: Store,
        facts: EventFactory,
        attempt: Attempt,
        calls: CallNames,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self._store = store
        self._facts = facts
        self._attempt = attempt
        self._calls = calls
        # Tools whose calls are no actions to readers.
        self._hidden = hidden
        self._waiting: list[_Gathered] = []
        self._size = 0
        self._told = 0
        self._shown = 0
        self._ended = False
        self._news = asyncio.Event()
        self._full = asyncio.Event()

    async def follow(self, stream: AsyncGenerator[Delta | Reply, None]) -> Reply:
        """Consume one answer of the model. If it can no longer be written, the model is stopped at once."""
        self._ended = False
        listening = asyncio.create_task(self._listen(stream))
        writing = asyncio.create_task(self._write())
        try:
            await asyncio.wait({listening, writing}, return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                writing.result()
            self._end()
            await writing
            return await listening
        finally:
            listening.cancel()
            writing.cancel()
            # Both are over before anything else is written, and the provider's stream is closed.
            await asyncio.wait({listening, writing})

    def rest(self) -> tuple[NewEvent, ...]:
        """What is not written yet: it rides with the end of the step."""
        return tuple(self._event(gathered) for gathered in self._take())

    def drop(self) -> None:
        """Forget what is not written yet."""
        self._take()

    async def _listen(self, stream: AsyncGenerator[Delta | Reply, None]) -> Reply:
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
        if not self._waiting or not self._waiting[-1].takes(delta):
            self._waiting.append(_Gathered(delta, []))
        self._waiting[-1].texts.append(delta.text)
        self._size += len(delta.text)
        self._news.set()
        if self._size >= max(_FULL, self._shown // _SHARE):
            self._full.set()

    async def _write(self) -> None:
        while await self._more():
            await self._commit(self.rest())
            reach("model_mid_stream")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._full.wait(), max(_PAUSE, self._shown / _PACE))

    async def _more(self) -> bool:
        await self._news.wait()
        return not self._ended

    def _end(self) -> None:
        self._ended = True
        self._news.set()
        self._full.set()

    async def _commit(self, events: tuple[NewEvent, ...]) -> None:
        at = self._facts.at
        fence = Fence(at.turn, at.step, MODEL_SCOPE, self._attempt, Hold.KEEP)
        await self._store.commit(Commit(at.session_id, fence=fence, events=events))

    def _take(self) -> list[_Gathered]:
        taken, self._waiting, self._size = self._waiting, [], 0
        self._news.clear()
        self._full.clear()
        return taken

    def _event(self, gathered: _Gathered) -> NewEvent:
        self._told += 1
        what = f"g{self._attempt.generation}/{self._told}"
        text = whole("".join(gathered.texts))
        if isinstance(gathered.first, TextDelta | ReasoningDelta):
            self._shown += len(text)
        match gathered.first:
            case TextDelta():
                return self._facts.of_step(EventType.MESSAGE_APPENDED, what, {"messageDelta": text})
            case ReasoningDelta():
                return self._facts.of_step(EventType.REASONING_APPENDED, what, {"reasoningDelta": text})
            case ToolInputDelta(call_id=call_id, tool=tool):
                named = {"callId": self._calls.of(call_id), "toolName": self._calls.tool(tool)}
                told = {**named, "inputTextDelta": text}
                return self._facts.of_step(EventType.ACTION_INPUT_APPENDED, what, told)


def _check(delta: Delta) -> None:
    """Raise unless an event can be made of it: what waits must not fail later, when it rides with the end of a step."""
    match delta:
        case TextDelta(text=str()) | ReasoningDelta(text=str()):
            return
        case ToolInputDelta(call_id=str(), tool=str(), text=str()):
            return
        case _:
            raise TypeError("a model has sent a delta that is not made of text")
