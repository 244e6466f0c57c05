"""What a driver does for the family of its session: its children, its parent and its root."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from perdure.protocol import names, requests
from perdure.protocol.deliveries import CHILD_ANSWER, CHILD_INPUT, CHILD_RESULT, DeliveryRef
from perdure.protocol.inputs import OpenInput
from perdure.session import children, decisions
from perdure.session.state import ParentRef, SessionState

from .outcomes import call_back_once, execute_or_pause, execute_until_success

#: What to do to the state when something is done. Signals may have changed the state meanwhile: it is not kept here.
Change: TypeAlias = Callable[[SessionState], SessionState]


async def make_move(state: SessionState, move: decisions.Children) -> Change:
    """Start, follow or stop the sessions of a turn's calls; record their results, or show what they ask."""
    match move:
        case decisions.DispatchChildren(awaited=awaited):
            trace = (awaited.request or {}).get("traceparent")
            order = requests.DispatchChildren(at=awaited.at, traceparent=trace)
            summary = f"start {len(awaited.keys)} children"
            done = await execute_or_pause(names.DISPATCH_CHILDREN, order, summary=summary, result=requests.Pending)
            if done is None:
                if workflow.patched("decide-again-before-dispatch"):
                    # An agent may be missing for long: a cancel is heard meanwhile.
                    return lambda state: state
                done = (
                    await execute_until_success(
                        names.DISPATCH_CHILDREN, order, summary=summary, result=requests.Pending
                    ),
                )
            pending = done[0]
            look_at = _after(pending.look_in)
            return lambda state: children.dispatched(state, pending.keys, "started", look_at)
        case decisions.StopChildren(awaited=awaited):
            pending, looked = await _stop(awaited.at, f"stop {len(awaited.keys)} children")
            look_at = _after(looked.look_in)
            return lambda state: children.looked(
                children.dispatched(state, pending.keys, "stopping"), looked.results, look_at
            )
        case decisions.LookAtChildren(awaited=awaited):
            looked = await _look(awaited.at)
            look_at = _after(looked.look_in)
            return lambda state: children.looked(state, looked.results, look_at)
        case decisions.CollectChildren(awaited=awaited, results=results):
            collection = requests.CollectChildren(at=awaited.at, deliveries=results)
            summary = f"results of {len(awaited.keys)} children"
            await execute_until_success(names.COLLECT_CHILDREN, collection, summary=summary)
            return lambda state: children.collected(state, results)
        case decisions.ShowInputs(deliveries=deliveries):
            shown = await _show(state, move)
            return lambda state: children.showing(state, shown, deliveries)


async def _show(state: SessionState, move: decisions.ShowInputs) -> requests.ShownInputs:
    at, summary = _step_that_waits(state, move), f"{len(move.deliveries)} requests of children"
    order = requests.ShowInputs(at=at, deliveries=move.deliveries, shows=move.shows, parks=move.parks)
    return await execute_until_success(names.SHOW_INPUTS, order, summary=summary, result=requests.ShownInputs)


def _step_that_waits(state: SessionState, move: decisions.ShowInputs) -> requests.Coordinates:
    """Where requests are shown: the step that waits for the children, or the turn before if none waits any more."""
    if move.awaited is None:
        return requests.Coordinates(session_id=state.session_id, turn=max(0, state.turn - 1))
    if move.parks and move.awaited.at.turn != state.turn:
        # A turn that continues a parked one waits for the calls of that one.
        return requests.Coordinates(session_id=state.session_id, turn=state.turn)
    return move.awaited.at


async def report_inputs(state: SessionState, parent: ParentRef, before: Sequence[OpenInput]) -> None:
    """Report to the root which requests the session has opened and closed with its last turn."""
    known, open = ({each.request_id for each in asked} for asked in (before, state.open))
    opened = [(CHILD_INPUT, names.delivery_of_input(each, "opened"), each) for each in sorted(open - known)]
    closed = [(CHILD_ANSWER, names.delivery_of_input(each, "closed"), each) for each in sorted(known - open)]
    for kind, delivery_id, request_id in (*opened, *closed):
        await _signal(
            parent.root_session_id, DeliveryRef(id=delivery_id, kind=kind, token_hash="", request_id=request_id)
        )


async def leave(state: SessionState) -> None:
    """When the session has ended: stop its children, and report its end to its parent, here or on another server."""
    if state.awaited is not None:
        await _stop(state.awaited.at, "stop children")
    if state.calls_back:
        # One try: the APIs repeat one that fails.
        with contextlib.suppress(ActivityError):
            await call_back_once(requests.CallBack(session_id=state.session_id))
    if state.parent is not None:
        result_id = names.delivery_of_child(state.session_id)
        result = DeliveryRef(id=result_id, kind=CHILD_RESULT, token_hash="", action=state.parent.action)
        await _signal(state.parent.session_id, result)


async def _signal(session_id: str, ref: DeliveryRef) -> None:
    # If it fails, the sweeper signals the delivery: it was written with what it reports.
    with contextlib.suppress(ApplicationError):
        await workflow.get_external_workflow_handle(session_id).signal(names.DELIVER, ref.model_dump(mode="json"))


async def _stop(at: requests.Coordinates, summary: str) -> tuple[requests.Pending, requests.Looked]:
    """Stop the children of this step. Those on other servers get at least one request to stop."""
    pending = await execute_until_success(
        names.STOP_CHILDREN, requests.StopChildren(at=at), summary=summary, result=requests.Pending
    )
    return pending, requests.Looked() if pending.look_in is None else await _look(at)


async def _look(at: requests.Coordinates) -> requests.Looked:
    """Start, follow or cancel the sessions on other servers, as far as something is due."""
    order = requests.LookAtChildren(at=at)
    return await execute_until_success(
        names.LOOK_AT_CHILDREN, order, summary="look at other servers", result=requests.Looked
    )


def _after(seconds: float | None) -> float | None:
    return None if seconds is None else workflow.time() + seconds
