"""Principals, and the deliveries that they send: the input that a session accepts, and its receipt."""

from typing import Literal, TypeAlias, get_args

from pydantic import Field

from .inputs import InputStatus
from .wire import JsonObject, Versioned, Wire


class Principal(Wire):
    """A caller that an authenticator recognised."""

    principal_id: str
    principal_type: str
    authenticator: str
    issuer: str | None = None
    subject: str | None = None
    attributes: dict[str, str | list[str]] = Field(default_factory=dict[str, str | list[str]])

    @property
    def address(self) -> str:
        """How authors name this caller: the authenticator, and the caller's name there."""
        return f"{self.authenticator}:{self.subject or self.principal_id}"

    @property
    def owner(self) -> str:
        """The owner of the caller's sessions: two principals with the same owner are the same caller."""
        return "|".join((self.authenticator, self.issuer or "", self.principal_id))


LOCAL = Principal(principal_id="local-dev", principal_type="local-dev", authenticator="local-dev")


Mode: TypeAlias = Literal["conversation", "task"]


class Capabilities(Wire):
    """What the caller of a session can do for it."""

    request_input: bool = False


class Bounds(Wire, extra="allow"):
    """What bounds a session and its turns in time. Values of newer builds are kept."""

    # When the session ends, in seconds since the epoch.
    deadline: float | None = None
    # Seconds without a turn or a delivery after which it ends.
    idle_seconds: float | None = None
    turn_seconds: float | None = None
    # Attempts at a model call whose worker dies. 0: no limit but the deadline of the turn.
    attempts: int | None = None
    # How many sessions are above this one on other servers, as the one says that has started it.
    depth: int | None = None


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
    # Why the file behind a URL could not be fetched.
    missing: str | None = None


Message: TypeAlias = str | tuple[TextPart | FilePart, ...]


#: The kinds of deliveries that are no messages, but controls: between two turns the model's history is summarised or
#: dropped, or the session ends.
COMPACT, CLEAR, RESET = "compact", "clear", "reset"
CONTROLS = frozenset({COMPACT, CLEAR, RESET})

#: The kind of the delivery with which a run is accepted. The body of the run reads it when it begins.
RUN = "run"

#: The kinds of deliveries by which the sessions of a family report: a child has ended, to its parent; a descendant
#: waits for people, or does so no more, to its root.
CHILD_RESULT, CHILD_INPUT, CHILD_ANSWER = "child-result", "child-input", "child-answer"
#: No delivery, but a call whose result the turn must wait for. Turns of builds that do not know it are held.
AWAITED = "awaited"
CHILD_KINDS = frozenset({CHILD_RESULT, CHILD_INPUT, CHILD_ANSWER, AWAITED})


class Lineage(Wire, extra="allow"):
    """The call that started a session, and the session that made it."""

    session_id: str
    root_session_id: str
    turn: int
    step: int
    call_id: str
    # The name under which the parent knows the child.
    name: str
    # 1 for a child of a root.
    depth: int


class DeliveryBody(Versioned):
    """The content of a delivery. It lives in the store and never in Temporal."""

    # An answer is counted in the store before it is delivered: the delivery makes the session read the requests again.
    # Kinds of newer builds are in `DeliveryRef`.
    kind: str = "message"
    message: Message | None = None
    client_context: tuple[str, ...] = ()
    input_responses: tuple[InputResponse, ...] = ()
    # The requests that this delivery answers.
    answers: tuple[str, ...] = ()
    output_schema: JsonObject | None = None
    principal: Principal | None = None
    # The child that has ended, or whose requests have changed.
    child_session_id: str | None = None
    # What a child on another server has reported: `{output}` or `{error: {code, message}}`.
    result: JsonObject | None = None

    @property
    def is_message(self) -> bool:
        return self.kind == "message" or self.message is not None


#: What a message does that arrives while its session is busy: it becomes a turn of its own after what waits before it,
#: joins the others that wait to be collected, enters the running turn, or stops that and takes the place of all others.
QueueMode: TypeAlias = Literal["followup", "collect", "steer", "interrupt"]
QUEUE_MODES: tuple[QueueMode, ...] = get_args(QueueMode)

#: What happens to a message for a lane in which as many wait as may: it is refused before it is accepted, or the oldest
#: one that waits, or the new one, is settled without a turn; or a later one that waits tells how the oldest began.
Overflow: TypeAlias = Literal["reject", "drop_oldest", "drop_newest", "summarize"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)

#: The lane of all deliveries that name no other one.
MAIN = "main"


class DeliveryRef(Versioned, extra="allow"):
    """A delivery as Temporal sees it: a signal's payload and an entry of the driver's inbox.

    Kinds and fields of newer builds are kept: the driver may be older than the API that accepted the delivery.
    """

    id: str
    kind: str = "message"
    token_hash: str
    # Whether its mode is `collect`: older drivers read only this.
    coalesce: bool = False
    # Text, because a newer build may know more modes. None: an older build has accepted it.
    mode: str | None = None
    lane: str = MAIN
    traceparent: str | None = None
    # When the store accepted it. It increases within a session; signals can arrive in another order.
    at: str | None = None
    # Its place among those that wait, if it was moved: it sorts with their `at`. And how often it was changed.
    order: str | None = None
    edits: int = 0
    # If it interrupts: the other messages that were accepted until then are settled.
    supersedes: str | None = None
    # The action whose result it brings, or the input request that it is about.
    action: str | None = None
    request_id: str | None = None


class DispatchReceipt(Wire):
    """The response to a dispatch. The same id, agent, target and input get it again, also after the session is gone."""

    # As the caller chose it, or that of the delivery.
    dispatch_id: str
    accepted_at: str
    session_id: str
    delivery_id: str
    deduplicated: bool = Field(default=False, exclude=True)


class InputOutcome(Wire):
    """The status of a request, as shown to the caller that answered it."""

    request_id: str
    status: InputStatus | Literal["unknown"]
    option_id: str | None = None


class Receipt(Wire):
    """The response to an accepted delivery. The same key and body get the same receipt."""

    session_id: str
    # None for a vote while the quorum is not reached: the session gets no delivery yet.
    delivery_id: str | None
    continuation_token: str | None = None
    # The requests that it answered, or came too late for.
    inputs: tuple[InputOutcome, ...] = ()
    deduplicated: bool = Field(default=False, exclude=True)
    # It is accepted, but the signal to Temporal has not succeeded yet.
    delayed: bool = Field(default=False, exclude=True)


def summary(message: Message) -> str:
    """The text that represents a message in the event stream."""
    if isinstance(message, str):
        return message
    return "\n".join(
        part.text if isinstance(part, TextPart) else f"[file: {part.filename or part.media_type} ({part.media_type})]"
        for part in message
    )
