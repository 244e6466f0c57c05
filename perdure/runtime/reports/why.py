"""Why a session does not move: what it waits for, since when, until when, and who can help.

Made when somebody asks, from the session's row and from what Temporal has under way for it. The parts that an answer
needs are read first; then `explain` decides without I/O.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from temporalio.api.enums.v1 import PendingActivityState, TaskQueueType
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus

from perdure.bounds import shortened
from perdure.errors import Unavailable
from perdure.protocol import names
from perdure.protocol.inputs import Responders
from perdure.protocol.wire import JsonObject
from perdure.runtime.drivers.liveness import seconds_of
from perdure.store.base import Store
from perdure.store.engine.rows import stamp_of
from perdure.store.inputs import InputRow, Waits
from perdure.store.values import SessionQuery, SessionRow

if TYPE_CHECKING:
    from perdure.runtime.drivers.client import DriverClient

#: What a task is about. The one that explains most comes first: what is stuck says more than what works beside it.
TaskCode: TypeAlias = Literal["paused", "no_worker", "retrying", "worker_silent", "worker_busy", "working"]
WhyCode: TypeAlias = (
    TaskCode
    | Literal[
        "ended",
        "needs_attention",
        "input",
        "message",
        "queued",
        "children",
        "unsignalled",
        "no_workflow",
        "temporal_unreachable",
    ]
)

_ACTIVITIES = TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY

#: Seconds for which a task may wait for a worker before that is worth a sentence.
_PROMPT = 2.0
#: Seconds for which a worker may be silent in an activity. Those of turns send a heartbeat every few seconds.
_SILENT = 60.0
#: Children of each status that are looked for.
_MOST_CHILDREN = 50
#: Children and open calls that are named.
_NAMED = 5
_SHOWN = 80


@dataclass(frozen=True)
class Why:
    code: WhyCode
    sentence: str
    since: str | None = None
    until: str | None = None
    who: Sequence[str] = ()
    details: JsonObject = field(default_factory=dict[str, object])

    @property
    def shown(self) -> JsonObject:
        known: JsonObject = {"code": self.code, "sentence": self.sentence, "since": self.since, "until": self.until}
        known |= {"who": list(self.who) or None, "details": self.details or None}
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class Task:
    """Something that Temporal has handed out, or wants to hand out, for the session."""

    #: The name of the activity; `workflow` for a decision.
    kind: str
    queue: str | None
    #: `paused` by an operator, `running`, `backoff` before another attempt, or `scheduled`: it waits for a worker.
    state: Literal["paused", "running", "backoff", "scheduled"]
    attempt: int
    #: Seconds since the epoch.
    since: float
    #: When its worker was heard of last.
    heard: float = 0.0
    next_at: float = 0.0
    failure: str | None = None
    worker: str | None = None
    #: Whether a worker polls its queue; None if that is not known.
    served: bool | None = None


@dataclass(frozen=True)
class SessionFacts:
    """What is known of a session."""

    row: SessionRow
    inputs: Sequence[InputRow] = ()
    queued: int = 0
    #: The sessions that it has started and that have not ended.
    children: Sequence[SessionRow] = ()
    #: Names of tools whose calls have no result yet.
    calls: Sequence[str] = ()
    #: None: Temporal does not answer.
    tasks: Sequence[Task] | None = ()
    #: The status of its driver; None if it has none.
    driver: str | None = "running"


async def why(store: Store, client: Client, drivers: DriverClient, row: SessionRow) -> Why:
    """Why this session does not move."""
    if row.ended or row.attention is not None:
        return explain(SessionFacts(row), time.time())
    waits = (await store.waits([row.session_id]))[row.session_id]
    children = await _children(store, row)
    calls = await _open_calls(store, row) if row.status == "running" else ()
    tasks, driver = await _under_way(client, drivers, row)
    if driver is not None and driver != "running":
        # A session that has ended since its row was read lacks no workflow.
        row = await store.session(row.session_id) or row
    return explain(SessionFacts(row, waits.inputs, waits.queued, children, calls, tasks, driver), time.time())


async def _children(store: Store, row: SessionRow) -> Sequence[SessionRow]:
    """Those that have not ended; of very many, some of each status."""
    found: list[SessionRow] = []
    for status in ("needs_attention", "waiting", "running", "starting"):
        query = SessionQuery(parent=row.session_id, status=status, limit=_MOST_CHILDREN)
        found += (await store.sessions(query)).sessions
    return found


async def _open_calls(store: Store, row: SessionRow) -> Sequence[str]:
    from perdure.harness.journal import TurnJournal

    turn = max(0, row.turns - 1)
    journal = TurnJournal(await store.records(row.session_id, from_turn=turn, to_turn=turn))
    open_calls: list[str] = []
    for step in sorted({each.step for each in journal.records}):
        reply = journal.reply(step)
        calls = () if reply is None else reply.calls
        open_calls += [each.tool for each in calls if journal.outcome(step, each.call_id) is None]
    return open_calls


async def _under_way(
    client: Client, drivers: DriverClient, row: SessionRow
) -> tuple[Sequence[Task] | None, str | None]:
    """What Temporal has under way for the session, and the status of its driver."""
    try:
        driver = await drivers.execution(row.session_id)
        if driver is None or driver.status != WorkflowExecutionStatus.RUNNING:
            return (), None if driver is None or driver.status is None else driver.status.name.lower()
        turn = await drivers.execution(names.turn_workflow(row.session_id, row.turns - 1))
        running = [each for each in (turn, driver) if each and each.status == WorkflowExecutionStatus.RUNNING]
        tasks = await _with_pollers(client, [task for each in running for task in tasks_of(each)])
    except Unavailable:
        return None, None
    return tasks, "running"


async def _with_pollers(client: Client, tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks with whether a worker polls their queues. Hundreds of calls may wait in one: it is asked about once."""
    from perdure.runtime.deploys.builds import described_queue, pollers_of

    served: dict[tuple[str | None, bool], bool] = {}
    for task in tasks:
        place = task.queue, task.kind == "workflow"
        if task.state != "scheduled" or task.queue is None or place in served:
            continue
        type = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW if task.kind == "workflow" else _ACTIVITIES
        served[place] = bool(pollers_of(await described_queue(client, task.queue, type)))
    return [
        replace(task, served=served.get((task.queue, task.kind == "workflow"))) if task.state == "scheduled" else task
        for task in tasks
    ]


def tasks_of(found: WorkflowExecutionDescription) -> Sequence[Task]:
    """The activities that are under way in a workflow, and its decision if one is due."""
    raw = found.raw_description
    tasks = [_task(each) for each in raw.pending_activities]
    if raw.HasField("pending_workflow_task"):
        due = raw.pending_workflow_task
        started = seconds_of(due.started_time)
        since = started or seconds_of(due.original_scheduled_time) or seconds_of(due.scheduled_time)
        state = "running" if started else "scheduled"
        tasks.append(Task("workflow", found.task_queue, state, due.attempt, since, heard=since))
    return tasks


def _task(pending: PendingActivityInfo) -> Task:
    next_at = seconds_of(pending.next_attempt_schedule_time)
    state: Literal["paused", "running", "backoff", "scheduled"] = "scheduled"
    if pending.paused:
        state = "paused"
    elif pending.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED:
        state = "running"
    elif next_at > time.time() and pending.attempt > 1:
        state = "backoff"
    started = seconds_of(pending.last_started_time)
    failure = pending.last_failure.application_failure_info.type or (
        "TIMEOUT" if pending.last_failure.HasField("timeout_failure_info") else ""
    )
    return Task(
        kind=pending.activity_type.name,
        queue=pending.activity_options.task_queue.name or None,
        state=state,
        attempt=pending.attempt,
        since=_since(pending, state),
        heard=max(seconds_of(pending.last_heartbeat_time), started),
        next_at=next_at,
        failure=failure or None,
        worker=pending.last_worker_identity or None,
    )


def _since(pending: PendingActivityInfo, state: str) -> float:
    """When its worker began it, when the last attempt ended, or when it was handed out."""
    if state == "running":
        return seconds_of(pending.last_started_time)
    ended = max(seconds_of(pending.last_attempt_complete_time), seconds_of(pending.last_started_time))
    return ended if state == "backoff" and ended else seconds_of(pending.scheduled_time)


def waiting_for(row: SessionRow, waits: Waits) -> Why | None:
    """What a session waits for, as the store alone knows it; None while it runs, and when it has ended."""
    # Deliveries wait until open requests are closed, so the session waits for the requests.
    queued = waits.queued
    if row.attention is not None:
        return Why("needs_attention", f"A worker or an operator that can help: {row.attention['message']}")
    match row.status:
        case "waiting" if waits.inputs:
            return waits_for_people(waits.inputs)
        case "starting" | "waiting" if queued and row.unsignalled:
            late = f"{_deliveries(queued)} accepted, and signalled later."
            return Why("unsignalled", f"Temporal, which could not be reached: {late}")
        case "starting":
            return Why("queued", "A worker that takes up its first turn.")
        case "waiting" if queued:
            return Why("queued", f"A worker that takes up its next turn: {_deliveries(queued)} queued.")
        case "waiting":
            return Why("message", "The next message.")
        case "running" | "completed" | "failed":
            return None


def explain(facts: SessionFacts, now: float) -> Why:
    """The one reason that matters most: an end, then people, then what Temporal cannot do, then what it does."""
    row = facts.row
    if row.ended:
        return _ended(row)
    if row.attention is not None:
        help = "A worker or an operator has to help: " + _sentence(row.attention["message"])
        return Why("needs_attention", help, row.attention["since"], details={"attention": row.attention["code"]})
    if facts.inputs and row.status == "waiting":
        return waits_for_people(facts.inputs)
    if facts.tasks is None:
        return Why("temporal_unreachable", "Temporal does not answer, so nothing new begins until it does.")
    if facts.queued and row.unsignalled:
        return Why(
            "unsignalled",
            f"Temporal could not be reached when {_deliveries(facts.queued)} accepted; it is signalled again soon.",
        )
    if facts.driver != "running":
        how = "is missing" if facts.driver is None else f"has ended ({facts.driver})"
        return Why("no_workflow", f"The workflow of this session {how}; the reconciler handles it within a minute.")
    if facts.tasks:
        return _at_work(facts, min(facts.tasks, key=lambda task: _order(task, now)), now)
    if facts.inputs:
        return waits_for_people(facts.inputs)
    if row.status == "running" and facts.children:
        return _waits_for_children(facts.children)
    return _at_rest(facts)


def _ended(row: SessionRow) -> Why:
    if row.status == "completed":
        return Why("ended", "It has ended: completed.", row.updated_at)
    code = (row.error or {}).get("code")
    return Why("ended", f"It has ended: failed{f' with {code}' if code else ''}.", row.updated_at)


def waits_for_people(waiting: Sequence[InputRow]) -> Why:
    """The oldest open request in full; of the others, how many there are."""
    first, *others = waiting
    request = first.request
    until = f", until {request.expires_at} (then: {request.on_expiry})" if request.expires_at else ""
    more = f" And {len(others)} more." if others else ""
    if request.kind == "approval":
        subject = f"Approval of `{request.tool}`"
    else:
        subject = f"An answer to “{shortened(' '.join(request.prompt.split()), _SHOWN)}”"
    who = _responders(request.responders)
    sentence = f"{subject} ({request.request_id}) by {who}, since {first.opened_at}{until}.{more}"
    ids = [each.request.request_id for each in waiting]
    return Why("input", sentence, first.opened_at, request.expires_at, [who], {"inputs": ids})


def _responders(responders: Responders) -> str:
    named = " or ".join(responders.values)
    match responders.kind:
        case "requester":
            who = "the requester"
        case "anyone":
            who = "anyone"
        case "principals":
            who = named
        case "attribute":
            who = f"principals whose {responders.attribute} is {named}"
    return who if responders.quorum == 1 else f"{responders.quorum} of: {who}"


def _order(task: Task, now: float) -> tuple[int, bool]:
    """Where a task is among those of a session: the first one explains most."""
    # A decision takes milliseconds: what an activity does says more.
    return get_args(TaskCode).index(_code(task, now)), task.kind == "workflow"


def _code(task: Task, now: float) -> TaskCode:
    match task.state:
        case "paused":
            return "paused"
        case "scheduled" if task.served is False:
            return "no_worker"
        case "scheduled" if now - task.since > _PROMPT:
            return "worker_busy"
        case "backoff":
            return "retrying"
        case "running" if now - task.heard > _SILENT:
            return "worker_silent"
        case "scheduled" | "running":
            return "working"


def _at_work(facts: SessionFacts, task: Task, now: float) -> Why:
    what, since = _what(task, facts.calls), stamp_of(task.since)
    who = [task.worker] if task.worker else []
    details: JsonObject = {"attempt": task.attempt}
    if task.queue:
        details["queue"] = task.queue
    if task.failure:
        details["failure"] = task.failure
    code = _code(task, now)
    match code:
        case "paused":
            sentence = f"An operator has paused {what} in Temporal; resume it there."
            return Why(code, sentence, since, who=who, details=details)
        case "no_worker":
            sentence = f"No worker polls the task queue {task.queue}, where {what} has waited since {since}."
            return Why(code, sentence, since, details=details)
        case "retrying":
            until = stamp_of(task.next_at)
            failed = f" The last one failed with {task.failure}." if task.failure else ""
            sentence = f"Attempt {task.attempt} of {what} begins at {until}.{failed}"
            return Why(code, sentence, since, until, who, details)
        case "worker_silent":
            heard = stamp_of(task.heard)
            sentence = f"The worker at {what} has been silent since {heard}; another one takes over when it times out."
            return Why(code, sentence, heard, who=who, details=details)
        case "worker_busy":
            sentence = f"All workers are busy: {what} has waited since {since}."
            return Why(code, sentence, since, details=details)
        case "working":
            attempt = f", attempt {task.attempt}" if task.attempt > 1 else ""
            return Why(code, f"It works: {what}{attempt}.", since, who=who, details=details)


def _what(task: Task, calls: Sequence[str]) -> str:
    match task.kind:
        case names.CALL_MODEL:
            return "the model call"
        case names.CALL_TOOL | names.RUN_PROGRAM if calls:
            more = f" and {len(calls) - _NAMED} more" if len(calls) > _NAMED else ""
            return "the call of " + ", ".join(f"`{call}`" for call in calls[:_NAMED]) + more
        case "workflow":
            return "the next decision"
        case kind:
            return f"the activity {kind}"


def _waits_for_children(children: Sequence[SessionRow]) -> Why:
    shown = [f"{child.agent} ({child.session_id}, {child.shown_status})" for child in children[:_NAMED]]
    more = f" and {len(children) - _NAMED} more" if len(children) > _NAMED else ""
    ids = [child.session_id for child in children]
    return Why("children", f"It waits for {', '.join(shown)}{more}.", details={"sessions": ids})


def _at_rest(facts: SessionFacts) -> Why:
    row = facts.row
    if facts.queued:
        return Why("queued", f"A worker takes up its next turn: {_deliveries(facts.queued)} queued.")
    if row.status == "starting":
        return Why("queued", "A worker takes up its first turn.", row.created_at)
    if row.status == "running":
        return Why("working", "It works: it is between two activities, or waits for a call on another server.")
    bounds, until = row.bounds, None
    if bounds is not None and bounds.deadline is not None:
        until = stamp_of(bounds.deadline)
    ends = f" It ends at {until}." if until else ""
    return Why("message", f"It waits for the next message.{ends}", row.updated_at, until)


def _deliveries(count: int) -> str:
    return "1 delivery is" if count == 1 else f"{count} deliveries are"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
