"""The driver's state, and what migrations make of older ones."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import UnreadableState
from perdure.protocol.actions import Park
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.events import Usage
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import Snapshot, TurnResult
from perdure.protocol.wire import JsonObject
from perdure.session import decisions, state
from perdure.session.decisions import Refuse, RunTurn, Wait
from perdure.session.state import REMEMBERED_DELIVERIES, Chain, SessionState, dump_turn, load_session, load_turn


def a_session(**changes: object) -> SessionState:
    return SessionState(session_id="ses_1", agent="demo", token_hash="now").model_copy(update=changes)


def a_delivery(number: int, *, token: str = "now", coalesce: bool = False) -> DeliveryRef:
    return DeliveryRef(id=f"dlv_{number}", token_hash=token, coalesce=coalesce)


def ids(deliveries: tuple[DeliveryRef, ...]) -> list[str]:
    return [delivery.id for delivery in deliveries]


def test_a_delivery_is_consumed_once() -> None:
    session = a_session().with_delivery(a_delivery(1)).with_delivery(a_delivery(1))

    assert ids(session.inbox) == ["dlv_1"]


def test_a_delivery_that_a_turn_took_is_not_consumed_again() -> None:
    session = a_session().with_delivery(a_delivery(1)).without(a_delivery(1))

    assert session.with_delivery(a_delivery(1)).inbox == ()


def test_the_memory_of_deliveries_is_bounded() -> None:
    session = a_session()

    for number in range(REMEMBERED_DELIVERIES + 10):
        session = session.with_delivery(a_delivery(number))

    assert len(session.seen) == REMEMBERED_DELIVERIES
    assert session.seen[-1] == f"dlv_{REMEMBERED_DELIVERIES + 9}"


def test_each_delivery_gets_a_turn_of_its_own() -> None:
    session = a_session().with_delivery(a_delivery(1)).with_delivery(a_delivery(2))

    first = decisions.next_batch(session)
    second = decisions.next_batch(session.without(*first))

    assert (ids(first), ids(second)) == (["dlv_1"], ["dlv_2"])
    assert session.without(*first, *second).inbox == ()


def test_deliveries_that_coalesce_are_folded_and_none_is_lost() -> None:
    session = a_session()
    for number in (1, 2, 3):
        session = session.with_delivery(a_delivery(number, coalesce=True))
    session = session.with_delivery(a_delivery(4))

    batch = decisions.next_batch(session)

    assert ids(batch) == ["dlv_1", "dlv_2", "dlv_3"]
    assert ids(session.without(*batch).inbox) == ["dlv_4"]


def test_a_coalescing_delivery_does_not_join_one_that_wants_its_own_turn() -> None:
    batch = decisions.next_batch(a_session().with_delivery(a_delivery(1)).with_delivery(a_delivery(2, coalesce=True)))

    assert ids(batch) == ["dlv_1"]


def test_an_empty_inbox_gives_no_batch() -> None:
    assert decisions.next_batch(a_session()) == ()


def test_a_delivery_with_another_token_is_stale() -> None:
    session = a_session().with_delivery(a_delivery(1)).with_delivery(a_delivery(2, token="old"))

    assert decisions.next_move(session, 0) == Refuse(a_delivery(2, token="old"))


def test_what_was_accepted_before_a_new_token_stays_accepted() -> None:
    session = a_session().with_delivery(a_delivery(1)).with_delivery(a_delivery(2, token="next"))

    session = session.after_turn(TurnResult(snapshot=Snapshot(), action=Park(), token_hash="next"))

    assert decisions.next_move(session, 0) == RunTurn(session.inbox[:1])
    assert session.token_hash == "next"


def test_the_state_survives_its_trip_through_json() -> None:
    session = a_session(turn=7).with_delivery(a_delivery(1))

    assert load_session(session.model_dump(mode="json")) == session


def test_a_state_from_the_future_is_refused() -> None:
    data = {**a_session().model_dump(mode="json"), "version": 999}

    with pytest.raises(UnreadableState):
        load_session(data)


@pytest.mark.parametrize("data", [{}, {"version": "x"}, {"sessionId": 3}, {"version": None}])
def test_a_state_that_is_damaged_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(UnreadableState):
        load_session(data)


def newer(number: int, **fields: object) -> JsonObject:
    """A delivery as a newer build signals it."""
    return {**a_delivery(number).model_dump(mode="json"), **fields}


def test_fields_of_newer_builds_survive_an_older_driver() -> None:
    data = {**a_session().model_dump(mode="json"), "inbox": [newer(1, weight="light")], "goals": [{"deep": 1}]}

    session = load_session(data).with_delivery(DeliveryRef.model_validate(newer(2, weight="heavy")))
    session = session.after_turn(TurnResult(snapshot=Snapshot(), action=Park()))
    written = json.loads(json.dumps(session.model_dump(mode="json")))

    assert written["goals"] == [{"deep": 1}]
    assert [each["weight"] for each in written["inbox"]] == ["light", "heavy"]
    request = decisions.turn_request(session, RunTurn(load_session(written).inbox[:1]))
    assert request.model_dump(mode="json")["deliveries"][0]["weight"] == "light"


def test_fields_of_newer_builds_that_are_too_large_are_dropped_and_the_delivery_is_kept() -> None:
    assert state.read_delivery(newer(1, weight="x" * 10_000)) == a_delivery(1)


def test_a_state_that_was_read_does_not_say_that_it_could_not_be() -> None:
    session = load_session({**a_session().model_dump(mode="json"), state.WAS_UNREADABLE: True})

    assert state.WAS_UNREADABLE not in session.model_dump(mode="json")


def test_a_kind_is_unknown_until_the_next_run_of_a_build_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    later = state.with_unknown_prefix(DeliveryRef.model_validate(newer(1, kind="later")), unknown=True)
    before = load_session(a_session().with_delivery(later).model_dump(mode="json"))

    monkeypatch.setitem(state.KINDS, "later", "kind-later")
    # The run that has kept it as unknown must replay, so it still does.
    assert state.is_unknown(later)
    after = load_session(before.model_dump(mode="json"))

    assert [each.kind for each in before.inbox] == ["?later"]
    assert [each.kind for each in after.inbox] == ["later"]
    assert not state.is_unknown(after.inbox[0])


def test_a_version_of_a_delivery_is_unknown_until_the_next_run_of_a_build_that_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = state.read_delivery(newer(1, version=2))
    assert later is not None
    assert state.is_unknown(later)
    kept = state.with_unknown_prefix(later, unknown=True)
    before = load_session(a_session().with_delivery(kept).model_dump(mode="json"))

    monkeypatch.setitem(state.REFERENCE_VERSIONS, 2, "delivery-2")
    assert state.is_unknown(kept)
    after = load_session(before.model_dump(mode="json"))

    assert [each.kind for each in before.inbox] == ["?message"]
    assert [(each.kind, each.version) for each in after.inbox] == [("message", 2)]
    assert not state.is_unknown(after.inbox[0])


def test_the_turn_snapshot_survives_its_trip() -> None:
    turn = state.TurnState().after_step(Usage(input_tokens=3)).after_failure()

    assert load_turn(dump_turn(turn)) == turn


def test_a_field_that_a_newer_turn_wrote_survives_an_older_turn() -> None:
    snapshot = Snapshot(data={"steps": 2, "mood": "sunny"})

    assert dump_turn(load_turn(snapshot).after_step(Usage())).data["mood"] == "sunny"


def test_a_snapshot_from_the_future_is_refused() -> None:
    with pytest.raises(UnreadableState):
        load_turn(Snapshot(version=99))


def test_a_chain_lifts_one_version_at_a_time() -> None:
    chain = Chain("thing", [lambda data: {**data, "b": 2}, lambda data: {**data, "c": data["b"] + 1}])

    assert chain.lift(1, {"a": 1}) == {"a": 1, "b": 2, "c": 3}
    assert chain.lift(2, {"b": 5}) == {"b": 5, "c": 6}


@pytest.mark.parametrize(
    ("signal", "understood"),
    [
        ({"id": "d", "tokenHash": "h"}, True),
        ({"id": "d", "token_hash": "h", "surprise": 1}, True),
        ({"id": "d"}, False),
        ({"id": 5, "tokenHash": "h"}, False),
        ({"id": "", "tokenHash": "h"}, False),
        ({"id": "d\0", "tokenHash": "h"}, False),
        ({"id": "d" * 256, "tokenHash": "h"}, False),
        ({"id": "d", "tokenHash": "h" * 256}, False),
        ({"id": "d", "tokenHash": "", "traceparent": "\n"}, False),
        (b"\xff", False),
        ("text", False),
        (None, False),
        ([1, 2], False),
    ],
)
def test_a_signal_is_a_delivery_or_nothing(signal: object, understood: bool) -> None:
    assert (state.read_delivery(signal) is not None) is understood


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["id", "tokenHash", "turnId", "how"]), inner),
)


@given(JSON | st.binary())
def test_whatever_a_signal_holds_it_is_understood_or_nothing(signal: object) -> None:
    delivery = state.read_delivery(signal)

    assert delivery is None or a_session().with_delivery(delivery).model_dump_json()
    assert isinstance(state.read_turn_number(signal), int | None)
    assert state.read_repair(signal) in ("retry", "rebuild", "fail", None)


def test_what_is_no_delivery_does_not_make_a_state_unreadable() -> None:
    kept = a_session().with_delivery(a_delivery(1)).model_dump(mode="json")

    session = load_session({**kept, "inbox": [{"id": "dlv_0"}, "text", *kept["inbox"]]})

    assert ids(session.inbox) == ["dlv_1"]


@pytest.mark.parametrize(
    ("signal", "kept"),
    [
        ({"id": "d", "surprise": [1, "2"]}, True),
        ({"id": "d", "much": "x" * 3000}, False),
        ({"id": b"d"}, False),
        (b"text", False),
        ("text", True),
    ],
)
def test_what_a_newer_build_may_have_accepted_is_kept_if_it_is_small(signal: object, kept: bool) -> None:
    assert state.can_be_kept(signal) is kept


def an_open(
    request_id: str = "inp_1", *, expires_at: float | None = None, remind_at: tuple[float, ...] = ()
) -> OpenInput:
    return OpenInput(request_id=request_id, expires_at=expires_at, remind_at=remind_at)


def an_answer(number: int) -> DeliveryRef:
    return DeliveryRef(id=f"ans_{number}", kind="answer", token_hash="now")


def test_while_requests_are_open_messages_wait_and_answers_are_consumed() -> None:
    session = (
        a_session(open=(an_open(),))
        .with_delivery(a_delivery(1))
        .with_delivery(an_answer(1))
        .with_delivery(a_delivery(2))
    )

    batch = decisions.next_batch(session)
    rest = session.without(*batch)

    assert ids(batch) == ["ans_1"]
    assert ids(rest.inbox) == ["dlv_1", "dlv_2"]
    assert decisions.next_batch(rest) == ()
    assert decisions.next_move(rest, 0) == Wait()


def test_deliveries_behind_a_park_are_consumed_in_order_after_it() -> None:
    session = a_session(open=(an_open(),)).with_delivery(a_delivery(1)).with_delivery(a_delivery(2))

    session = session.after_turn(TurnResult(snapshot=Snapshot(), action=Park()))

    assert ids(decisions.next_batch(session)) == ["dlv_1"]


def test_a_request_expires_at_its_time_and_not_before() -> None:
    session = a_session(open=(an_open("a", expires_at=10), an_open("b", expires_at=20), an_open("c")))

    assert decisions.expired(session, 9.9) == ()
    assert decisions.expired(session, 10) == ("a",)
    assert decisions.expired(session, 99) == ("a", "b")


def test_the_next_look_is_the_nearest_of_reminders_and_expiries() -> None:
    session = a_session(open=(an_open("a", expires_at=30, remind_at=(15, 25)), an_open("b", expires_at=20)))

    assert decisions.next_deadline(session) == 15
    assert decisions.next_deadline(a_session(open=(an_open(),))) is None


def test_each_reminder_is_due_once() -> None:
    session = a_session(open=(an_open(remind_at=(5, 15)),))

    [due] = decisions.reminders(session, 7)
    session = session.reminded(due)

    assert decisions.reminders(session, 7) == ()
    assert decisions.next_deadline(session) == 15


@pytest.mark.parametrize(
    ("signal", "turn"),
    [({"turnId": "turn_3"}, 3), ({}, None), (None, None), ({"turnId": "turn_x"}, None), ("turn_3", None)],
)
def test_a_signal_may_name_a_turn(signal: object, turn: int | None) -> None:
    assert state.read_turn_number(signal) == turn


def test_a_parked_turn_has_not_ended() -> None:
    parked = a_session(turn=4, open=(an_open(),))

    assert not decisions.has_ended(parked, 3)
    assert decisions.has_ended(parked, 2)
    assert not decisions.has_ended(a_session(turn=4), 4)
    assert decisions.has_ended(a_session(turn=4), 3)
    assert not decisions.has_ended(a_session(turn=4), None)


SILENT = TurnResult(snapshot=Snapshot(), action=Park(), open=(an_open(),), silent=True)


def test_a_turn_that_readers_know_nothing_of_leaves_its_number_to_the_next_one() -> None:
    parked = a_session(turn=2, open=(an_open(),)).after_turn(SILENT)

    assert (parked.turn, parked.next_reader_turn) == (2, 2)
    assert not decisions.has_ended(parked, 1)


def test_runs_of_old_count_turns_that_readers_know_nothing_of() -> None:
    parked = a_session(turn=2, open=(an_open(),)).after_turn(SILENT, counts_silent=True)

    assert (parked.turn, parked.next_reader_turn) == (3, 2)
    assert not decisions.has_ended(parked, 1)
    assert decisions.has_ended(parked, 0)


def test_a_turn_that_readers_expect_is_to_come() -> None:
    assert decisions.is_next_turn(a_session(turn=4), 5)
    assert not decisions.is_next_turn(a_session(turn=4), 4)
    assert not decisions.is_next_turn(a_session(turn=4), None)


def test_the_turn_that_reads_an_answer_comes_after_the_parked_one() -> None:
    parked = a_session(turn=4, open=(an_open(),))

    assert decisions.starts_after_park(parked, 4)
    assert not decisions.starts_after_park(parked, 3)
    assert not decisions.starts_after_park(parked, None)
    assert not decisions.starts_after_park(a_session(turn=4), 4)
    assert not decisions.starts_after_park(parked.holding({}, None, 0.0), 4)


def test_a_delivery_that_was_overtaken_is_consumed_before_those_that_were_accepted_later() -> None:
    early, middle, late = (
        DeliveryRef(id=f"dlv_{number}", token_hash="now", at=f"2026-01-01T00:00:0{number}.000Z") for number in (1, 2, 3)
    )
    session = a_session().with_delivery(early).with_delivery(late)

    assert session.is_out_of_order(middle)
    assert ids(session.with_delivery(middle).inbox) == ["dlv_1", "dlv_2", "dlv_3"]
    assert ids(session.with_delivery(middle, in_order=False).inbox) == ["dlv_1", "dlv_3", "dlv_2"]


def test_deliveries_without_a_time_of_acceptance_keep_their_order() -> None:
    session = a_session().with_delivery(DeliveryRef(id="dlv_9", token_hash="now", at="2026-01-01T00:00:09.000Z"))

    assert not session.is_out_of_order(a_delivery(1))
    assert ids(session.with_delivery(a_delivery(1)).inbox) == ["dlv_9", "dlv_1"]


def test_a_delivery_accepted_with_a_token_in_between_is_consumed_as_well() -> None:
    rekeyed = TurnResult(snapshot=Snapshot(), action=Park(), token_hash="last", retired=("now", "between"))

    session = a_session().after_turn(rekeyed).with_delivery(a_delivery(1, token="between"))

    assert decisions.next_move(session, 0) == RunTurn((a_delivery(1, token="between"),))
    assert session.retired == ("now", "between")


def test_a_token_that_is_the_sessions_again_is_not_one_of_before() -> None:
    there = TurnResult(snapshot=Snapshot(), action=Park(), token_hash="other")
    back = TurnResult(snapshot=Snapshot(), action=Park(), token_hash="now")

    session = a_session().after_turn(there).after_turn(back)

    assert (session.token_hash, session.retired) == ("now", ("other",))


def test_a_delivery_accepted_with_an_earlier_token_is_consumed_however_late_it_comes() -> None:
    rekeyed = TurnResult(snapshot=Snapshot(), action=Park(), token_hash="next")

    session = a_session().after_turn(rekeyed).with_delivery(a_delivery(1)).with_delivery(a_delivery(2, token="never"))

    assert decisions.next_move(session, 0) == Refuse(a_delivery(2, token="never"))
    assert decisions.next_move(session.without(a_delivery(2)), 0) == RunTurn((a_delivery(1),))


def test_a_turn_says_how_the_next_one_runs_or_leaves_it_as_it_was() -> None:
    inline = a_session().after_turn(TurnResult(snapshot=Snapshot(), action=Park(), turns="inline"))
    still = inline.after_turn(TurnResult(snapshot=Snapshot(), action=Park()))

    assert (inline.turns, still.turns) == ("inline", "inline")
