"""What a history contains, in words, so that a recording can be held to what it is for."""

import json
from collections.abc import Sequence
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import WorkflowHistory

_WORKFLOW = {
    "WORKFLOW_EXECUTION_STARTED": "begins",
    "WORKFLOW_EXECUTION_COMPLETED": "ends",
    "WORKFLOW_EXECUTION_FAILED": "fails",
    "WORKFLOW_EXECUTION_CANCEL_REQUESTED": "is to stop",
    "WORKFLOW_EXECUTION_CANCELED": "is cancelled",
    "WORKFLOW_EXECUTION_TERMINATED": "is terminated",
    "WORKFLOW_EXECUTION_CONTINUED_AS_NEW": "goes on in a new run",
    "TIMER_STARTED": "timer",
    "TIMER_FIRED": "timer fires",
    "TIMER_CANCELED": "timer is cancelled",
    "START_CHILD_WORKFLOW_EXECUTION_INITIATED": "ask turn",
    "START_CHILD_WORKFLOW_EXECUTION_FAILED": "turn is refused",
    "CHILD_WORKFLOW_EXECUTION_STARTED": "turn begins",
    "CHILD_WORKFLOW_EXECUTION_COMPLETED": "turn ends",
    "CHILD_WORKFLOW_EXECUTION_FAILED": "turn fails",
    "CHILD_WORKFLOW_EXECUTION_CANCELED": "turn is cancelled",
    "CHILD_WORKFLOW_EXECUTION_TERMINATED": "turn is terminated",
    "REQUEST_CANCEL_EXTERNAL_WORKFLOW_EXECUTION_INITIATED": "stop turn",
}

_ACTIVITY = {
    "ACTIVITY_TASK_COMPLETED": "ends",
    "ACTIVITY_TASK_FAILED": "fails",
    "ACTIVITY_TASK_TIMED_OUT": "times out",
    "ACTIVITY_TASK_CANCELED": "is stopped",
}

#: A history that was read between these and the decision that they ask for is only half of what it will be.
UNDECIDED = ("WORKFLOW_TASK_SCHEDULED", "WORKFLOW_TASK_STARTED")


def kind(event: HistoryEvent) -> str:
    return EventType.Name(event.event_type).removeprefix("EVENT_TYPE_")


def attributes(event: HistoryEvent) -> Any:
    return getattr(event, event.WhichOneof("attributes") or "")


def story(history: WorkflowHistory) -> list[str]:
    """All that happened, in order, without the decisions' own events."""
    activities: dict[int, str] = {}
    lines: list[str] = []
    for event in history.events:
        about, what = attributes(event), kind(event)
        if what == "ACTIVITY_TASK_SCHEDULED":
            activities[event.event_id] = about.activity_type.name
            lines.append(f"ask {about.activity_type.name}")
        elif what == "ACTIVITY_TASK_CANCEL_REQUESTED":
            lines.append(f"stop {activities[about.scheduled_event_id]}")
        elif what in _ACTIVITY:
            lines.append(f"{activities[about.scheduled_event_id]} {_ACTIVITY[what]}")
        elif what == "WORKFLOW_EXECUTION_SIGNALED":
            lines.append(f"signal {about.signal_name}")
        elif what == "MARKER_RECORDED":
            lines.append(f"patch {_patch(event)}")
        elif what in _WORKFLOW:
            lines.append(_WORKFLOW[what])
    return lines


def contains(lines: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether all of this happened in this order, whatever else happened in between."""
    rest = iter(lines)
    return all(word in rest for word in wanted)


def _patch(event: HistoryEvent) -> str:
    marker = event.marker_recorded_event_attributes
    [payload] = marker.details["patch-data"].payloads
    return str(json.loads(payload.data)["id"])
