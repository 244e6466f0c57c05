"""From the journal to the messages that the model reads."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import replace

from pydantic_ai.messages import (
    BinaryContent,
    DocumentUrl,
    ImageUrl,
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)

from perdure.protocol.deliveries import FilePart, TextPart

from .journal import AskedCall, HeardDelivery, Outcome, load_response
from .turn_journal import TurnJournal

#: What is sent along as it is; anything larger, and any other type, is only named.
_LARGEST = {"image/": 3_145_728, "application/pdf": 20_971_520}

NOT_EXECUTED = "This call was not executed."
INTERRUPTED = (
    "Outcome unknown: the call was interrupted before it could report. "
    "Its effect may or may not have happened; check before you do it again."
)


def messages_of(turn: TurnJournal) -> list[ModelMessage]:
    """One turn as the model saw it. Every call has exactly one result, told truthfully."""
    messages: list[ModelMessage] = []
    notes = turn.resumption.notes if turn.resumption else ()
    said: list[ModelRequestPart] = [UserPromptPart(note) for note in notes]
    said += [part for heard in turn.heard() for part in _said(heard)]
    if said:
        messages.append(ModelRequest(parts=said))
    for step in range(turn.last_step + 1):
        reply = turn.reply(step)
        if reply is None:
            continue
        messages.append(load_response(reply))
        if reply.calls:
            messages.append(ModelRequest(parts=[_returned(turn, step, call) for call in reply.calls]))
    return messages


def joined(messages: Sequence[ModelMessage], instructions: str) -> list[ModelMessage]:
    """The messages as they are sent: requests in a row become one, and the last one carries the instructions."""
    sent: list[ModelMessage] = []
    for message in messages:
        last = sent[-1] if sent else None
        if isinstance(message, ModelRequest) and isinstance(last, ModelRequest):
            sent[-1] = replace(last, parts=[*last.parts, *message.parts])
        else:
            sent.append(message)
    if not sent or not isinstance(sent[-1], ModelRequest):
        # A delivery without words, say: the model goes on from what it has.
        sent.append(ModelRequest(parts=[UserPromptPart("Continue.")]))
    sent[-1] = replace(sent[-1], instructions=instructions or None)
    return sent


def _said(heard: HeardDelivery) -> list[ModelRequestPart]:
    parts: list[ModelRequestPart] = [UserPromptPart(f"Client context:\n{value}") for value in heard.client_context]
    match heard.message:
        case None:
            pass
        case str(text):
            parts.append(UserPromptPart(text))
        case contents:
            parts.append(UserPromptPart([_content(part) for part in contents]))
    return parts


def _content(part: TextPart | FilePart) -> UserContent:
    if isinstance(part, TextPart):
        return part.text
    return _file(part) or f"Attached file {part.filename or '(unnamed)'} ({part.media_type})"


def _file(part: FilePart) -> UserContent | None:
    """The file as the model can take it; None when it cannot."""
    largest = next((size for kind, size in _LARGEST.items() if part.media_type.startswith(kind)), None)
    if largest is None:
        return None
    if part.data.startswith(("http://", "https://")):
        url = ImageUrl if part.media_type.startswith("image/") else DocumentUrl
        return url(part.data, media_type=part.media_type)
    encoded = part.data.partition(",")[2] if part.data.startswith("data:") else part.data
    try:
        data = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        return None
    return BinaryContent(data, media_type=part.media_type) if len(data) <= largest else None


def _returned(turn: TurnJournal, step: int, call: AskedCall) -> ToolReturnPart:
    outcome = turn.outcome(step, call.call_id)
    if outcome is None:
        text = INTERRUPTED if turn.interrupted(step, call.call_id) else NOT_EXECUTED
        outcome = Outcome(status="unknown", output=text, is_error=True)
    return ToolReturnPart(
        tool_name=call.tool,
        # None would be sent as an empty result, which some providers refuse.
        content="null" if outcome.output is None else outcome.output,
        tool_call_id=call.call_id,
        outcome="denied" if outcome.status == "rejected" else "failed" if outcome.is_error else "success",
    )
