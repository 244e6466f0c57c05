"""The errors of Perdure, in one tree.

PerdureError
├── Invalid                 400  the request is not valid
│   └── InvalidJson              its body is not JSON
├── Unauthenticated         401
├── Forbidden               403  ForbiddenResponder: the caller may not answer this request
├── NotFound                404  SessionNotFound, AgentNotFound, InputNotFound, CheckpointNotFound and more
├── SessionDeleted          410  the key of the request belongs to a session that was deleted
├── Conflict                409
│   ├── NoActiveSession          no session waits on this token
│   ├── TokenConflict            two live sessions cannot own one token
│   ├── IdempotencyConflict      one key, two different requests
│   ├── InputClosed, InputExpired
│   ├── SessionBusy              only possible while no turn runs and no delivery waits
│   └── ForkRefused              no boundary at which a fork would be safe
├── TooLarge 413, UnsupportedMedia 415, InboxFull 429
├── Unavailable             503  try again: nothing was accepted
│   ├── OutcomeUnknown           the database died during a commit: try again, with the same key
│   └── NoDriver, NoWorker       no workflow of the session runs, or no worker polls its task queue
├── DriverRefused                Temporal refuses a signal to this session
├── Superseded                   an attempt that is no longer the newest one
├── TurnCancelled                a cancel of this turn was accepted
├── BudgetReached                a model call does not fit into a budget
├── DeadlineExceeded             a turn had not ended by its deadline
├── KillsWorkers                 too many workers have died in one step
├── ModelFailed                  the provider refused or failed
├── RunStepFailed, RunCancelled  a step of a run has failed; the run was cancelled
├── ExecutionFailed              the session of an execution has ended without a result
├── ToolFailed                   a tool raised, and its declaration allows a retry
├── InvalidDeclaration, Misconfigured
├── SchemaUnknown, SchemaOutdated the database is not of Perdure, or of another version
└── NeedsAttention               this worker cannot continue the session; another worker or an operator may
    ├── SessionGone, AgentGone, UnreadableState, StoreBehind, BuildGone, CannotReplay
    └── RunGone, RunDiverged, RunKillsWorkers, RunStuck
"""

from typing import Any, ClassVar

from .bounds import whole


class PerdureError(Exception):
    """Something went wrong."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    #: Whether message and details contain only Perdure's own words, ids and numbers, wherever it is raised.
    plain: ClassVar[bool] = False

    def __init__(self, message: str | None = None, **details: Any) -> None:
        # It may quote the text of a tool or a provider; it goes to Temporal and to readers.
        self.message = whole(message or self._sentence())
        self.details = details
        super().__init__(self.message)

    def bare(self) -> tuple[str, dict[str, Any]]:
        """Message and details for places where content is not allowed."""
        if self.plain:
            return self.message, self.details
        return self._sentence(), {name: self.details[name] for name in ("errorId",) if name in self.details}

    def _sentence(self) -> str:
        return (type(self).__doc__ or "").strip()


class Invalid(PerdureError):
    """The request is not valid."""

    status = 400
    code = "invalid_request"


class UnknownLane(PerdureError):
    """The agent has no such lane."""

    status = 400
    code = "unknown_lane"


class InvalidJson(Invalid):
    """Invalid JSON body."""

    code = "invalid_json"


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


class RunNotFound(NotFound):
    """There is no such run."""

    code = "run_not_found"


class RunUnknown(NotFound):
    """No run of this name is served here."""

    code = "workflow_not_found"


class CallbackNotPending(NotFound):
    """Session callback not pending."""

    code = "callback_not_pending"


class DeadLetterNotFound(NotFound):
    """There is no such failed turn."""

    code = "dead_letter_not_found"


class InputNotFound(NotFound):
    """There is no such request to answer."""

    code = "input_not_found"


class CheckpointNotFound(NotFound):
    """There is no such checkpoint, or it is not kept any more."""

    code = "checkpoint_not_found"


class SessionDeleted(PerdureError):
    """This Idempotency-Key belongs to a session that was deleted."""

    status = 410
    code = "session_deleted"


class Conflict(PerdureError):
    """The request conflicts with the current state."""

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


class SessionBusy(Conflict):
    """What was asked for is only possible while the session is idle."""

    code = "session_busy"


class ForkRefused(Conflict):
    """The session cannot be forked there."""

    code = "fork_boundary_not_offered"


class RestoreRefused(Conflict):
    """The session cannot be restored to that turn."""

    code = "restore_refused"


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
    """Temporal refuses a signal to this session."""

    code = "driver_refused"


class Superseded(PerdureError):
    """A newer attempt has taken over; this one may no longer write."""

    code = "superseded"
    # Temporal ignores the result of an older attempt. The newest one may be refused too, when the clock of the server
    # that scheduled it is behind; it is retried until the clock has caught up.
    retryable = True


class TurnCancelled(PerdureError):
    """The turn was cancelled."""

    code = "TURN_CANCELLED"


class BudgetReached(PerdureError):
    """The next model call does not fit into the budget."""

    code = "BUDGET_REACHED"
    plain = True


class DeadlineExceeded(PerdureError):
    """The turn was stopped at its deadline."""

    code = "TURN_DEADLINE_EXCEEDED"
    plain = True


class KillsWorkers(PerdureError):
    """The workers of too many attempts at the step have died."""

    code = "STEP_KILLS_WORKERS"
    plain = True


class ModelFailed(PerdureError):
    """The model could not be called, or did not answer."""

    code = "MODEL_CALL_FAILED"

    def __init__(
        self,
        message: str | None = None,
        *,
        transient: bool = False,
        retry_after: float | None = None,
        reason: str | None = None,
        too_long: bool = False,
        **details: Any,
    ) -> None:
        """`transient`: a retry can help. `reason`: the provider's text, only for the log.

        `too_long`: the request is larger than the model's context window.
        """
        super().__init__(message, **details)
        self.too_long = too_long
        self.transient = transient
        self.retry_after = retry_after
        self.reason = reason


class ToolFailed(PerdureError):
    """The tool failed, and may be tried again."""

    code = "ACTION_RESULT_FAILED"
    retryable = True

    def __init__(self, message: str | None = None, *, reason: str | None = None, **details: Any) -> None:
        """`reason`: what the tool has raised, for the report of the attempt."""
        super().__init__(message, **details)
        self.reason = reason


class RunStepFailed(PerdureError):
    """A step of the run has failed."""

    code = "RUN_STEP_FAILED"

    def __init__(self, step: str, error: str, message: str) -> None:
        """`error`: the type of what was raised, and `message` its text."""
        super().__init__(message)
        self.step = step
        self.error = error

    def __str__(self) -> str:
        return f"{self.step}: {self.error}: {self.message}"


class StepOutcomeUnknown(RunStepFailed):
    """The step was interrupted. It may have had its effect, and is not done again."""

    code = "STEP_OUTCOME_UNKNOWN"

    def __init__(self, step: str) -> None:
        super().__init__(step, "StepOutcomeUnknown", f"The step {step!r} was interrupted; it is not done again.")

    def __str__(self) -> str:
        return self.message


class RunCancelled(PerdureError):
    """The run was cancelled."""

    code = "RUN_CANCELLED"


class ExecutionFailed(PerdureError):
    """The session of this execution has ended without a result."""

    code = "execution_failed"

    def __init__(self, message: str, failure: str, session_id: str) -> None:
        """`failure`: the code with which the session has failed, as in its last event."""
        super().__init__(message, session_id=session_id)
        self.failure = failure
        self.session_id = session_id

    def __str__(self) -> str:
        return f"{self.failure}: {self.message}"


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
    """The session cannot continue here."""

    code = "NEEDS_ATTENTION"
    plain = True
    # Another worker may be able to serve the session.
    retryable = True


class SessionGone(NeedsAttention):
    """The store does not contain this session."""

    code = "SESSION_GONE"


class AgentGone(NeedsAttention):
    """The agent of this session is not served here."""

    code = "AGENT_GONE"


class RunGone(NeedsAttention):
    """This run is not served here."""

    code = "RUN_GONE"


class RunDiverged(NeedsAttention):
    """The code of the run makes other steps than it has recorded."""

    code = "RUN_DIVERGED"
    # The message has the names of steps, which may hold content.
    plain = False


class RunKillsWorkers(NeedsAttention):
    """The workers of too many attempts at the run have died."""

    code = "RUN_KILLS_WORKERS"


class RunStuck(NeedsAttention):
    """The run cannot be entered; the worker's log says why."""

    code = "RUN_STUCK"


class WrongPool(NeedsAttention):
    """The tool of this call runs in another pool of workers."""

    code = "WRONG_POOL"


class UnreadableState(NeedsAttention):
    """The state of this session cannot be read by this version."""

    code = "UNREADABLE_STATE"


class StoreBehind(NeedsAttention):
    """The store is older than this session; it may have been restored from a copy."""

    code = "STORE_BEHIND"


class BuildGone(NeedsAttention):
    """No worker of this session's build runs."""

    code = "BUILD_GONE"

    @classmethod
    def of(cls, build: str) -> str:
        return f"No worker of build {build} runs, and the session is on this build."


class CannotReplay(NeedsAttention):
    """The code of the workers does not replay the session's workflow."""

    code = "CANNOT_REPLAY"
