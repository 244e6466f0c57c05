"""What a driver does next: every state of a session against everything that can be waiting in it."""

import itertools

import pytest

from perdure.protocol.actions import Park
from perdure.protocol.deliveries import Bounds, DeliveryRef
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Snapshot, TurnRequest, TurnResult
from perdure.protocol.wire import JsonObject
from perdure.session import children
from perdure.session.decisions import (
    CollectChildren,
    DispatchChildren,
    EndIdle,
    ForgetCancel,
    LookAtChildren,
    Move,
    RebuildState,
    Refuse,
    Remind,
    Renew,
    RunTurn,
    ShowInputs,
    StopChildren,
    Wait,
    Withdraw,
    next_move,
    renewed,
    turn_request,
)
from perdure.session.state import Rebuild, SessionState

NOW = 100.0
MESSAGE = DeliveryRef(id="dlv_1", token_hash="now")
STALE = DeliveryRef(id="dlv_2", token_hash="old")
ANSWER = DeliveryRef(id="dlv_3", kind="answer", token_hash="")
LATER = DeliveryRef(id="dlv_4", kind="?later", token_hash="old", at="1970-01-01T00:01:10.000Z")
COMPACT = DeliveryRef(id="dlv_5", kind="compact", token_hash="")
CLEAR = DeliveryRef(id="dlv_6", kind="clear", token_hash="")
RESET = DeliveryRef(id="dlv_7", kind="reset", token_hash="")
ASKED = OpenInput(request_id="inp_1")
LATE = OpenInput(request_id="inp_2", expires_at=NOW - 1)
FORGOTTEN = OpenInput(request_id="inp_3", expires_at=NOW + 50, remind_at=(NOW - 1,))
SOON = OpenInput(request_id="inp_4", remind_at=(NOW + 7,))
SOONER = OpenInput(request_id="inp_5", remind_at=(NOW + 3, NOW + 8))
IDLE = Bounds(idle_seconds=60)
HELD_REQUEST = TurnRequest(session_id="ses_1", turn=4, agent="demo", deliveries=(MESSAGE,))
HELD = {**HELD_REQUEST.model_dump(mode="json"), "wisdom": "of a newer build"}


def a_session(**changes: object) -> SessionState:
    return SessionState(session_id="ses_1", agent="demo", token_hash="now", turn=4).model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "move"),
    [
        ({}, Wait()),
        ({"inbox": (MESSAGE,)}, RunTurn((MESSAGE,))),
        ({"inbox": (STALE, MESSAGE)}, Refuse(STALE)),
        ({"inbox": (ANSWER,)}, RunTurn((ANSWER,))),
        ({"open": (ASKED,)}, Wait()),
        ({"open": (ASKED,), "inbox": (MESSAGE,)}, Wait()),
        ({"open": (ASKED,), "inbox": (STALE,)}, Refuse(STALE)),
        ({"open": (ASKED,), "inbox": (MESSAGE, ANSWER)}, RunTurn((ANSWER,))),
        ({"open": (LATE,)}, RunTurn((), ("inp_2",))),
        ({"open": (LATE, ASKED), "inbox": (ANSWER,)}, RunTurn((ANSWER,), ("inp_2",))),
        ({"open": (FORGOTTEN,)}, Remind(FORGOTTEN)),
        ({"open": (FORGOTTEN,), "inbox": (ANSWER,)}, Remind(FORGOTTEN)),
        ({"open": (OpenInput(request_id="a", expires_at=NOW + 5, remind_at=(NOW + 3,)),)}, Wait(NOW + 3)),
        # Controls.
        ({"inbox": (MESSAGE, CLEAR)}, RunTurn((MESSAGE,))),
        ({"inbox": (COMPACT, MESSAGE)}, RunTurn((COMPACT,))),
        ({"open": (ASKED,), "inbox": (COMPACT,)}, Wait()),
        ({"open": (ASKED,), "inbox": (COMPACT, ANSWER)}, RunTurn((ANSWER,))),
        ({"open": (ASKED,), "inbox": (MESSAGE, CLEAR)}, Withdraw()),
        ({"open": (ASKED,), "inbox": (RESET,)}, Withdraw()),
        # Cancelled.
        ({"cancel": "this"}, ForgetCancel()),
        ({"cancel": "this", "inbox": (MESSAGE,)}, RunTurn((MESSAGE,))),
        ({"cancel": "this", "inbox": (STALE,)}, Refuse(STALE)),
        ({"cancel": "this", "open": (ASKED,)}, Withdraw()),
        ({"cancel": "this", "open": (FORGOTTEN,)}, Withdraw()),
        ({"cancel": "this", "open": (LATE,), "inbox": (ANSWER,)}, Withdraw()),
        # Held.
        ({"held": HELD, "retry_at": NOW + 5}, Wait(NOW + 5)),
        ({"held": HELD, "retry_at": NOW}, RunTurn(held=HELD)),
        ({"held": HELD, "retry_at": NOW + 5, "inbox": (MESSAGE,)}, Wait(NOW + 5)),
        ({"held": HELD, "retry_at": NOW + 5, "inbox": (STALE,)}, Refuse(STALE)),
        ({"held": HELD, "retry_at": NOW + 5, "cancel": "this"}, RunTurn(held=HELD)),
        ({"held": HELD, "retry_at": NOW + 5, "cancel": "this", "open": (ASKED,)}, RunTurn(held=HELD)),
        ({"held": HELD, "retry_at": NOW + 5, "open": (FORGOTTEN,)}, Remind(FORGOTTEN)),
        ({"held": HELD, "retry_at": NOW + 5, "open": (LATE,)}, Wait(NOW + 5)),
        ({"held": HELD, "retry_at": NOW + 9, "open": (SOON, SOONER)}, Wait(NOW + 3)),
        # Bounded in time.
        ({"bounds": IDLE, "idle_since": NOW - 59}, Wait(NOW + 1)),
        ({"bounds": IDLE, "idle_since": NOW - 60}, EndIdle()),
        ({"bounds": IDLE}, Wait()),
        ({"bounds": IDLE, "idle_since": NOW - 60, "open": (ASKED,)}, EndIdle()),
        ({"bounds": IDLE, "idle_since": NOW - 60, "open": (LATE,)}, RunTurn((), ("inp_2",))),
        ({"bounds": IDLE, "idle_since": NOW - 60, "inbox": (MESSAGE,)}, RunTurn((MESSAGE,))),
        ({"bounds": IDLE, "idle_since": NOW - 60, "inbox": (LATER,)}, Wait(NOW + 30)),
        ({"bounds": IDLE, "idle_since": NOW - 60, "cancel": "this"}, ForgetCancel()),
        ({"bounds": IDLE, "idle_since": NOW - 60, "held": HELD, "retry_at": NOW + 5}, Wait(NOW + 5)),
        ({"bounds": Bounds(deadline=NOW - 1), "idle_since": NOW - 60}, Wait()),
        # Of a kind that this build cannot read.
        ({"inbox": (LATER,)}, Wait(NOW + 30)),
        ({"inbox": (LATER, MESSAGE)}, RunTurn((MESSAGE,))),
        ({"inbox": (LATER,), "open": (ASKED,)}, Wait(NOW + 30)),
        ({"inbox": (LATER, ANSWER), "open": (ASKED,)}, RunTurn((ANSWER,))),
        ({"inbox": (LATER, MESSAGE), "cancel": "this"}, RunTurn((MESSAGE,))),
        ({"inbox": (LATER,), "held": HELD, "retry_at": NOW + 90}, Wait(NOW + 30)),
        ({"inbox": (LATER,), "looked_at": NOW - 10}, Wait(NOW + 50)),
        # Lost.
        ({"rebuild": Rebuild(reason="LOST"), "inbox": (MESSAGE,), "held": HELD}, RebuildState(Rebuild(reason="LOST"))),
    ],
)
def test_the_next_move(changes: dict[str, object], move: Move) -> None:
    assert next_move(a_session(**changes), NOW) == move


def test_a_driver_continues_as_new_before_a_turn_and_after_what_is_due() -> None:
    assert next_move(a_session(), NOW, renew=True) == Renew()
    assert next_move(a_session(inbox=(MESSAGE,)), NOW, renew=True) == Renew()
    assert next_move(a_session(open=(ASKED,), inbox=(MESSAGE,)), NOW, renew=True) == Renew()
    assert next_move(a_session(held=HELD, retry_at=NOW), NOW, renew=True) == Renew()
    assert next_move(a_session(inbox=(STALE,)), NOW, renew=True) == Refuse(STALE)
    assert next_move(a_session(cancel="this", open=(ASKED,)), NOW, renew=True) == Withdraw()


def test_an_unreadable_delivery_makes_the_driver_continue_as_new_ever_more_rarely_and_is_refused_after_an_hour() -> (
    None
):
    session, accepted = a_session(inbox=(LATER,)), NOW - 30
    looks: list[float] = []
    now = NOW
    while not isinstance(move := next_move(session, now), Refuse):
        if isinstance(move, Renew):
            looks.append(now - accepted)
            session = renewed(session, now)
        else:
            assert isinstance(move, Wait)
            assert move.until is not None
            now = move.until

    assert looks == [60, 120, 240, 480, 960, 1920, 3840]
    assert (move.delivery, move.code) == (LATER, "delivery_kind_unknown")
    assert now - accepted == 3840
    assert "(later)" in move.message


def test_a_cancel_refuses_the_delivery_that_was_to_begin_the_turn_though_no_build_can_read_it() -> None:
    later = LATER.model_copy(update={"id": "dlv_5"})

    move = next_move(a_session(inbox=(LATER, later), cancel="this"), NOW)

    assert isinstance(move, Refuse)
    assert (move.delivery, move.code, move.ends_cancel) == (LATER, "turn_cancelled", True)


def test_a_delivery_that_waited_for_an_hour_before_it_was_seen_gets_one_look() -> None:
    session, now = a_session(inbox=(LATER,)), NOW + 7200

    assert next_move(session, now) == Renew()
    assert isinstance(next_move(renewed(session, now), now + 1), Refuse)


def test_a_new_unreadable_delivery_is_looked_for_within_a_minute_whatever_others_wait() -> None:
    now = NOW + 1800
    new = LATER.model_copy(update={"id": "dlv_5", "at": "1970-01-01T00:31:30.000Z"})

    assert next_move(a_session(inbox=(LATER, new), looked_at=now - 60), now) == Wait(now + 50)


def test_messages_that_coalesce_do_so_across_one_that_cannot_be_read() -> None:
    first, second = (MESSAGE.model_copy(update={"id": each, "coalesce": True}) for each in ("a", "b"))

    assert next_move(a_session(inbox=(first, LATER, second)), NOW) == RunTurn((first, second))


def every_state() -> list[SessionState]:
    inboxes = [tuple(each) for size in range(3) for each in itertools.permutations((MESSAGE, STALE, ANSWER), size)]
    asked: list[tuple[OpenInput, ...]] = [(), (ASKED,), (LATE,), (FORGOTTEN,), (LATE, FORGOTTEN)]
    held: list[tuple[JsonObject | None, float | None]] = [(None, None), (HELD, NOW + 5), (HELD, NOW - 5)]
    return [
        a_session(inbox=inbox, open=open, cancel=cancel, held=request, retry_at=retry_at)
        for inbox in inboxes
        for open in asked
        for cancel in (None, "this")
        for request, retry_at in held
    ]


def after(session: SessionState, move: Move) -> SessionState:
    """The state once the move is made, if the turn that it starts asks nothing."""
    match move:
        case Withdraw():
            return session.withdrawn()
        case Refuse(delivery=delivery):
            return session.without(delivery)
        case Remind(request=request):
            return session.reminded(request)
        case RunTurn(deliveries=deliveries):
            return session.without(*deliveries).after_turn(TurnResult(snapshot=Snapshot(), action=Park()))
        case ForgetCancel():
            return session.cancelled(None)
        case DispatchChildren(awaited=awaited):
            return children.dispatched(session, awaited.keys, "started")
        case StopChildren(awaited=awaited):
            return children.dispatched(session, awaited.keys, "stopping")
        case LookAtChildren():
            return children.looked(session, (), NOW + 60)
        case CollectChildren(results=results):
            return children.collected(session, results)
        case ShowInputs(deliveries=deliveries):
            return session.without(*deliveries)
        case RebuildState() | Renew() | EndIdle() | Wait():
            return session


def test_every_state_ends_in_a_wait_with_nothing_forgotten() -> None:
    """Moves follow one another until the driver waits; then it holds nothing that it could still do."""
    for start in every_state():
        session, moves = start, list[Move]()
        while not isinstance(move := next_move(session, NOW), Wait):
            moves.append(move)
            session = after(session, move)
            assert len(moves) < 20, start

        read = [delivery for each in moves if isinstance(each, RunTurn) for delivery in each.deliveries]
        refused = [each.delivery for each in moves if isinstance(each, Refuse)]
        assert sorted(each.id for each in (*read, *refused, *session.inbox)) == sorted(each.id for each in start.inbox)
        assert session.cancel is None
        if not session.open and session.held is None:
            assert session.inbox == ()


def test_a_cancellation_is_settled_by_a_turn_a_withdrawal_or_nothing_to_stop() -> None:
    for session in every_state():
        if session.cancel is None:
            continue
        while not isinstance(move := next_move(session, NOW), RunTurn | Withdraw | ForgetCancel):
            session = after(session, move)
            assert session.cancel == "this"


def test_a_held_turn_is_started_again_as_it_is() -> None:
    assert turn_request(a_session(held=HELD), RunTurn(held=HELD)) == HELD_REQUEST


def test_a_turn_is_given_how_far_the_session_had_come() -> None:
    request = turn_request(a_session(head=17), RunTurn((MESSAGE,)))

    assert (request.head, request.holds, request.turn) == (17, True, 4)


def test_a_turn_that_could_not_continue_is_tried_less_and_less_often() -> None:
    session, pauses = a_session(), list[float]()

    for _ in range(12):
        session = session.holding(HELD, None, NOW)
        assert session.retry_at is not None
        pauses.append(session.retry_at - NOW)

    assert pauses[:3] == [5, 10, 20]
    assert pauses[-1] == pauses[-2] == 600
    assert next_move(session.due(), NOW) == RunTurn(held=HELD)


def test_the_next_turn_that_ends_clears_what_was_held() -> None:
    session = a_session().holding(HELD, "next", NOW)

    session = session.after_turn(TurnResult(snapshot=Snapshot(), action=Park(), head=30))

    assert (session.held, session.retry_at, session.tries, session.token_hash, session.head) == (
        None,
        None,
        0,
        "next",
        30,
    )


@pytest.mark.parametrize(
    ("before", "open", "expected"),
    [
        (None, (), None),
        ("this", (), None),
        ("this", (ASKED,), "this"),
        ("next", (), "this"),
        ("next", (ASKED,), "this"),
    ],
)
def test_a_cancellation_after_its_turn(before: str | None, open: tuple[OpenInput, ...], expected: str | None) -> None:
    session = a_session(cancel=before).after_turn(TurnResult(snapshot=Snapshot(), action=Park(), open=open))

    assert session.cancel == expected


def test_what_arrived_while_the_state_was_rebuilt_is_kept() -> None:
    found = a_session(inbox=(MESSAGE,), seen=(MESSAGE.id,))

    session = (
        SessionState(session_id="ses_1", agent="", token_hash="")
        .with_delivery(MESSAGE)
        .with_delivery(ANSWER)
        .rebuilt(found)
    )

    assert session.inbox == (MESSAGE, ANSWER)


@pytest.mark.parametrize("control", [CLEAR, RESET], ids=["clear", "reset"])
def test_an_answer_that_was_accepted_before_a_control_is_read_before_it(control: DeliveryRef) -> None:
    """Its call was approved when the control was accepted, so the control must not withdraw the request."""
    state = SessionState(session_id="s", agent="a", token_hash="now", turn=1, open=(ASKED,))

    assert next_move(state.with_delivery(ANSWER).with_delivery(control), NOW) == RunTurn((ANSWER,))
    assert next_move(state.with_delivery(control).with_delivery(ANSWER), NOW) == Withdraw()
