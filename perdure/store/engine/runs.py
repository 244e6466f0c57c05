"""The records of runs."""

from datetime import datetime
from typing import Any

from perdure.store.runs import NewRun, RunChange, RunPage, RunQuery, RunRecord
from perdure.store.values import NewSession, SessionRow

from .database import NEWEST, Row, Transaction, Value
from .rows import decode_some, encode, encode_some, printable


async def create_run(tx: Transaction, session: NewSession, new: NewRun, now: str) -> None:
    await tx.run(
        "insert_run",
        session_id=session.session_id,
        name=new.name,
        owner=session.principal.owner,
        input=encode(new.input),
        trace_carrier=encode_some(new.trace_carrier),
        now=now,
    )


async def change_run(tx: Transaction, run_id: str, change: RunChange) -> None:
    await tx.run(
        "change_run", session_id=run_id, waiting_for=printable(change.waiting_for), attempts=int(change.enters)
    )


async def end_run(tx: Transaction, session: SessionRow, change: RunChange | None, now: str) -> None:
    """End the record with the end of its session, whoever ends that. One that has ended stays as it is."""
    found = await tx.row("run", session_id=session.session_id)
    if found is None:
        return
    completed = session.status == "completed"
    error = session.error or {}
    told = {"name": error.get("name") or error.get("code", ""), "message": error.get("message", "")}
    lasted = datetime.fromisoformat(now) - datetime.fromisoformat(found["started_at"])
    await tx.run(
        "end_run",
        session_id=session.session_id,
        status="completed" if completed else "errored",
        result=encode(change.result) if completed and change is not None else None,
        error=None if completed else encode(told),
        # Clocks of processes differ.
        duration_ms=max(0, round(lasted.total_seconds() * 1000)),
        now=now,
    )


def query_of(query: RunQuery) -> tuple[str, dict[str, Value]]:
    """The query that has an index for this filter, and its values."""
    at, run_id = query.after or (NEWEST.at, NEWEST.id)
    values: dict[str, Value] = {"started_at": at, "session_id": run_id, "limit": query.limit + 1}
    if query.owner is not None:
        return "runs_of_owner", {**values, "owner": query.owner, "name": query.name, "status": query.status}
    if query.name is not None:
        return "runs_of_name", {**values, "name": query.name, "status": query.status}
    if query.status is not None:
        return "runs_by_status", {**values, "status": query.status}
    return "runs", values


def page_of(found: list[Row], limit: int) -> RunPage:
    """The page, of rows of which one more shows whether there is another page."""
    runs = [record(row) for row in found[:limit]]
    return RunPage(runs, (runs[-1].started_at, runs[-1].run_id) if len(found) > limit else None)


def record(row: Row) -> RunRecord:
    result: Any = decode_some(row["result"])
    return RunRecord(
        run_id=row["session_id"],
        name=row["workflow_name"],
        status=row["status"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        duration_ms=row["duration_ms"],
        input=decode_some(row["input"]),
        result=result,
        error=decode_some(row["error"]),
        trace_carrier=decode_some(row["trace_carrier"]),
        waiting_for=row["waiting_for"],
        attempts=row["attempts"],
    )
