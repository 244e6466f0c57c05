"""Sessions whose driver is gone, or whose state only an operator can mend."""

from __future__ import annotations

import logging

from temporalio.client import WorkflowExecutionStatus

from perdure.errors import StoreBehind
from perdure.protocol.requests import Attention
from perdure.session.state import OPERATOR_CANCELLED, OPERATOR_TERMINATED, Rebuild
from perdure.store.base import Store
from perdure.store.values import SessionRow
from perdure.telemetry import spans

from .client import DriverClient

log = logging.getLogger("perdure.sessions")


async def start_lost_driver(store: Store, driver: DriverClient, row: SessionRow, *, unattended: bool = False) -> str:
    """Repair a session that is open in the store but has no running workflow. The result says what was found.

    `unattended`: start a workflow also when no worker would run it; else that raises `NoWorker`.
    """
    session_id = row.session_id
    status = await driver.status(session_id)
    behind = row.attention is not None and row.attention["code"] == StoreBehind.code
    if status is None and behind:
        # Its workflow had ended, and Temporal has deleted it since. An operator still has to decide.
        return "the store is older than the session; an operator has to decide"
    match status:
        case WorkflowExecutionStatus.RUNNING | WorkflowExecutionStatus.CONTINUED_AS_NEW:
            return "its workflow runs"
        case WorkflowExecutionStatus.COMPLETED:
            # A workflow ends only after the store has recorded it, so this store was restored from an older backup.
            message = "The session's workflow has ended, and this store does not know of it."
            await set_attention(store, session_id, Attention(code=StoreBehind.code, message=message))
            return "the store is older than the session; an operator has to decide"
        case WorkflowExecutionStatus.TERMINATED:
            rebuild = Rebuild(reason="WORKFLOW_TERMINATED", ends=OPERATOR_TERMINATED)
        case WorkflowExecutionStatus.CANCELED:
            rebuild = Rebuild(reason="WORKFLOW_CANCELLED", ends=OPERATOR_CANCELLED)
        case None if row.is_new_fork:
            # Temporal was not reachable when the session was forked.
            rebuild = Rebuild(reason="FORKED")
        case None:
            rebuild = Rebuild(reason="WORKFLOW_LOST")
        case _:
            rebuild = Rebuild(reason="WORKFLOW_FAILED")
    await driver.rebuild(session_id, rebuild, unattended=unattended, of=row)
    if await end_if_deleted(store, driver, session_id):
        return "it was deleted meanwhile"
    then = "it is ended" if rebuild.ends else "it is started from the store"
    log.warning("session %s had no workflow (%s); %s", session_id, rebuild.reason, then)
    return f"it had no workflow ({rebuild.reason}); {then}"


async def end_if_deleted(store: Store, driver: DriverClient, session_id: str) -> bool:
    """Delete the session's workflow if the session was deleted before the workflow was started.

    While the session has a row, its deletion is still to look for workflows.
    """
    if await store.deletion(session_id) is None or await store.session(session_id) is not None:
        return False
    await driver.delete(session_id)
    return True


async def set_attention(store: Store, session_id: str, attention: Attention) -> None:
    """Mark the session as in need of attention, in the store, the log and the metrics."""
    if await store.set_attention(session_id, attention):
        log.warning("session %s needs attention: %s", session_id, attention.code)
        spans.needs_attention(attention.code)
