"""Whether a running turn has a worker: the last sign of life that Temporal has of its work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.enums.v1 import TimeoutType
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionResponse
from temporalio.client import Client, WorkflowExecutionStatus

from perdure.protocol import names
from perdure.runtime.connect import ABSENT, in_time
from perdure.store.values import SessionRow

from .client import DriverClient

#: How many sessions are asked about at once.
_AT_ONCE = 8

#: How an attempt ends whose worker has died. After any other end a worker was there, and has said so.
_DEATHS = (TimeoutType.TIMEOUT_TYPE_HEARTBEAT, TimeoutType.TIMEOUT_TYPE_SCHEDULE_TO_START)


@dataclass(frozen=True)
class Sign:
    """The last sign of life of a turn."""

    #: Seconds since the epoch, by Temporal's clock.
    at: float
    #: The heartbeat timeout of the work: for how many seconds a worker that lives may be silent.
    heartbeat: float
    #: The worker that had the work last.
    held_by: str | None = None


class Liveness:
    """Asks Temporal about turns that run."""

    def __init__(self, drivers: DriverClient) -> None:
        self._drivers = drivers
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def last_sign(self, row: SessionRow, heartbeat: float) -> Sign | None:
        """The last sign of life of the session's turn; None: nothing of it waits for a worker now.

        `heartbeat`: the timeout of work that has none of its own. `Unavailable` when Temporal does not answer.
        """
        async with self._turns:
            # The turn has a workflow of its own, or it is a part of its driver.
            for workflow_id in (names.turn_workflow(row.session_id, row.turns - 1), row.session_id):
                found = await self._drivers.execution(workflow_id)
                if found is not None and found.status == WorkflowExecutionStatus.RUNNING:
                    return last_sign(found.raw_description, heartbeat)
        return None


def last_sign(found: DescribeWorkflowExecutionResponse, heartbeat: float) -> Sign | None:
    """The newest sign of all that is under way in a workflow; None when nothing is, or an operator has paused it."""
    if any(each.paused for each in found.pending_activities):
        return None
    signs = list(_signs(found, heartbeat))
    if not signs:
        return None
    newest = max(signs, key=lambda sign: sign.at)
    return Sign(newest.at, max(each.heartbeat for each in signs), newest.held_by)


def _signs(found: DescribeWorkflowExecutionResponse, heartbeat: float) -> Iterator[Sign]:
    for activity in found.pending_activities:
        options = activity.activity_options
        own = options.heartbeat_timeout.ToTimedelta().total_seconds() if options.HasField("heartbeat_timeout") else 0.0
        yield Sign(_seen(activity), max(own, heartbeat), activity.last_worker_identity or None)
    if found.HasField("pending_workflow_task"):
        # A decision takes milliseconds: one that is due for long has no worker that can make it.
        task = found.pending_workflow_task
        yield Sign(seconds_of(task.original_scheduled_time) or seconds_of(task.scheduled_time), heartbeat)


def _seen(activity: PendingActivityInfo) -> float:
    seen = max(seconds_of(activity.last_heartbeat_time), seconds_of(activity.last_started_time))
    failure = activity.last_failure
    died = failure.HasField("timeout_failure_info") and failure.timeout_failure_info.timeout_type in _DEATHS
    # A worker that has reported a failure lives, and the pause until the next attempt is meant. After a death the next
    # attempt is only scheduled, by nobody who works; without any heartbeat before it, no better time is known.
    return seen if died and seen else max(seen, seconds_of(activity.scheduled_time))


def seconds_of(at: Timestamp) -> float:
    """Seconds since 1970; 0 of a time that is not known."""
    return at.seconds + at.nanos / 1e9


@dataclass(frozen=True)
class Description:
    """A session as an operator sees it."""

    row: SessionRow
    workflow_id: str
    # None when Temporal does not answer.
    run_id: str | None
    workflow_status: str | None
    ui_url: str


async def description_of(client: Client, row: SessionRow, ui_url: str) -> Description:
    """The session, and what Temporal says of its workflow, if there is one and Temporal answers."""
    url = f"{ui_url}/namespaces/{client.namespace}/workflows/{row.session_id}"
    run_id = status = None
    with contextlib.suppress(*ABSENT):
        found = await in_time(client.get_workflow_handle(row.session_id).describe(), timedelta(seconds=2))
        run_id, status = found.run_id, found.status.name.lower() if found.status else None
    return Description(row=row, workflow_id=row.session_id, run_id=run_id, workflow_status=status, ui_url=url)
