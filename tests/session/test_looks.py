"""When a driver looks at the sessions on other servers that work for its turn."""

import pytest

from perdure.protocol.deliveries import CHILD_RESULT, DeliveryRef
from perdure.protocol.requests import Awaited, Coordinates
from perdure.session.children import dispatched, looked
from perdure.session.decisions import CollectChildren, LookAtChildren, Move, StopChildren, Wait, next_move
from perdure.session.state import SessionState

NOW = 1_000_000.0
AT = Coordinates(session_id="ses_1", turn=1)
KEY = "subagent-call:away:c"
RESULT = DeliveryRef(id="dlv_1", kind=CHILD_RESULT, token_hash="", action=KEY)


def waiting(look_at: float | None, **changes: object) -> SessionState:
    known = {"phase": "started", **changes}
    awaited = Awaited.model_validate({"at": AT, "keys": (KEY,), "request": {}, "lookAt": look_at, **known})
    return SessionState(session_id="ses_1", agent="demo", token_hash="now", turn=1, awaited=awaited)


@pytest.mark.parametrize(
    ("session", "move"),
    [
        (waiting(None), Wait()),
        (waiting(NOW + 5), Wait(NOW + 5)),
        (waiting(NOW + 5, deadline=NOW + 3), Wait(NOW + 3)),
        (waiting(NOW), LookAtChildren),
        (waiting(NOW, deadline=NOW), StopChildren),
        (waiting(NOW).cancelled("this"), StopChildren),
        (waiting(NOW, phase="stopping").cancelled("this"), LookAtChildren),
        # People were asked as well, and the turn has parked.
        (waiting(NOW, request=None), LookAtChildren),
        (waiting(NOW + 5, request=None), Wait(NOW + 5)),
        # All results are there: nothing is left to look at.
        (waiting(NOW).with_delivery(RESULT), CollectChildren),
    ],
)
def test_the_driver_looks_when_it_is_time_and_sleeps_until_then(session: SessionState, move: Move | type) -> None:
    found = next_move(session, NOW)

    assert type(found) is move if isinstance(move, type) else found == move


def test_a_result_that_a_look_has_found_is_kept_once() -> None:
    session = looked(looked(waiting(NOW), (RESULT,), NOW + 9), (RESULT,), None)

    assert session.inbox == (RESULT,)
    assert session.awaited is not None
    assert session.awaited.look_at is None
    assert looked(session, (), 5.0).awaited == session.awaited.model_copy(update={"look_at": 5.0})


def test_a_turn_that_was_given_up_waits_for_nothing_after_a_look() -> None:
    session = dispatched(waiting(NOW, phase="abandoned"), (KEY,), "stopping")

    assert looked(session, (), NOW).awaited is None
