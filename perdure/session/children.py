"""What changes in the state of a session when its turn hands work to others, and what a session knows of its parent.

Only sessions with children or a parent need it. What every move has to ask is in `state`.
"""

from collections.abc import Sequence
from typing import Any, Literal

from perdure.protocol.deliveries import DeliveryRef, Lineage
from perdure.protocol.names import action_of_child
from perdure.protocol.requests import ShownInputs, TurnResult
from perdure.protocol.wire import JsonObject

from .state import ParentRef, SessionState


def parent_ref(parent: JsonObject | None) -> ParentRef | None:
    """The parent as the driver of a session knows it; `parent` is the lineage in the session's row."""
    if parent is None:
        return None
    lineage = Lineage.model_validate(parent)
    action = action_of_child(lineage.name, lineage.call_id)
    return ParentRef(session_id=lineage.session_id, action=action, root_session_id=lineage.root_session_id)


def awaiting(session: SessionState, result: TurnResult) -> SessionState:
    """The state after a turn has handed work to other sessions. The turn itself goes on, unless it has parked."""
    handed = result.awaited
    if handed is None:
        raise ValueError("The turn does not say for what it waits.")
    cancel = "this" if result.cancelled else session.cancel
    unended = {"turn": session.turn, "told": session.told, "cancel": cancel}
    going_on = unended if handed.request is not None else {}
    # A turn that continues a parked one waits for the same calls, and for those that a program has made since.
    known = session.awaited or handed
    more = tuple(key for key in handed.keys if key not in known.keys)
    added = {"keys": (*known.keys, *more), "phase": "due"} if more else {}
    awaited = known.model_copy(update={"request": handed.request, "deadline": handed.deadline, **added})
    return session.after_turn(result).model_copy(update={**going_on, "awaited": awaited})


def dispatched(
    session: SessionState, keys: Sequence[str], phase: Literal["started", "stopping"], look_at: float | None = None
) -> SessionState:
    """The state after the children were started, or asked to stop; `keys`: the actions without a result."""
    if session.awaited is None or session.awaited.phase == "abandoned":
        return session.model_copy(update={"awaited": None})
    done = {"keys": tuple(keys), "phase": phase, "look_at": look_at}
    return session.model_copy(update={"awaited": session.awaited.model_copy(update=done)})


def looked(session: SessionState, results: Sequence[DeliveryRef], look_at: float | None) -> SessionState:
    """The state after a look at the children on other servers."""
    state = session
    for result in results:
        state = state.with_delivery(result)
    if state.awaited is None:
        return state
    return state.model_copy(update={"awaited": state.awaited.model_copy(update={"look_at": look_at})})


def showing(session: SessionState, shown: ShownInputs, deliveries: Sequence[DeliveryRef]) -> SessionState:
    """The state after requests of descendants were shown: the turn parks with the first of them."""
    state = session.without(*deliveries)
    if shown.cancelled:
        return state.cancelled("this")
    if not shown.open:
        return state
    known = {each.request_id for each in session.open}
    opened = (*session.open, *(each for each in shown.open if each.request_id not in known))
    update: dict[str, Any] = {"open": opened, "head": max(shown.head or 0, session.head or 0)}
    if session.awaited is not None and session.awaits_children:
        # Readers have seen the end of the turn. An answer begins the next one, and that waits for the children.
        awaited = session.awaited.model_copy(update={"request": None, "deadline": None})
        update |= {"awaited": awaited, "turn": session.turn + 1, "told": session.turn + 1}
    return state.model_copy(update=update)


def collected(session: SessionState, results: Sequence[DeliveryRef]) -> SessionState:
    """The state after all results are recorded: the turn continues, if it has not parked."""
    request = session.awaited.request if session.awaited else None
    continues: JsonObject = {} if request is None else {"held": request, "tries": 0, "retry_at": None}
    return session.without(*results).model_copy(update={"awaited": None, **continues})
