"""The one error of the client."""

from typing import Any

#: No response: the API could not be reached, or the connection broke.
UNREACHABLE = "unreachable"
#: A response of a form that none of our routes has.
UNREADABLE = "unreadable"
#: The stream has ended, and the turn has not.
NO_BOUNDARY = "no_boundary"

#: What an API, or what stands before it, says when the same request may succeed later.
_PASSING = frozenset({425, 429, 502, 503, 504})


class ClientError(Exception):
    """A request that failed: the status and code of the API, and its text."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        details: dict[str, Any] | None = None,
        retry_after: float | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        #: Of the response; None when there was none.
        self.status = status
        #: `session_not_active`, `unauthorized`, …; of the client itself `unreachable`, `no_boundary`, `invalid`, ….
        self.code = code
        #: What else the response had: `violations`, `errorId`, `nearest`, ….
        self.details = details or {}
        #: The seconds after which the API wants to be asked again.
        self.retry_after = retry_after
        #: The `Idempotency-Key` of the request: the same request may be sent again under it, and is accepted once.
        self.key = key

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later."""
        return self.code == UNREACHABLE if self.status is None else self.status in _PASSING

    def __str__(self) -> str:
        about = " ".join(str(each) for each in (self.status, self.code) if each is not None)
        return f"{self.message} ({about})" if about else self.message
