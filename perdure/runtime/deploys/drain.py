"""Moves the parked sessions of a build to the current one, until nothing is left on it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic

from google.protobuf.field_mask_pb2 import FieldMask
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflow.v1 import VersioningOverride, WorkflowExecutionOptions
from temporalio.api.workflowservice.v1 import UpdateWorkflowExecutionOptionsRequest
from temporalio.client import WorkflowExecutionDescription, WorkflowExecutionStatus

from perdure.errors import Invalid, NoWorker, Unavailable
from perdure.protocol import names
from perdure.runtime.connect import RPC_PATIENCE
from perdure.session.state import RepairOrder

from .builds import Builds, called, found
from .switch import Say

#: Sessions that are looked at at the same time.
_AT_ONCE = 8
#: Seconds until a session that has not moved is nudged again: the first pause and the longest.
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 15.0
#: So many nudges without an effect mean that a workflow does not make progress.
_MANY = 4
#: Seconds between two lines about the progress.
_SAY_EVERY = 2.0
#: How long a list of all sessions or turns of a build may take, and how old it may be in seconds.
_LIST_PATIENCE = timedelta(seconds=60)
_LISTS_LATE = 1.0

_NO_WORKER = "no worker of its build runs: start one, or add --take-over"
#: Activities that a driver executes only while a turn, or the function of a run, runs or ends.
_OF_TURNS = names.STEPS | {names.CONCLUDE_TURN, names.RUN_BODY}

_TURN_RUNS = "it runs a turn, and moves after it"
_OLD_TURN = "its turn runs on the old build"
_RETRY = RepairOrder(how="retry").model_dump(mode="json")

_MOVES = "it is about to move"
_STUCK = "its workflow does not react; Temporal's UI shows why"


@dataclass
class Drain:
    """What has left the build, and why the others have not."""

    moved: set[str] = field(default_factory=set[str])
    # The reason for each session that is still on the old build.
    remaining: dict[str, str] = field(default_factory=dict[str, str])


@dataclass
class _Nudges:
    count: int = 0
    due: float = 0.0

    def used(self) -> None:
        self.due = monotonic() + min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**self.count)
        self.count += 1


class Drainer:
    """Drains one build. It only signals parked drivers: each moves by itself, as after a turn.

    `take_over`: drivers and turns whose build has no worker are moved by the server. The current build replays their
    history.
    """

    def __init__(self, builds: Builds, build: str, *, rate: float, take_over: bool, say: Say) -> None:
        self._builds = builds
        self._build = build
        self._pause = 1.0 / rate
        self._take_over = take_over
        self._say = say
        self._result = Drain()
        self._nudges: dict[str, _Nudges] = {}
        self._next_nudge = 0.0
        self._said_at = 0.0

    async def run(self, patience: float) -> Drain:
        """Drain until nothing is left on the build, nothing more can move, or no progress was made for `patience`."""
        target = await self._target()
        progress, known = monotonic(), -1
        self._said_at = progress
        empty = False
        while True:
            remaining = await self._pass(target)
            self._report(len(remaining))
            if not remaining and empty:
                return self._result
            if not remaining:
                # Temporal's lists are some seconds old: a session may be missing in the first one.
                empty = True
                await asyncio.sleep(_LISTS_LATE)
                continue
            empty = False
            done = len(self._result.moved)
            if done != known:
                progress, known = monotonic(), done
            waits = any(reason != _NO_WORKER for reason in remaining.values())
            if not waits or monotonic() - progress > patience:
                return self._result
            await asyncio.sleep(0.2)

    async def _target(self) -> str:
        """The current build; refuses what cannot work."""
        routing = await self._builds.routing(names.SESSIONS_QUEUE)
        if self._build not in routing.builds:
            known = ", ".join(routing.builds) or "none"
            raise Invalid(f"Deployment {self._builds.deployment} has no build {self._build} (it has {known}).")
        if not routing.current:
            raise Invalid("No build is current: run `perdure deploy promote` first.")
        if self._build in (routing.current, routing.ramping):
            raise Invalid(f"New sessions start on build {self._build}: promote another one first.")
        old, new = await self._builds.facts(self._build), await self._builds.facts(routing.current)
        if newer := old.newer_than(new):
            raise Invalid(
                f"No session of build {self._build} can move: it writes {newer[0]}, build {routing.current}. "
                "Keep its workers, and promote a build that reads it."
            )
        return routing.current

    async def _pass(self, target: str) -> Mapping[str, str]:
        """Look at everything that is left once; the reason for each session that is still there."""
        polling = await self._builds.polling(names.SESSIONS_QUEUE)
        if not polling.get(target):
            # Sessions would move from one build without workers to another.
            raise NoWorker(f"No worker of build {target} takes sessions, and it is the current one. Start one.")
        serves = bool(polling.get(self._build))
        remaining: dict[str, str] = {}
        listed = await self._listed(names.SESSIONS_QUEUE)
        # Those that are listed no more have moved, or have ended.
        self._result.moved |= self._result.remaining.keys() - listed
        listed = [each for each in listed if each not in self._result.moved]
        for start in range(0, len(listed), _AT_ONCE):
            some = listed[start : start + _AT_ONCE]
            reasons = await asyncio.gather(*(self._move(each, target, serves=serves) for each in some))
            remaining |= {each: reason for each, reason in zip(some, reasons, strict=True) if reason is not None}
            self._report(len(listed) - start - len(some) + len(remaining))
        if turns := await self._listed(names.TURNS_QUEUE):
            serves = bool((await self._builds.workers(names.TURNS_QUEUE)).get(self._build))
            for turn in turns:
                if (reason := await self._turn(turn, serves=serves)) is not None:
                    remaining[turn.partition("/turn/")[0]] = reason
        self._result.remaining = remaining
        self._result.moved -= remaining.keys()
        return remaining

    async def _move(self, session_id: str, target: str, *, serves: bool) -> str | None:
        """Move one session if possible; the reason why it is still on the old build, if it is."""
        try:
            return await self._moved(session_id, target, serves=serves)
        except Unavailable as error:
            # What Temporal refuses for one session must not stop the others.
            return error.message

    async def _moved(self, session_id: str, target: str, *, serves: bool) -> str | None:
        described = await self._described(session_id)
        if described is None or _build_of(described) != self._build:
            self._result.moved.add(session_id)
            return None
        if not serves and not self._take_over:
            return _NO_WORKER
        if serves and _runs_turn(described):
            return _TURN_RUNS
        nudges = self._nudges.setdefault(session_id, _Nudges())
        if monotonic() >= nudges.due:
            await self._wait_for_rate()
            if not serves and nudges.count == 0:
                await self._override(session_id, names.SESSIONS_QUEUE, target)
            await self._nudge(session_id, again=nudges.count > 0)
            nudges.used()
        return _STUCK if nudges.count >= _MANY else _MOVES

    async def _nudge(self, session_id: str, *, again: bool) -> None:
        """Make the driver look around: it notices that another build is current, and continues as new there."""
        handle = self._builds.client.get_workflow_handle(session_id)
        if again:
            # A driver that cannot read its state waits for a minute, or for this.
            await found(handle.signal(names.REPAIR, _RETRY, rpc_timeout=RPC_PATIENCE))
        else:
            # Without a delivery it changes nothing.
            await found(handle.signal(names.DELIVER, rpc_timeout=RPC_PATIENCE))

    async def _turn(self, turn: str, *, serves: bool) -> str | None:
        """Why a turn is still on the old build, if it is. Without workers there it can be taken over."""
        try:
            described = await self._described(turn)
            if described is None or _build_of(described) != self._build:
                return None
            if serves:
                return _OLD_TURN
            if not self._take_over:
                return _NO_WORKER
            nudges = self._nudges.setdefault(turn, _Nudges())
            if monotonic() >= nudges.due:
                # With the turn, the server gives its open model and tool calls to the other build.
                target = (await self._builds.routing(names.TURNS_QUEUE)).current
                await self._override(turn, names.TURNS_QUEUE, target)
                nudges.used()
            return _STUCK if nudges.count >= _MANY else _MOVES
        except Unavailable as error:
            return error.message

    async def _override(self, workflow_id: str, kind: str, target: str) -> None:
        """Have the server give the workflow's next task to the target build, which keeps the workflow."""
        version = self._builds.version(kind, target)
        once = VersioningOverride.OneTimeOverride(target_deployment_version=version)
        request = UpdateWorkflowExecutionOptionsRequest(
            namespace=self._builds.client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=workflow_id),
            workflow_execution_options=WorkflowExecutionOptions(versioning_override=VersioningOverride(one_time=once)),
            update_mask=FieldMask(paths=["versioning_override"]),
        )
        service = self._builds.client.workflow_service
        await called(service.update_workflow_execution_options(request, timeout=RPC_PATIENCE))

    async def _described(self, workflow_id: str) -> WorkflowExecutionDescription | None:
        """The running workflow, as Temporal knows it now: its lists are some seconds old."""
        described = await found(self._builds.client.get_workflow_handle(workflow_id).describe())
        return described if described is not None and described.status == WorkflowExecutionStatus.RUNNING else None

    async def _listed(self, kind: str) -> Sequence[str]:
        """The ids of the workflows of one kind that Temporal lists for the build."""

        async def listing() -> Sequence[str]:
            query = self._builds.query(kind, self._build)
            return [each.id async for each in self._builds.client.list_workflows(query, page_size=1000)]

        return await called(listing(), _LIST_PATIENCE)

    async def _wait_for_rate(self) -> None:
        """Let at most so many sessions move in a second: each costs a replay on the current build."""
        now = monotonic()
        self._next_nudge = max(self._next_nudge, now) + self._pause
        await asyncio.sleep(self._next_nudge - self._pause - now)

    def _report(self, remaining: int) -> None:
        if monotonic() - self._said_at >= _SAY_EVERY:
            self._said_at = monotonic()
            self._say(f"{len(self._result.moved)} moved, {remaining} left")


def _build_of(described: WorkflowExecutionDescription) -> str:
    return described.raw_description.workflow_execution_info.versioning_info.deployment_version.build_id


def _runs_turn(described: WorkflowExecutionDescription) -> bool:
    """Whether the driver waits for a turn: for a child workflow, or inline for a step."""
    description = described.raw_description
    steps = any(each.activity_type.name in _OF_TURNS for each in description.pending_activities)
    return steps or bool(description.pending_children)
