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
├── Unavailable             503  try again: nothing was accepted
├── Superseded                   an attempt that is no longer the newest one
├── ModelFailed                  the provider refused or failed
├── ToolFailed                   a tool raised, and its declaration allows another try
├── InvalidDeclaration           an agent or a tool is not declared in a way that can work
├── Misconfigured                a setting cannot work, or needs something that is not installed
├── SchemaUnknown                the database is newer than this code, or not ours at all
├── SchemaOutdated               the database must be migrated first
└── Structural                   the session cannot go on
    ├── SessionGone
    ├── AgentGone
    └── UnreadableState
"""

from typing import Any, ClassVar


class PerdureError(Exception):
    """Something went wrong."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None, **details: Any) -> None:
        self.message = message or (type(self).__doc__ or "").strip()
        self.details = details
        super().__init__(self.message)


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


class Unavailable(PerdureError):
    """The service cannot take this right now; nothing was accepted."""

    status = 503
    code = "unavailable"
    retryable = True


class Superseded(PerdureError):
    """A newer attempt has taken over; this one may no longer write."""

    code = "superseded"


class ModelFailed(PerdureError):
    """The model provider failed; `transient` says whether asking again can help."""

    code = "MODEL_CALL_FAILED"

    def __init__(
        self, message: str | None = None, *, transient: bool = False, retry_after: float | None = None, **details: Any
    ) -> None:
        super().__init__(message, **details)
        self.transient = transient
        self.retry_after = retry_after


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


class Structural(PerdureError):
    """The session cannot go on."""

    code = "STRUCTURAL"


class SessionGone(Structural):
    """The store knows no such session."""

    code = "SESSION_GONE"


class AgentGone(Structural):
    """The agent of this session is no longer served."""

    code = "AGENT_GONE"


class UnreadableState(Structural):
    """The state of this session cannot be read by this version."""

    code = "UNREADABLE_STATE"
