"""Attempts and leases, as their owners and operators see them."""

from datetime import UTC, datetime, timedelta

from perdure.protocol import names
from perdure.protocol.events import EventType
from perdure.protocol.stream_policy import REDACTED, SHOWS_ALL, StreamPolicy
from perdure.protocol.wire import JsonObject
from perdure.store.attempts import AttemptRow

#: Where the leases come from that are shown.
SOURCE = "temporal heartbeat"

#: Seconds by which the lease that is shown may be older than the true one: it is noted now and then.
_NOTED_EVERY = timedelta(seconds=5)
#: Billionths of a dollar in a millionth.
_MICRO = 1_000


def place(session_id: str, turn: int, step: int) -> JsonObject:
    """Where an attempt works; the function of a run has no turns."""
    if session_id.startswith(names.RUN_ID):
        return {"runId": session_id}
    return {"sessionId": session_id, "turnId": names.turn_id(turn), "stepIndex": step}


def shown(row: AttemptRow, policy: StreamPolicy = SHOWS_ALL) -> JsonObject:
    """One attempt. `policy`: what readers do not see of events, they do not see here, either."""
    key = row.key
    known: JsonObject = {
        "attemptId": row.attempt_id,
        **place(row.session_id, key.turn, key.step),
        "scope": key.scope,
        "number": row.number,
        "generation": key.generation,
        "worker": row.worker,
        "status": row.status,
        "startedAt": row.started_at,
        "endedAt": row.ended_at,
        "leaseExpiresAt": row.lease_expires_at,
        "error": error_of(row, policy),
        "usage": row.usage.model_dump(mode="json"),
        "costUsdMicros": round(row.cost / _MICRO) if row.cost else None,
    }
    return {name: value for name, value in known.items() if value is not None}


def error_of(row: AttemptRow, policy: StreamPolicy) -> JsonObject | None:
    """Why it has failed. What a tool has raised is content."""
    hides = EventType.ACTION_RESULT in policy.redact and row.key.scope != names.MODEL_SCOPE
    return {**row.error, "message": REDACTED} if row.error and hides else row.error


def lease(row: AttemptRow, now: datetime | None = None) -> JsonObject:
    """A running attempt: how long it has run, and whether its worker is silent for too long."""
    now = now or datetime.now(UTC)
    age = (now - datetime.fromisoformat(row.started_at)).total_seconds()
    overdue = now > datetime.fromisoformat(row.lease_expires_at) + _NOTED_EVERY
    return {**shown(row), "ageSeconds": round(max(0.0, age), 3), "overdue": overdue}
