"""What Temporal says of a turn, and when its work has last given a sign of life."""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.activity.v1 import ActivityOptions
from temporalio.api.enums.v1 import TimeoutType
from temporalio.api.failure.v1 import ApplicationFailureInfo, Failure, TimeoutFailureInfo
from temporalio.api.workflow.v1 import PendingActivityInfo, PendingWorkflowTaskInfo
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionResponse

from perdure.runtime.drivers.liveness import Sign, last_sign

SILENT = Failure(timeout_failure_info=TimeoutFailureInfo(timeout_type=TimeoutType.TIMEOUT_TYPE_HEARTBEAT))
TOO_LONG = Failure(timeout_failure_info=TimeoutFailureInfo(timeout_type=TimeoutType.TIMEOUT_TYPE_START_TO_CLOSE))
REFUSED = Failure(application_failure_info=ApplicationFailureInfo(type="MODEL_FAILED"))


def at(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(seconds))


def activity(*, scheduled: float, started: float = 0, beat: float = 0, **more: Any) -> PendingActivityInfo:
    times = {"scheduled_time": scheduled, "last_started_time": started, "last_heartbeat_time": beat}
    return PendingActivityInfo(**{name: at(time) for name, time in times.items() if time}, **more)


def turn(*activities: PendingActivityInfo, decision: float = 0) -> DescribeWorkflowExecutionResponse:
    task = PendingWorkflowTaskInfo(original_scheduled_time=at(decision)) if decision else None
    return DescribeWorkflowExecutionResponse(pending_activities=activities, pending_workflow_task=task)


@pytest.mark.parametrize(
    ("found", "seen"),
    [
        (turn(activity(scheduled=10, started=11)), 11),
        (turn(activity(scheduled=10, started=11, beat=15)), 15),
        # Its worker is dead, and the next attempt waits for another one.
        (turn(activity(scheduled=21, beat=15, last_failure=SILENT)), 15),
        (turn(activity(scheduled=21, last_failure=SILENT)), 21),
        # The next attempt has begun.
        (turn(activity(scheduled=21, started=22, beat=15, last_failure=SILENT)), 22),
        # A worker has said that the attempt failed; the next one is due at 300.
        (turn(activity(scheduled=300, beat=15, last_failure=REFUSED)), 300),
        (turn(activity(scheduled=40, beat=15, last_failure=TOO_LONG)), 40),
        # Nobody has taken it up.
        (turn(activity(scheduled=10)), 10),
        (turn(decision=12), 12),
        # One of the calls has a worker.
        (turn(activity(scheduled=10), activity(scheduled=10, started=11, beat=40), decision=30), 40),
    ],
)
def test_the_last_sign_of_life_is_the_newest_of_all_that_is_under_way(
    found: DescribeWorkflowExecutionResponse, seen: float
) -> None:
    sign = last_sign(found, 5)

    assert sign is not None
    assert (sign.at, sign.heartbeat) == (seen, 5)


@pytest.mark.parametrize("found", [turn(), turn(activity(scheduled=10, paused=True))])
def test_a_turn_that_waits_for_no_worker_has_none(found: DescribeWorkflowExecutionResponse) -> None:
    assert last_sign(found, 5) is None


def test_a_tool_may_be_silent_for_as_long_as_it_has_declared() -> None:
    options = ActivityOptions(heartbeat_timeout=Duration(seconds=60))
    found = turn(activity(scheduled=10, started=11, activity_options=options, last_worker_identity="7@host"))

    assert last_sign(found, 5) == Sign(at=11, heartbeat=60, held_by="7@host")
