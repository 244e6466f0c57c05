"""The errors of Perdure, in one tree.

PerdureError
├── Invalid                 400  the request does not mean anything
├── Unauthenticated         401
├── Forbidden               403
│   └── ForbiddenResponder       somebody else has to answer this request
├── NotFound                404
│   ├── SessionNotFound
│   ├── AgentNotFound
│   └── InputNotFound
├── Conflict                409
│   ├── NoActiveSession          nobody waits on this token
│   ├── TokenConflict            two live sessions may not own one token
│   ├── IdempotencyConflict      one key, two different requests
│   ├── InputClosed              somebody has answered, or nobody needs to any more
│   └── InputExpired             nobody has answered in time
├── TooLarge                413
├── UnsupportedMedia        415
├── InboxFull               429  too many deliveries wait in this session: nothing was accepted
├── Unavailable             503  try again: nothing was accepted
│   ├── OutcomeUnknown           the database died in the middle of a commit: try again, with the same key
│   ├── NoDriver                 no workflow drives this session now; what it was sent before stays accepted
│   └── NoWorker                 no worker would take up the session if it were started
├── DriverRefused                Temporal does not take what this session is to be told
├── Superseded                   an attempt that is no longer the newest one
├── TurnCancelled                somebody wants this turn stopped, and that was accepted
├── ModelFailed                  the provider refused or failed
├── ToolFailed                   a tool raised, and its declaration allows another try
├── InvalidDeclaration           an agent or a tool is not declared in a way that can work
├── Misconfigured                a setting cannot work, or needs something that is not installed
├── SchemaUnknown                the database is newer than this code, or not ours at all
├── SchemaOutdated               the database must be migrated first
└── NeedsAttention               this worker cannot go on with the session; another one, or an operator, may
    ├── SessionGone
    ├── AgentGone
    ├── UnreadableState
    └── StoreBehind              the store is older than what the session remembers
"""

from typing import Any, ClassVar

from .text import whole


class PerdureError(Exception):
    """Something went wrong."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    #: Whether message and details are made of our own words, ids and numbers alone, whoever raises it.
    plain: ClassVar[bool] = False

    def __init__(self, message: str | None = None, **details: Any) -> None:
        # It may quote what a tool or a provider said; it goes to the engine and to readers.
        self.message = whole(message or self._sentence())
        self.details = details
        super().__init__(self.message)

    def bare(self) -> tuple[str, dict[str, Any]]:
        """Message and details for places where no content may go."""
        if self.plain:
            return self.message, self.details
        return self._sentence(), {name: self.details[name] for name in ("errorId",) if name in self.details}

    def _sentence(self) -> str:
        return (type(self).__doc__ or "").strip()


class Invalid(PerdureError):
    """The request is not valid."""

    status = 400
    code = "invalid_request"


class Unauthenticated(PerdureError):
    """Authorization is required for this route."""

    status = 401
    code = "unauthorized"


class Forbidden(PerdureError):
    """Forbidden."""

    status = 403
    code = "forbidden"


class ForbiddenResponder(Forbidden):
    """This request is for somebody else to answer; it stays open."""

    code = "forbidden_responder"


class NotFound(PerdureError):
    """Not found."""

    status = 404
    code = "not_found"


class SessionNotFound(NotFound):
    """Session not found."""

    code = "session_not_found"


class AgentNotFound(NotFound):
    """No agent of this name is served here."""

    code = "agent_not_found"


class InputNotFound(NotFound):
    """There is no such request to answer."""

    code = "input_not_found"


class Conflict(PerdureError):
    """The request conflicts with what already is."""

    status = 409
    code = "conflict"


class NoActiveSession(Conflict):
    """No session waits on this continuation token; start one."""

    code = "NO_ACTIVE_SESSION"
    wire_code: ClassVar[str] = "session_not_active"


class TokenConflict(Conflict):
    """Another live session owns this continuation token."""

    code = "TOKEN_CONFLICT"


class IdempotencyConflict(Conflict):
    """This Idempotency-Key was used before with another request."""

    code = "idempotency_key_reused"


class InputClosed(Conflict):
    """The request is closed with another outcome."""

    code = "input_closed"


class InputExpired(Conflict):
    """The time to answer this request is over."""

    code = "input_expired"


class TooLarge(PerdureError):
    """The request is too large."""

    status = 413
    code = "too_large"


class UnsupportedMedia(PerdureError):
    """The media type is not allowed."""

    status = 415
    code = "unsupported_media_type"


class InboxFull(PerdureError):
    """Too many deliveries wait in this session; nothing was accepted."""

    status = 429
    code = "inbox_full"


class Unavailable(PerdureError):
    """The service cannot take this right now; nothing was accepted."""

    status = 503
    code = "unavailable"
    retryable = True


class OutcomeUnknown(Unavailable):
    """Whether this was accepted is not known; repeat it with the same Idempotency-Key, and it is accepted once."""

    code = "outcome_unknown"


class NoDriver(Unavailable):
    """No workflow drives this session at the moment."""


class NoWorker(Unavailable):
    """No worker takes up sessions at the moment."""


class DriverRefused(PerdureError):
    """Temporal does not take what this session is to be told."""

    code = "driver_refused"


class Superseded(PerdureError):
    """A newer attempt has taken over; this one may no longer write."""

    code = "superseded"
    # The engine ignores what an older attempt reports. The newest one may be refused too, when the clock of the server
    # that scheduled it is behind; it is tried again until the clock has caught up.
    retryable = True


class TurnCancelled(PerdureError):
    """The turn was cancelled."""

    code = "TURN_CANCELLED"


class ModelFailed(PerdureError):
    """The model could not be asked, or did not answer."""

    code = "MODEL_CALL_FAILED"

    def __init__(
        self,
        message: str | None = None,
        *,
        transient: bool = False,
        retry_after: float | None = None,
        reason: str | None = None,
        **details: Any,
    ) -> None:
        """`transient`: asking again can help. `reason`: what the provider said, for the log and for nobody else."""
        super().__init__(message, **details)
        self.transient = transient
        self.retry_after = retry_after
        self.reason = reason


class ToolFailed(PerdureError):
    """The tool failed, and may be tried again."""

    code = "ACTION_RESULT_FAILED"
    retryable = True


class InvalidDeclaration(PerdureError):
    """An agent or a tool is not declared in a way that can work."""

    code = "INVALID_DECLARATION"


class Misconfigured(PerdureError):
    """A setting cannot work."""

    code = "misconfigured"


class SchemaUnknown(PerdureError):
    """The database has a schema that this code does not know."""

    code = "schema_unknown"


class SchemaOutdated(PerdureError):
    """The database has an older schema than this code needs."""

    code = "schema_outdated"


class NeedsAttention(PerdureError):
    """The session cannot go on here."""

    code = "NEEDS_ATTENTION"
    plain = True
    # Another worker may have what this one lacks.
    retryable = True


class SessionGone(NeedsAttention):
    """The store knows no such session."""

    code = "SESSION_GONE"


class AgentGone(NeedsAttention):
    """The agent of this session is not served here."""

    code = "AGENT_GONE"


class UnreadableState(NeedsAttention):
    """The state of this session cannot be read by this version."""

    code = "UNREADABLE_STATE"


class StoreBehind(NeedsAttention):
    """The store is older than what this session remembers; it may have been restored from a copy."""

    code = "STORE_BEHIND"
