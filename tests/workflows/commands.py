"""What workflow code orders while it is replayed, beside what a history says was ordered.

Replay itself compares kinds, names and order alone: not what is asked, of whom, nor for how long.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from google.protobuf.duration_pb2 import Duration
from temporalio import workflow
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import ParentClosePolicy
from temporalio.bridge.proto.child_workflow import child_workflow_pb2
from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_commands import WorkflowCommand
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.client import WorkflowHistory
from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails, WorkflowRunner

from perdure.protocol import names

from .story import attributes, kind

#: What is ordered, by the kind of order: `activity`, `timer`, `turn`, `end`.
Orders: TypeAlias = dict[str, list[dict[str, Any]]]


class CommandRecorder(WorkflowRunner):
    """Runs workflows as another runner does, and keeps what they order."""

    def __init__(self, runner: WorkflowRunner) -> None:
        self._runner = runner
        self.commands: list[WorkflowCommand] = []

    def prepare_workflow(self, defn: workflow._Definition) -> None:  # pyright: ignore[reportPrivateUsage]
        self._runner.prepare_workflow(defn)

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        return _Recorded(self._runner.create_instance(det), self.commands)

    def set_worker_level_failure_exception_types(self, types: Sequence[type[BaseException]]) -> None:
        self._runner.set_worker_level_failure_exception_types(types)


class _Recorded(WorkflowInstance):
    def __init__(self, instance: WorkflowInstance, commands: list[WorkflowCommand]) -> None:
        self._instance = instance
        self._commands = commands

    def activate(self, act: WorkflowActivation) -> WorkflowActivationCompletion:
        completion = self._instance.activate(act)
        self._commands.extend(_copied(_lasting(completion.successful.commands)))
        return completion

    def get_thread_id(self) -> int | None:
        return self._instance.get_thread_id()

    def get_serialization_context(self, command_info: Any) -> Any:
        return self._instance.get_serialization_context(command_info)

    def get_info(self) -> workflow.Info:
        return self._instance.get_info()

    def get_external_store_context(self, command_info: Any) -> Any:
        return self._instance.get_external_store_context(command_info)


def _copied(commands: Iterator[WorkflowCommand]) -> Iterator[WorkflowCommand]:
    # What is sent to Temporal is changed on its way.
    for command in commands:
        copy = WorkflowCommand()
        copy.CopyFrom(command)
        yield copy


def _lasting(commands: Sequence[WorkflowCommand]) -> Iterator[WorkflowCommand]:
    """Without timers that are begun and cancelled in one decision: Temporal never gets them."""
    gone = {each.cancel_timer.seq for each in commands if each.HasField("cancel_timer")}
    return (each for each in commands if not (each.HasField("start_timer") and each.start_timer.seq in gone))


def ordered(commands: Sequence[WorkflowCommand]) -> Orders:
    """What was ordered while a history was replayed."""
    orders: Orders = {"activity": [], "timer": [], "turn": [], "end": []}
    for command in commands:
        what = command.WhichOneof("variant") or ""
        about, summary = getattr(command, what), _summary(command)
        match what:
            case "schedule_activity":
                asked = {
                    "name": about.activity_type,
                    "queue": _asked_at(about.activity_type, about.task_queue),
                    "input": _values(about.arguments),
                }
                orders["activity"].append({**asked, **_bounds(about), **summary})
            case "start_timer":
                orders["timer"].append({"seconds": _seconds(about.start_to_fire_timeout)})
            case "start_child_workflow_execution":
                policy = child_workflow_pb2.ParentClosePolicy.Name(about.parent_close_policy)
                asked = {"id": about.workflow_id, "queue": _kind_of(about.task_queue), "input": _values(about.input)}
                orders["turn"].append({**asked, **_child(about, policy), **summary})
            case "complete_workflow_execution":
                orders["end"].append({"result": _values([about.result])})
            case "continue_as_new_workflow_execution":
                orders["end"].append({"continues as new with": _values(about.arguments)})
            case "fail_workflow_execution":
                orders["end"].append({"failure": about.failure.application_failure_info.type})
            case "cancel_workflow_execution":
                orders["end"].append({"cancelled": True})
            case _:
                pass
    return orders


def recorded(history: WorkflowHistory) -> Orders:
    """What was ordered when the history was recorded."""
    orders: Orders = {"activity": [], "timer": [], "turn": [], "end": []}
    for event in history.events:
        about, summary = attributes(event), _summary(event)
        match kind(event):
            case "ACTIVITY_TASK_SCHEDULED":
                name, given = about.activity_type.name, _values(about.input.payloads)
                asked = {"name": name, "queue": _asked_at(name, about.task_queue.name), "input": given}
                orders["activity"].append({**asked, **_bounds(about), **summary})
            case "TIMER_STARTED":
                orders["timer"].append({"seconds": _seconds(about.start_to_fire_timeout)})
            case "START_CHILD_WORKFLOW_EXECUTION_INITIATED":
                queue, given = _kind_of(about.task_queue.name), _values(about.input.payloads)
                policy = ParentClosePolicy.Name(about.parent_close_policy)
                orders["turn"].append(
                    {"id": about.workflow_id, "queue": queue, "input": given, **_child(about, policy), **summary}
                )
            case "WORKFLOW_EXECUTION_COMPLETED":
                orders["end"].append({"result": _values(about.result.payloads)})
            case "WORKFLOW_EXECUTION_CONTINUED_AS_NEW":
                orders["end"].append({"continues as new with": _values(about.input.payloads)})
            case "WORKFLOW_EXECUTION_FAILED":
                orders["end"].append({"failure": about.failure.application_failure_info.type})
            case "WORKFLOW_EXECUTION_CANCELED":
                orders["end"].append({"cancelled": True})
            case _:
                pass
    return orders


def departures(was: Orders, now: Orders) -> list[str]:
    """Where what is ordered now is not what was ordered then. A field that is new changes nothing."""
    found: list[str] = []
    for what, orders in was.items():
        for number, order in enumerate(orders):
            again = now[what][number] if number < len(now[what]) else None
            if not _holds(again, order):
                found.append(f"{what} {number} was {json.dumps(order)}, and is {json.dumps(again)}")
    return found


def _holds(now: Any, was: Any) -> bool:
    if isinstance(was, dict) and isinstance(now, dict):
        known, fields = cast(Mapping[str, Any], now), cast(Mapping[str, Any], was)
        return all(name in known and _holds(known[name], value) for name, value in fields.items())
    if isinstance(was, list) and isinstance(now, list):
        some, others = cast(list[Any], now), cast(list[Any], was)
        return len(some) == len(others) and all(map(_holds, some, others))
    return now == was


def _bounds(about: Any) -> dict[str, Any]:
    retry = about.retry_policy
    return {
        "seconds": _seconds(about.start_to_close_timeout),
        "heartbeat": _seconds(about.heartbeat_timeout),
        "retry": [_seconds(retry.initial_interval), retry.backoff_coefficient, _seconds(retry.maximum_interval)],
        "attempts": retry.maximum_attempts,
    }


def _child(about: Any, policy: str) -> dict[str, Any]:
    name = about.workflow_type if isinstance(about.workflow_type, str) else about.workflow_type.name
    return {
        "name": name,
        "seconds": _seconds(about.workflow_task_timeout),
        "left": policy.removeprefix("PARENT_CLOSE_POLICY_"),
    }


def _asked_at(activity: str, queue: str) -> str:
    """The kind of an activity's queue. Steps were asked for at that of the models, and are now at that of their turn.

    A replay does not compare queues, and workers serve both.
    """
    kind = _kind_of(queue)
    moved = activity in names.STEPS - {names.CALL_TOOL} and kind in _QUEUES_OF_STEPS
    return names.MODELS_QUEUE if moved else kind


_QUEUES_OF_STEPS = (names.MODELS_QUEUE, names.TURNS_QUEUE, names.SESSIONS_QUEUE)


def _kind_of(queue: str) -> str:
    # The rest of the name belongs to an installation, and a replay has one of its own.
    return queue.rpartition("-")[2]


def _seconds(duration: Duration) -> float:
    return duration.ToTimedelta().total_seconds()


def _summary(command: Any) -> dict[str, Any]:
    given: Callable[[str], bool] = command.user_metadata.HasField
    return {"summary": _values([command.user_metadata.summary])} if given("summary") else {}


def _values(payloads: Sequence[Payload]) -> list[Any]:
    return [json.loads(each.data) if each.data else None for each in payloads]
