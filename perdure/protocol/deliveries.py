"""Whatever wakes a session."""

from typing import Literal, TypeAlias

from pydantic import Field

from .inputs import InputStatus
from .principals import Principal
from .wire import JsonObject, Versioned, Wire

Mode: TypeAlias = Literal["conversation", "task"]


class Capabilities(Wire):
    """What the caller of a session can do for it."""

    request_input: bool = False


class InputResponse(Wire):
    """An answer to one open request."""

    request_id: str
    option_id: str | None = None
    text: str | None = None
    # Beyond the contract: an approval may change the arguments, and any answer may say why.
    arguments: JsonObject | None = None
    reason: str | None = None


class TextPart(Wire):
    """A piece of a message that is text."""

    type: Literal["text"] = "text"
    text: str


class FilePart(Wire):
    """A file in a message: `data` is base64, a data URL, or an http(s) URL."""

    type: Literal["file"] = "file"
    media_type: str
    data: str
    filename: str | None = None
    # Why the file behind a URL could not be had.
    missing: str | None = None


Message: TypeAlias = str | tuple[TextPart | FilePart, ...]


class DeliveryBody(Versioned):
    """The content of a delivery. It lives in the store and never in Temporal."""

    # An answer changed what is open before it was delivered; the delivery tells the session to look.
    kind: Literal["message", "answer"] = "message"
    message: Message | None = None
    client_context: tuple[str, ...] = ()
    input_responses: tuple[InputResponse, ...] = ()
    # The requests that this delivery answers.
    answers: tuple[str, ...] = ()
    output_schema: JsonObject | None = None
    principal: Principal | None = None


class DeliveryRef(Versioned):
    """A delivery as Temporal sees it: a signal's payload and an entry of the driver's inbox."""

    id: str
    kind: Literal["message", "answer"] = "message"
    token_hash: str
    coalesce: bool = False
    traceparent: str | None = None
    # When the store accepted it; later for each delivery of a session. Signals may overtake one another.
    at: str | None = None


class InputOutcome(Wire):
    """How a request stands, as whoever answered it is told."""

    request_id: str
    status: InputStatus | Literal["unknown"]
    option_id: str | None = None


class Receipt(Wire):
    """What the deliverer is told. The same key and body are answered with the same receipt."""

    session_id: str
    # None when it was a vote, and more people have to agree before the session hears of it.
    delivery_id: str | None
    continuation_token: str | None = None
    # The requests that it answered, or tried to.
    inputs: tuple[InputOutcome, ...] = ()
    deduplicated: bool = Field(default=False, exclude=True)
    # It is accepted, but Temporal could not be told yet.
    delayed: bool = Field(default=False, exclude=True)


def summary(message: Message) -> str:
    """The text that stands for a message in the event stream."""
    if isinstance(message, str):
        return message
    return "\n".join(
        part.text if isinstance(part, TextPart) else f"[file: {part.filename or part.media_type} ({part.media_type})]"
        for part in message
    )
