"""What a commit says of the progress of a session: the event of a changed plan, and whether a checkpoint is taken."""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from perdure.agents.agent import Agent
from perdure.agents.context import Staging
from perdure.agents.progress.checkpoints import PLAN_COMPLETED, PLAN_STEP_DONE, PLAN_UPDATED, CheckpointTrigger
from perdure.agents.progress.plan import PLAN, Plan
from perdure.agents.state import check_fits, declared_names
from perdure.errors import UnreadableState
from perdure.harness.events import EventFactory
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.requests import Coordinates
from perdure.store.base import Store
from perdure.store.values import Commit, NewCheckpoint, SlotConflict, SlotWrite

log = logging.getLogger("perdure.tools")


async def discard_unreadable(store: Store, agent: Agent, session_id: str) -> None:
    """Empty the slots that none of the declared states can read, if the agent prefers that to waiting.

    A value of a newer version is never discarded: the worker that has written it is still there, or comes back.
    """
    if agent.on_unreadable != "fresh" or not (declared := declared_names()):
        return
    for name, slot in (await store.slots(session_id, declared)).items():
        try:
            check_fits(name, slot.value)
        except UnreadableState as unreadable:
            if unreadable.details.get("newer"):
                continue
            log.error("the state %r of %s is discarded: %s", name, session_id, unreadable.message, exc_info=unreadable)
            data = {"slot": name, "reason": unreadable.code}
            key = names.session_key(f"discarded/{name}/{slot.version}")
            event = NewEvent(type=EventType.CHECKPOINT_DISCARDED, key=key, data=data)
            # Somebody else may have written it since: then it can be read.
            with contextlib.suppress(SlotConflict):
                await store.commit(Commit(session_id, slots=(SlotWrite(name, None, slot.version),), events=(event,)))


def plan_events(factory: EventFactory, call_id: str, staging: Staging | None) -> Sequence[NewEvent]:
    """The event of the plan that a call has changed."""
    if (change := _plan_change(staging)) is None:
        return ()
    before, plan = change
    data = {"plan": plan.shown, "changed": plan.changed_since(before)}
    return (factory.of_step(EventType.PLAN_UPDATED, f"plan/{call_id}", data),)


def _plan_change(staging: Staging | None) -> tuple[Plan | None, Plan] | None:
    """The plan before a call and after it; None if the call has not changed it."""
    before, after = staging.changed(PLAN.name) if staging else (None, None)
    plan = None if after == before else PLAN.read(after)
    return None if plan is None else (PLAN.read(before), plan)


def with_checkpoint(
    commit: Commit, agent: Agent, at: Coordinates, key: str, *, tool: str | None = None, staging: Staging | None = None
) -> Commit:
    """The commit, with a checkpoint if something in it triggers one. `key`: of this commit in its step.

    `tool` and `staging`: of a call that has completed.
    """
    happened, plan_step = _of_plan(staging)
    milestones = staging.milestones if staging else []
    trigger = agent.checkpoints
    if not (milestones or (trigger and _is_due(trigger, commit, at, happened, tool))):
        return commit
    # One state, one checkpoint: the last of several names.
    name = milestones[-1] if milestones else None
    checkpoint_id = names.checkpoint_id(at.session_id, at.turn, at.step, key, int(time.time() * 1000))
    return replace(commit, checkpoint=NewCheckpoint(checkpoint_id, at.turn, at.step, name, plan_step))


def _of_plan(staging: Staging | None) -> tuple[set[str], int | None]:
    """What has happened to the plan, and the last step of it that became done."""
    if (change := _plan_change(staging)) is None:
        return set(), None
    before, plan = change
    done = plan.done_since(before)
    happened = {PLAN_UPDATED, *([PLAN_STEP_DONE] if done else ())}
    if done and plan.status == "completed":
        happened.add(PLAN_COMPLETED)
    return happened, done[-1] if done else None


def _is_due(trigger: CheckpointTrigger, commit: Commit, at: Coordinates, happened: set[str], tool: str | None) -> bool:
    if happened & set(trigger.events) or (tool is not None and tool in trigger.tools):
        return True
    if trigger.slots & {write.name for write in commit.slots}:
        return True
    ends = any(event.type == EventType.TURN_COMPLETED for event in commit.events)
    if ends and trigger.turns is not None and (at.turn + 1) % trigger.turns == 0:
        return True
    return trigger.when is not None and any(_says_yes(trigger, event) for event in commit.events)


def _says_yes(trigger: CheckpointTrigger, event: NewEvent) -> bool:
    assert trigger.when is not None
    try:
        return bool(trigger.when(event))
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        # A checkpoint is an extra: what is recorded must not depend on it.
        log.error("the condition of a checkpoint raised %s", type(error).__name__, exc_info=error)
        return False
