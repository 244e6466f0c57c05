"""The transcript of a session: what was said and what came of each call, from its records.

It is the same for every reader at any time, also in forks and imports, which have the records and not the events.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING

from perdure.errors import PerdureError, SessionNotFound, UnreadableState
from perdure.protocol.deliveries import FilePart
from perdure.protocol.wire import JsonObject
from perdure.store.base import Store

if TYPE_CHECKING:
    from perdure.harness.journal import ConsumedDelivery, StoredReply, TurnJournal


class RecordsExpired(PerdureError):
    """The records of this session have expired."""

    status = 410
    code = "records_expired"


async def transcript(store: Store, session_id: str) -> AsyncGenerator[JsonObject]:
    """The messages so far, oldest first. Memory is bounded by the largest turn."""
    from perdure.harness.journal import TurnJournal

    row = await store.session(session_id)
    if row is None:
        raise SessionNotFound
    for turn in range(row.turns):
        if row.records_expired:
            raise RecordsExpired
        journal = TurnJournal(await store.records(session_id, from_turn=turn, to_turn=turn))
        try:
            messages = list(_messages(journal))
        except UnreadableState as problem:
            # Of a newer build, or damaged: the other turns are there nevertheless.
            messages = [{"role": "unreadable", "message": problem.message}]
        for message in messages:
            yield {"turn": turn, **message}
        if turn % _OFTEN == _OFTEN - 1 and (row := await store.session(session_id)) is None:
            raise SessionNotFound


#: Turns after which it is looked whether the session, and its records, are still there.
_OFTEN = 50


def _messages(journal: "TurnJournal") -> Iterator[JsonObject]:
    deliveries = journal.deliveries()
    yield from _received(deliveries, None)
    for step in range(journal.last_step + 1):
        yield from _received(deliveries, step)
        if (reply := journal.reply(step)) is None:
            continue
        if parts := [*_answered(reply), *_called(reply)]:
            yield {"step": step, "role": "assistant", "parts": parts}
        for call in reply.calls:
            # Without an outcome it has not ended, or will never run.
            if (outcome := journal.outcome(step, call.call_id)) is not None:
                result = {"callId": call.call_id, "toolName": call.tool, "status": outcome.status}
                yield {"step": step, "role": "tool", **result, "output": outcome.output}


def _received(deliveries: "Sequence[ConsumedDelivery]", step: int | None) -> Iterator[JsonObject]:
    """The messages with which the turn began, or that have entered it at this step."""
    for delivery in deliveries:
        if delivery.step == step and (parts := list(_said(delivery))):
            yield {**({} if step is None else {"step": step}), "role": "user", "parts": parts}


def _said(delivery: "ConsumedDelivery") -> Iterator[JsonObject]:
    """What was sent as a message. Files appear by name, as in events."""
    for part in (delivery.message,) if isinstance(delivery.message, str) else delivery.message or ():
        match part:
            case str(text):
                yield {"type": "text", "text": text}
            case FilePart():
                named = {} if part.filename is None else {"filename": part.filename}
                yield {"type": "file", "mediaType": part.media_type, **named}
            case _:
                yield {"type": "text", "text": part.text}


def _answered(reply: "StoredReply") -> Iterator[JsonObject]:
    from perdure.harness.journal import load_response

    for part in load_response(reply).parts:
        match part.part_kind:
            case "text" if part.content:
                yield {"type": "text", "text": part.content}
            case "thinking" if part.content:
                yield {"type": "reasoning", "text": part.content}
            case _:
                # Calls are told as they were recorded; what providers do for themselves is for them only.
                pass


def _called(reply: "StoredReply") -> Iterator[JsonObject]:
    for call in reply.calls:
        yield {"type": "tool-call", "callId": call.call_id, "toolName": call.tool, "input": call.input}
    if reply.result is not None:
        yield {"type": "result", "value": reply.result.value}
