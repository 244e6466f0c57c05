"""What becomes of an open session that no workflow drives."""

from __future__ import annotations

import logging

from temporalio.client import WorkflowExecutionStatus

from perdure import telemetry
from perdure.errors import StoreBehind
from perdure.protocol.requests import Attention
from perdure.session.state import OPERATOR_CANCELLED, OPERATOR_TERMINATED, Rebuild
from perdure.store.base import Store
from perdure.store.values import SessionRow

from .driver import Driver

log = logging.getLogger("perdure.sessions")


async def restore(store: Store, driver: Driver, row: SessionRow, *, unattended: bool = False) -> str:
    """The store holds the session as open and no workflow drives it: find out why, and mend it. What was found.

    `unattended`: also when no worker takes up what is started; else that is `NoWorker`.
    """
    session_id = row.session_id
    status = await driver.status(session_id)
    behind = row.attention is not None and row.attention["code"] == StoreBehind.code
    if status is None and behind:
        # It ended in its time, and Temporal has forgotten that since: what to do is an operator's decision still.
        return "the store is older than the session; an operator has to decide"
    match status:
        case WorkflowExecutionStatus.RUNNING | WorkflowExecutionStatus.CONTINUED_AS_NEW:
            return "its workflow runs"
        case WorkflowExecutionStatus.COMPLETED:
            # It told the store so in its time: this store is older than that.
            message = "The session's workflow has ended, and this store does not know of it."
            await attend(store, session_id, Attention(code=StoreBehind.code, message=message))
            return "the store is older than the session; an operator has to decide"
        case WorkflowExecutionStatus.TERMINATED:
            rebuild = Rebuild(reason="WORKFLOW_TERMINATED", ends=OPERATOR_TERMINATED)
        case WorkflowExecutionStatus.CANCELED:
            rebuild = Rebuild(reason="WORKFLOW_CANCELLED", ends=OPERATOR_CANCELLED)
        case None:
            rebuild = Rebuild(reason="WORKFLOW_LOST")
        case _:
            rebuild = Rebuild(reason="WORKFLOW_FAILED")
    await driver.rebuild(session_id, rebuild, unattended=unattended)
    log.warning("session %s had no workflow (%s); it is started from the store", session_id, rebuild.reason)
    return f"it had no workflow ({rebuild.reason}); it is started from the store"


async def attend(store: Store, session_id: str, attention: Attention) -> None:
    """Say that the session cannot go on by itself."""
    if await store.attend(session_id, attention):
        log.warning("session %s needs attention: %s", session_id, attention.code)
        telemetry.needs_attention(attention.code)
