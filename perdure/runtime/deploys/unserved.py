"""Finds sessions that no worker can continue: none of their build runs, or none can replay their history."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from temporalio.client import Client, WorkflowExecution, WorkflowExecutionStatus
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError, RPCStatusCode

from perdure.errors import PerdureError
from perdure.protocol import names
from perdure.protocol.requests import Failure
from perdure.runtime.connect import ABSENT, RPC_PATIENCE
from perdure.session.state import OPERATOR_CANCELLED, OPERATOR_FAILED, Rebuild, SessionState, read_repair

from .builds import Builds, Version, current_version, literal, problems

log = logging.getLogger("perdure.sessions")

#: How long one look may take.
_SECONDS = 60.0

#: The sessions that wait for a worker of their build, each with it, and whether sessions that start now wait, too.
Waiting: TypeAlias = tuple[dict[str, str], bool]

#: What Temporal says of a workflow whose last decisions failed because its history could not be replayed.
_NONDETERMINISTIC = "cause=WorkflowTaskFailedCauseNonDeterministicError"

_VERSION = SearchAttributeKey.for_keyword("TemporalWorkerDeploymentVersion")


def version_of(execution: WorkflowExecution) -> Version | None:
    """The version that a workflow of Temporal's list is pinned to, if any."""
    deployment, _, build = (execution.typed_search_attributes.get(_VERSION) or "").partition(":")
    return (deployment, build) if deployment and build else None


async def find(client: Client, task_queue: str, drivers: Mapping[str, Version | None], known: Waiting) -> Waiting:
    """The sessions that wait for a worker of their driver's or their turn's build, each with this build.

    `known`: the last result. It is the result again when Temporal does not answer, or does not allow to look.
    """
    try:
        async with asyncio.timeout(_SECONDS):
            found, current = await _find(client, task_queue, drivers)
    except (PerdureError, *ABSENT):
        log.debug("the workers of each build could not be looked up", exc_info=True)
        return known
    for build, count in Counter(found.values()).items():
        if build not in known[0].values():
            another = "`perdure deploy promote` for another build" if build == current else _DRAIN.format(build)
            log.error(
                "%d sessions wait for a worker of build %s, and none runs: start one, or run %s",
                *(count, build, another),
            )
    return found, current is not None


_DRAIN = "`perdure deploy drain {} --take-over`"


async def _find(
    client: Client, task_queue: str, drivers: Mapping[str, Version | None]
) -> tuple[dict[str, str], str | None]:
    """The sessions that wait, and the build that new sessions wait for, if they do."""
    served: dict[Version, bool] = {}

    async def is_served(version: Version, kind: str) -> bool:
        if version not in served:
            builds = Builds(client, version[0].removesuffix(f"-{kind}"), task_queue)
            served[version] = (await builds.workers(kind)).get(version[1], 0) > 0
        return served[version]

    async def waiting(kind: str, workflows: Mapping[str, Version | None], current: Version | None) -> dict[str, str]:
        # Temporal gives a workflow without a version to the current one.
        versions = {each: version or current for each, version in workflows.items()}
        return {
            each: version[1] for each, version in versions.items() if version and not await is_served(version, kind)
        }

    current = await current_version(client, names.queue(task_queue, names.SESSIONS_QUEUE))
    if current is None and not any(drivers.values()):
        # Workers without versions.
        return {}, None
    found = await waiting(names.SESSIONS_QUEUE, drivers, current)
    turns = await _turns(client, task_queue)
    of_turns = await current_version(client, names.queue(task_queue, names.TURNS_QUEUE))
    for turn, build in (await waiting(names.TURNS_QUEUE, turns, of_turns)).items():
        found.setdefault(turn.partition("/turn/")[0], build)
    if of_turns and not await is_served(of_turns, names.TURNS_QUEUE):
        # The next turn of each session begins there; and inline, each step.
        found = dict.fromkeys(drivers, of_turns[1]) | found
        return found, of_turns[1]
    starts = current is None or await is_served(current, names.SESSIONS_QUEUE)
    return found, None if starts or current is None else current[1]


async def _turns(client: Client, task_queue: str) -> Mapping[str, Version | None]:
    queue = names.queue(task_queue, names.TURNS_QUEUE)
    query = f"WorkflowType = '{names.TURN_WORKFLOW}' AND TaskQueue = '{queue}' AND ExecutionStatus = 'Running'"
    return {each.id: version_of(each) async for each in client.list_workflows(query, page_size=1000)}


# --- histories that cannot be replayed ----------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run of a driver or a turn."""

    workflow_id: str
    run_id: str


async def find_unreplayable(client: Client, task_queue: str) -> Mapping[str, Run] | None:
    """The sessions whose driver or turn fails for ever, each with that run; None if Temporal does not say."""
    query = problems(task_queue, f"= {literal(_NONDETERMINISTIC)}")
    try:
        async with asyncio.timeout(_SECONDS):
            runs = [Run(each.id, each.run_id) async for each in client.list_workflows(query, page_size=1000)]
    except ABSENT:
        # Older servers do not have the attribute.
        log.debug("workflows that cannot be replayed were not looked up", exc_info=True)
        return None
    return {each.workflow_id.partition("/turn/")[0]: each for each in runs}


async def replace(
    client: Client, session_id: str, run: Run, rebuild: Rebuild, start: Callable[[SessionState], Awaitable[None]]
) -> bool:
    """Start a driver in place of the session's; `run`, its or its turn's, cannot be replayed. False if it has ended.

    `start` ends the old driver in the same call: a session whose workflow is seen as terminated would be ended.
    """
    described = await client.get_workflow_handle(run.workflow_id).describe(rpc_timeout=RPC_PATIENCE)
    if described.run_id != run.run_id or described.status != WorkflowExecutionStatus.RUNNING:
        # Temporal's list is some seconds old.
        return False
    ends = rebuild.ends or await _ordered_end(client, session_id)
    await start(SessionState.to_rebuild(session_id, rebuild.model_copy(update={"ends": ends})))
    if run.workflow_id != session_id:
        # The turn of a driver that was reset in Temporal is not ended with it.
        with contextlib.suppress(RPCError):
            turn = client.get_workflow_handle(run.workflow_id, run_id=run.run_id)
            await turn.terminate(reason="It cannot be replayed.", rpc_timeout=RPC_PATIENCE)
    return True


async def _ordered_end(client: Client, session_id: str) -> Failure | None:
    """The end of the session that an operator has ordered from the driver, which may not have read the order."""
    try:
        history = await client.get_workflow_handle(session_id).fetch_history(rpc_timeout=RPC_PATIENCE)
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return None
        raise
    for event in history.events:
        if event.HasField("workflow_execution_cancel_requested_event_attributes"):
            return OPERATOR_CANCELLED
        signal = event.workflow_execution_signaled_event_attributes
        if signal.signal_name == names.REPAIR:
            [order, *_] = [*await client.data_converter.decode(signal.input.payloads), None]
            repair = read_repair(order)
            if repair is not None and repair.how == "fail":
                return OPERATOR_FAILED
    return None
