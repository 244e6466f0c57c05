"""The messages that a conversation has sent before, encoded: only newer ones go through the provider's library.

The library maps every message of a conversation at each call, and the SDK encodes all of them: about 4 µs for each
message, on the event loop that all sessions share. A message of one of the plain kinds below becomes the same JSON
whatever comes before and after it, so its JSON is kept and put before that of the newer ones. That is true of the
library as it is now. So for each kind of conversation one request is made both ways, and unless they are equal byte for
byte, this process uses the library alone from then on.
"""

import json
import logging
from array import array
from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import is_
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelRequest,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_core import to_json, to_jsonable_python

log = logging.getLogger("perdure.model")

#: Shorter conversations cost too little to keep anything for.
_FEWEST = 64
#: The bytes that are kept of one conversation. What comes after them is mapped each time.
_MOST_BYTES = 4 * 1024 * 1024
#: The messages that are encoded at once when a conversation is new to this process.
_CHUNK = 64
#: The settings that do not change how messages are mapped.
_PLAIN_SETTINGS = frozenset(
    {
        "extra_body",
        "extra_headers",
        "frequency_penalty",
        "logit_bias",
        "max_retries",
        "max_tokens",
        "parallel_tool_calls",
        "presence_penalty",
        "seed",
        "stop_sequences",
        "temperature",
        "timeout",
        "top_p",
    }
)
_INSTRUCTIONS = ("system", "developer")


@dataclass(frozen=True)
class _Sent:
    """Encoded messages. Immutable: two attempts may use those of one conversation at the same time."""

    owner: object = None
    messages: Sequence[ModelMessage] = ()
    #: The messages until the end of each chunk, and the bytes until there.
    counts: Sequence[int] = ()
    ends: Sequence[int] = ()
    encoded: bytes = b""
    kinds: frozenset[str] = frozenset()

    def until(self, message: int) -> "_Sent":
        """The chunks that end at this message or before it."""
        chunks = bisect_right(self.counts, message)
        if chunks == len(self.counts):
            return self
        if chunks == 0:
            return _Sent(self.owner)
        count, end = self.counts[chunks - 1], self.ends[chunks - 1]
        kept = self.messages[:count], self.counts[:chunks], self.ends[:chunks], self.encoded[:end]
        return _Sent(self.owner, *kept, self.kinds)


@dataclass
class SentMessages:
    """What a conversation has sent before. It is kept with the conversation's history."""

    sent: _Sent = _Sent()


@dataclass(frozen=True)
class Encoded:
    """The messages of a request as JSON, without the brackets."""

    text: bytes


class Unlike(Exception):
    """The library has mapped the messages in another way than was expected."""


class Mapped(Exception):
    """Ends a request that was only made to see how the library maps its messages."""

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__()
        self.items = items


@dataclass
class Splice:
    """One request whose older messages may be encoded already."""

    memory: SentMessages
    trusted: set[object]
    messages: Sequence[ModelMessage]
    #: What is known of the first ones, and how many items each of the others becomes.
    known: _Sent
    counts: Sequence[int]
    shape: object
    #: Whether the library gets all messages, although the first ones are known.
    whole: bool = False
    #: Whether the request is not sent.
    dry: bool = False
    #: What the items of the new messages are, encoded, if all are mapped in order to compare.
    expected: bytes | None = None
    kinds: frozenset[str] = field(default_factory=frozenset[str])

    @property
    def is_trusted(self) -> bool:
        return self.shape in self.trusted

    @property
    def mapped(self) -> Sequence[ModelMessage]:
        """The messages for the library."""
        return self.messages if self.whole else self.messages[len(self.known.messages) :]

    def compared_with(self, items: Sequence[Any]) -> "Splice":
        """This request with all messages for the library; `items` is what the new ones become without the others."""
        rest, _ = self._without_instructions(items)
        return replace(self, whole=True, expected=_joined(rest))

    @contextmanager
    def used(self) -> Generator[None]:
        """Let the request that is made now be this one."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def encoded(self, items: Sequence[Any]) -> Encoded:
        """The messages of the request, from what the library made of those that it got."""
        if self.dry:
            raise Mapped(items)
        return self.put_together(items)

    def put_together(self, items: Sequence[Any]) -> Encoded:
        rest, instructions = self._without_instructions(items)
        if self.expected is None:
            self._keep(rest)
            return Encoded(_text(_joined(instructions), self.known.encoded, _joined(rest)))
        text = _joined(items)
        if text != _text(_joined(instructions), self.known.encoded, self.expected):
            raise Unlike
        self.trusted.add(self.shape)
        self._keep(rest[-sum(self.counts) :])
        return Encoded(text)

    @staticmethod
    def _without_instructions(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        instructions = list(takewhile(lambda item: item["role"] in _INSTRUCTIONS, items))
        if len(instructions) > 1:
            raise Unlike
        return items[len(instructions) :], instructions

    def _keep(self, items: Sequence[Any]) -> None:
        """Remember the new messages for the next request, without the last one: it has the instructions."""
        before, counts = self.known, self.counts
        if len(items) != sum(counts):
            raise Unlike
        newer = self.messages[len(before.messages) : -1]
        ends, until, encoded = array("Q", before.ends), array("Q", before.counts), [before.encoded]
        size, taken, done = len(before.encoded), 0, len(before.messages)
        for start in range(0, len(newer), _CHUNK):
            chunk = counts[start : min(start + _CHUNK, len(newer))]
            text = _joined(items[taken : taken + sum(chunk)])
            if not text:
                break
            taken += sum(chunk)
            size += len(text) + (size > 0)
            if size > _MOST_BYTES:
                break
            done += len(chunk)
            encoded.append(text)
            ends.append(size)
            until.append(done)
        self.memory.sent = _Sent(before.owner, self.messages[:done], until, ends, _text(*encoded), self.kinds)


_current: ContextVar[Splice | None] = ContextVar("splice", default=None)


def current() -> Splice | None:
    """What is known of the messages of the request that is being made."""
    return _current.get()


class Splicer:
    """Finds what is known of a request's messages, for one model."""

    def __init__(self) -> None:
        self._trusted: set[object] = set()
        self._off = False

    def splice(
        self, memory: SentMessages, messages: Sequence[ModelMessage], settings: Mapping[str, Any], tools: bool
    ) -> Splice | None:
        """None: the library does all."""
        if self._off or len(messages) < _FEWEST or not _is_plain(settings):
            return None
        # With the library's instrumentation a trace has the messages that it gets.
        if getattr(Agent, "_instrument_default", False):
            return None
        sent = memory.sent if memory.sent.owner is self else _Sent(self)
        # The last message is never known, because it has the instructions.
        known = sent.until(_common(sent.messages, messages[:-1]))
        kinds, counts = set(known.kinds), list[int]()
        for message in messages[len(known.messages) :]:
            items = _items_of(message, kinds)
            if items is None:
                return None
            counts.append(items)
        shape = (frozenset(kinds), frozenset(settings), tools)
        splice = Splice(memory, self._trusted, messages, known, counts, shape, kinds=frozenset(kinds))
        splice.whole = not known.messages
        return splice

    def stop(self) -> None:
        """Put no more requests together: the library does what this code does not know."""
        self._off = True
        log.warning("the model's library maps messages in an unknown way: all of them are mapped at each call")


def content_of(body: Mapping[str, Any]) -> bytes:
    """The body of a request as JSON, as the SDK encodes it."""
    return b"{" + b",".join(_json(name) + b":" + _json(value) for name, value in body.items()) + b"}"


def _json(value: Any) -> bytes:
    if isinstance(value, Encoded):
        return b"[" + value.text + b"]"
    return json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=to_jsonable_python
    ).encode()


def _text(*texts: bytes) -> bytes:
    return b",".join(filter(None, texts))


def _joined(items: Sequence[Any]) -> bytes:
    return to_json(items)[1:-1]


def _common(sent: Sequence[ModelMessage], messages: Sequence[ModelMessage]) -> int:
    """How many messages at the beginning are the same objects. Equal ones may be encoded differently: 1 and True."""
    same = min(len(sent), len(messages))
    if all(map(is_, sent, messages)):
        return same
    return next(place for place in range(same) if sent[place] is not messages[place])


def _is_plain(settings: Mapping[str, Any]) -> bool:
    body: object = settings.get("extra_body")
    return settings.keys() <= _PLAIN_SETTINGS and (
        body is None or (isinstance(body, Mapping) and "messages" not in body)
    )


def _items_of(message: ModelMessage, kinds: set[str]) -> int | None:
    """How many items the message becomes. None: that may depend on the messages around it."""
    for part in message.parts:
        kind = _KINDS.get(type(part))
        if kind is None:
            return None
        if isinstance(part, UserPromptPart) and not isinstance(part.content, str):
            kind = "content"
            if any(type(each) not in (str, BinaryContent) for each in part.content):
                return None
        kinds.add(kind)
    if isinstance(message, ModelRequest):
        return len(message.parts)
    return 1 if message.parts else 0


_KINDS: dict[type[object], str] = {
    UserPromptPart: "user",
    ToolReturnPart: "return",
    TextPart: "text",
    ToolCallPart: "call",
}
