"""What the mode of a message makes of it, and the order of what waits."""

import pytest

from perdure.protocol.deliveries import CLEAR, QUEUE_MODES, DeliveryRef
from perdure.protocol.inputs import OpenInput
from perdure.session.decisions import RunTurn, Wait, next_move
from perdure.session.queue import between, collecting, read_mode, superseded
from perdure.session.state import SessionState

NOW = 1_000.0
ASKED = OpenInput(request_id="r")


def a_message(name: str, **fields: object) -> DeliveryRef:
    return DeliveryRef.model_validate({"id": name, "token_hash": "now", **fields})


def hearing(*messages: tuple[float, DeliveryRef], **fields: object) -> SessionState:
    """A session that has heard these messages at these times."""
    session = SessionState.model_validate({"session_id": "s", "agent": "a", "token_hash": "now", **fields})
    for at, message in messages:
        session = session.with_delivery(message)
        session = collecting(session, at) if message.coalesce else session
    return session


def collected(name: str) -> DeliveryRef:
    return a_message(name, coalesce=True)


@pytest.mark.parametrize("name", QUEUE_MODES)
def test_each_mode_is_read_by_its_name(name: str) -> None:
    assert read_mode(name) == name


def test_steer_backlog_is_another_name_of_followup() -> None:
    assert read_mode("steer_backlog") == "followup"


@pytest.mark.parametrize("name", [None, "", "Followup", "soon", 3, ["followup"]])
def test_what_names_no_mode_is_none(name: object) -> None:
    assert read_mode(name) is None


@pytest.mark.parametrize("high", ["2026-11-20T08:00:00.000Z", None])
def test_a_delivery_can_be_moved_before_another_one_any_number_of_times(high: str | None) -> None:
    low = ""
    for _ in range(50):
        key = between(low, high)

        assert low < key
        assert high is None or key < high
        high = key


def test_a_delivery_can_be_moved_behind_another_one_any_number_of_times() -> None:
    low, high = "2026-11-20T08:00:00.000Z", "2026-11-20T08:00:00.001Z"
    for _ in range(50):
        key = between(low, high)

        assert low < key < high
        low = key


def test_messages_that_are_collected_wait_a_second_for_more() -> None:
    one, two = collected("one"), collected("two")

    session = hearing((NOW, one), (NOW + 0.9, two))

    assert next_move(session, NOW + 1.5) == Wait(NOW + 1.9)
    assert next_move(session, NOW + 1.9) == RunTurn((one, two))


def test_they_wait_no_longer_than_five_seconds_for_more() -> None:
    messages = [collected(str(number)) for number in range(12)]

    session = hearing(*((NOW + number / 2, each) for number, each in enumerate(messages)))

    assert next_move(session, NOW + 4.9) == Wait(NOW + 5)
    assert next_move(session, NOW + 5) == RunTurn(tuple(messages))


def test_fifty_of_them_do_not_wait_and_the_others_are_read_after_them() -> None:
    messages = tuple(collected(f"{number:02}") for number in range(53))

    session = hearing(*((NOW, each) for each in messages))
    rest = session.without(*messages[:50])

    assert next_move(session, NOW) == RunTurn(messages[:50])
    assert next_move(rest, NOW + 1) == RunTurn(messages[50:])


def test_what_is_collected_leaves_out_the_messages_between() -> None:
    first, alone, second = collected("first"), a_message("alone"), collected("second")

    session = hearing((NOW, first), (NOW, alone), (NOW, second))
    rest = session.without(first, second)

    assert next_move(session, NOW + 1) == RunTurn((first, second))
    assert next_move(rest, NOW + 1) == RunTurn((alone,))


def test_a_message_of_its_own_does_not_wait_for_those_that_are_collected_after_it() -> None:
    alone = a_message("alone")

    assert next_move(hearing((NOW, alone), (NOW, collected("one"))), NOW) == RunTurn((alone,))


def test_an_answer_does_not_wait_for_more_messages() -> None:
    answer = a_message("answer", kind="answer")

    session = hearing((NOW, collected("one")), (NOW, answer), open=(ASKED,))

    assert next_move(session, NOW) == RunTurn((answer,))


def test_a_cancel_of_their_turn_does_not_wait_for_more_messages() -> None:
    one = collected("one")

    assert next_move(hearing((NOW, one)).cancelled("this"), NOW) == RunTurn((one,))


def test_a_session_that_collects_is_not_idle() -> None:
    session = hearing((NOW, collected("one")), bounds={"idle_seconds": 0.5}, idle_since=NOW)

    assert next_move(session, NOW + 0.9) == Wait(NOW + 1)


def test_the_next_messages_are_waited_for_again() -> None:
    one, two = collected("one"), collected("two")

    session = collecting(hearing((NOW, one)).without(one).with_delivery(two), NOW + 60)

    assert next_move(session, NOW + 60) == Wait(NOW + 61)


def test_a_run_that_began_before_messages_were_waited_for_joins_those_that_follow_one_another() -> None:
    one, two = collected("one"), collected("two")

    session = hearing((NOW, one), (NOW, two), (NOW, a_message("alone")), (NOW, collected("three")))
    older = session.model_copy(update={"collecting": None})

    assert next_move(older, NOW) == RunTurn((one, two))


def test_controls_are_not_collected() -> None:
    clear = a_message("clear", kind=CLEAR, coalesce=True)

    assert next_move(hearing((NOW, clear)), NOW) == RunTurn((clear,))


INTERRUPTING = a_message("now", mode="interrupt", at="2026-11-20T12:02:00.000Z", supersedes="2026-11-20T12:02:00.000Z")
BEFORE = a_message("before", at="2026-11-20T12:01:00.000Z")


def test_a_task_keeps_what_waits_when_a_message_interrupts_it() -> None:
    task = hearing((NOW, BEFORE), (NOW, INTERRUPTING), mode="task")

    assert superseded(task, INTERRUPTING, in_turn=False) == task


@pytest.mark.parametrize(("cancel", "in_turn"), [("this", False), ("next", True)])
def test_a_cancel_of_what_is_superseded_is_forgotten(cancel: str, in_turn: bool) -> None:
    session = hearing((NOW, BEFORE), (NOW, INTERRUPTING), cancel=cancel)

    assert superseded(session, INTERRUPTING, in_turn=in_turn).cancel is None


@pytest.mark.parametrize(
    ("waiting", "in_turn", "fields"),
    [
        ((BEFORE, INTERRUPTING), True, {}),
        ((BEFORE, INTERRUPTING), False, {"open": (ASKED,)}),
        ((a_message("answer", kind="answer"), BEFORE, INTERRUPTING), False, {}),
        ((INTERRUPTING,), False, {}),
    ],
)
def test_a_cancel_of_anything_else_is_kept(
    waiting: tuple[DeliveryRef, ...], in_turn: bool, fields: dict[str, object]
) -> None:
    session = hearing(*((NOW, each) for each in waiting), cancel="this", **fields)

    assert superseded(session, INTERRUPTING, in_turn=in_turn).cancel == "this"


def test_what_waited_before_an_interrupt_goes_and_the_rest_stays() -> None:
    def at(minute: int) -> str:
        return f"2026-11-20T12:{minute:02}:00.000Z"

    before, clear = a_message("before", at=at(1)), a_message("clear", kind=CLEAR, at=at(2))
    answer, later = a_message("answer", kind="answer", at=at(3)), a_message("later", at=at(5))
    interrupting = a_message("interrupting", mode="interrupt", at=at(4), supersedes=at(4))
    session = hearing(*((NOW, each) for each in (before, clear, answer, interrupting, later)))

    kept = superseded(session, interrupting, in_turn=True)

    assert [each.id for each in kept.inbox] == ["clear", "answer", "interrupting", "later"]
