"""What Temporal keeps: histories read back from the server, and the bytes they hold."""

from collections.abc import Sequence
from itertools import pairwise

from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client

_SIGNALED = EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED
_CHILD = EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED
_ACTIVITY = EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED

Events = Sequence[HistoryEvent]


async def of(client: Client, workflow_id: str, run_id: str | None = None) -> Events:
    history = await client.get_workflow_handle(workflow_id, run_id=run_id).fetch_history()
    return history.events


async def of_all_runs(client: Client, workflow_id: str) -> Sequence[Events]:
    """The histories of a workflow that may have continued as new, oldest first."""
    runs = [await of(client, workflow_id)]
    while before := runs[0][0].workflow_execution_started_event_attributes.continued_execution_run_id:
        runs.insert(0, await of(client, workflow_id, before))
    return runs


def size(events: Events) -> int:
    return sum(event.ByteSize() for event in events)


def signals(events: Events) -> int:
    return _count(events, _SIGNALED)


def children(events: Events) -> int:
    return _count(events, _CHILD)


def activities(events: Events) -> int:
    return _count(events, _ACTIVITY)


def bytes_by_turn(events: Events) -> dict[int, int]:
    """What each turn added to its driver's history: from the start of its child to the start of the next one."""
    starts = [place for place, event in enumerate(events) if event.event_type == _CHILD]
    return {_turn(events[begin]): size(events[begin:end]) for begin, end in pairwise(starts)}


def bytes_by_model_call(events: Events) -> list[int]:
    """What each step added to its turn's history: from one model call to the next."""
    starts = [place for place, event in enumerate(events) if _is_model_call(event)]
    return [size(events[begin:end]) for begin, end in pairwise(starts)]


def _turn(event: HistoryEvent) -> int:
    child = event.start_child_workflow_execution_initiated_event_attributes.workflow_id
    return int(child.rpartition("/")[2])


def _is_model_call(event: HistoryEvent) -> bool:
    attributes = event.activity_task_scheduled_event_attributes
    return event.event_type == _ACTIVITY and attributes.activity_type.name == "call_model"


def _count(events: Events, kind: "EventType.ValueType") -> int:
    return sum(event.event_type == kind for event in events)
