"""Each check can fail: of a run in which everything held, one thing at a time is made wrong."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import pytest

from tests.support.chaos import consent, invariants
from tests.support.chaos.evidence import Absence, Asked, Cancel, Evidence, Fork, Json, Post, Try

from . import promises, sample
from .sample import FORK, GONE, TALK, TASK, at, stamp

Spoil = Callable[[Evidence], Evidence | None]

#: How what is seen is made wrong, by the check that must notice.
_SPOILS: list[tuple[str, str, Spoil]] = []


def spoils(check: str) -> Callable[[Spoil], Spoil]:
    """Register a way to break one check; it changes the evidence, or returns another one."""

    def register(spoil: Spoil) -> Spoil:
        _SPOILS.append((check, spoil.__name__.strip("_").replace("_", " "), spoil))
        return spoil

    return register


def test_a_run_in_which_everything_held_is_found_to_hold() -> None:
    assert promises.broken_promises(sample.evidence()) == {}


def test_every_check_is_shown_to_fail() -> None:
    checks = [
        *promises.ABOUT_WHOLE_SESSIONS,
        *promises.PROMISES,
        *invariants.INVARIANTS,
        *consent.CHECKS,
        invariants.at_most_once_holds,
    ]

    assert {each.__name__ for each in checks} - {check for check, _, _ in _SPOILS} == set()


# --- the log ------------------------------------------------------------------------------------------------


@spoils("indexes_are_dense")
def _a_gap_in_the_indexes(seen: Evidence) -> None:
    event(seen, "session.waiting")["idx"] += 1


@spoils("indexes_are_dense")
def _a_row_that_counts_more_events_than_there_are(seen: Evidence) -> None:
    row(seen, TALK)["next_index"] += 1


@spoils("streams_are_the_log")
def _a_stream_without_its_first_event(seen: Evidence) -> Evidence:
    return replace(seen, streams={**seen.streams, TALK: seen.streams[TALK][1:]})


@spoils("streams_are_the_log")
def _a_stream_that_shows_what_follows_the_end(seen: Evidence) -> Evidence:
    late = {"type": "delivery.refused", "data": {}, "meta": {"id": f"{TASK}:{len(seen.streams[TASK])}"}}
    return replace(seen, streams={**seen.streams, TASK: [*seen.streams[TASK], late]})


@spoils("live_readers_got_the_log")
def _a_live_reader_that_got_an_event_twice(seen: Evidence) -> Evidence:
    events = seen.streams[TALK]
    return replace(seen, followed=[(TALK, [*events[:3], events[2], *events[3:5]])])


@spoils("nothing_follows_the_end")
def _a_turn_after_the_end(seen: Evidence) -> None:
    append(seen, TASK, "turn.started", 1, delivery_ids=["e1"])


@spoils("each_turn_ends_once")
def _a_turn_without_an_end(seen: Evidence) -> None:
    event(seen, "turn.completed")["type"] = "session.attention"


@spoils("each_turn_ends_once")
def _a_turn_that_ends_twice(seen: Evidence) -> None:
    append(seen, TALK, "turn.cancelled", 3)


@spoils("each_turn_ends_once")
def _a_step_without_an_end(seen: Evidence) -> None:
    event(seen, "step.completed")["type"] = "session.attention"


@spoils("turns_do_not_overlap")
def _an_event_of_an_older_turn(seen: Evidence) -> None:
    event(seen, "turn.started", turn=3)["turn"] = 1


@spoils("turns_do_not_overlap")
def _a_text_after_the_boundary(seen: Evidence) -> None:
    append(seen, TALK, "message.completed", 3, data={"message": "more", "turnId": "turn_3", "stepIndex": 0})


@spoils("each_action_has_one_result")
def _a_call_without_a_result(seen: Evidence) -> None:
    event(seen, "actions.requested")["data"]["actions"].append({"callId": "c9"})


# --- deliveries ---------------------------------------------------------------------------------------------


@spoils("each_delivery_is_answered_once")
@spoils("what_was_accepted_is_answered_once")
def _a_delivery_that_two_turns_consume(seen: Evidence) -> None:
    event(seen, "turn.started", turn=3)["delivery_ids"] = ["d1", "d3"]


@spoils("each_delivery_is_answered_once")
@spoils("what_was_accepted_is_answered_once")
@spoils("nothing_is_left_to_do")
def _a_delivery_that_no_turn_consumes(seen: Evidence) -> None:
    event(seen, "turn.started", turn=3)["delivery_ids"] = []
    delivery(seen, TALK, "d3")["turn"] = None


@spoils("what_was_accepted_is_answered_once")
def _a_delivery_that_is_refused_in_silence(seen: Evidence) -> None:
    event(seen, "delivery.refused", TASK)["type"] = "session.attention"


@spoils("what_was_accepted_is_answered_once")
def _a_delivery_that_is_consumed_and_refused(seen: Evidence) -> None:
    event(seen, "delivery.refused", TASK)["data"]["deliveryId"] = "e0"


@spoils("each_delivery_is_answered_once")
@spoils("what_was_accepted_is_answered_once")
def _a_delivery_that_is_gone(seen: Evidence) -> None:
    rows(seen.deliveries, TASK).remove(delivery(seen, TASK, "e1"))


@spoils("what_was_accepted_is_answered_once")
def _a_session_that_is_gone(seen: Evidence) -> Evidence:
    return replace(seen, sessions=[each for each in seen.sessions if each["session_id"] != TASK])


@spoils("one_key_has_one_receipt")
def _a_second_receipt_for_one_key(seen: Evidence) -> None:
    seen.posts[0].tries.append(Try(at(1), at(2), 202, session_id=TASK, delivery_id="e0"))


@spoils("one_key_has_one_receipt")
def _one_receipt_for_two_keys(seen: Evidence) -> None:
    seen.posts[1].tries[0] = replace(seen.posts[1].tries[0], delivery_id="d0")


@spoils("what_was_not_accepted_leaves_nothing")
def _a_delivery_of_a_post_that_was_answered_503(seen: Evidence) -> None:
    delivery(seen, TASK, "e1")["idempotency_key"] = "k7"


@spoils("what_was_not_accepted_leaves_nothing")
def _a_session_of_a_post_that_was_answered_503(seen: Evidence) -> None:
    row(seen, TASK)["title"] = "say never"


@spoils("no_caller_gets_nonsense")
def _a_fault_of_ours(seen: Evidence) -> None:
    seen.posts[-1].tries[0] = replace(seen.posts[-1].tries[0], status=500, code="")


@spoils("no_caller_gets_nonsense")
def _a_cancel_that_is_not_found(seen: Evidence) -> Evidence:
    return replace(seen, cancels=[Cancel(TALK, Try(at(1), at(2), 404), None)])


@spoils("no_caller_is_refused_by_a_running_session")
def _a_conversation_that_refuses_a_delivery(seen: Evidence) -> Evidence:
    away = Try(at(30), at(31), 409, code="session_not_active")
    return replace(seen, posts=[*seen.posts, Post("message", "k8", TALK, "say hi", "hi", [away])])


@spoils("no_caller_is_refused_by_a_running_session")
def _a_task_that_refuses_a_delivery_before_its_end(seen: Evidence) -> Evidence:
    away = Try(at(1.0), at(1.5), 409, code="session_not_active")
    return replace(seen, posts=[*seen.posts, Post("message", "k8", TASK, "say hi", "hi", [away])])


@spoils("each_delivery_settles_once")
def _a_delivery_whose_end_is_told_twice(seen: Evidence) -> None:
    event(seen, "turn.completed", turn=2)["delivery_ids"].append("d0")


@spoils("each_delivery_settles_once")
def _a_delivery_that_never_ends(seen: Evidence) -> None:
    delivery(seen, TALK, "d3")["outcome"] = None


@spoils("every_session_has_settled")
@spoils("nothing_is_left_to_do")
def _a_session_that_runs_for_ever(seen: Evidence) -> None:
    row(seen, TALK)["status"] = "running"


@spoils("every_session_has_settled")
def _a_fence_that_is_left(seen: Evidence) -> Evidence:
    return replace(seen, fences=[{"session_id": TALK, "scope": "model", "turn": 3}])


@spoils("every_attempt_has_ended")
def _an_attempt_that_runs_for_ever(seen: Evidence) -> Evidence:
    attempt = {"number": 1, "scope": "model", "turn": 0, "status": "running", "ended_at": None}
    return replace(seen, attempts={TALK: [{**attempt, **dict.fromkeys(invariants.TOKENS, 0)}]})


@spoils("every_attempt_has_ended")
def _a_token_that_two_attempts_have_used(seen: Evidence) -> Evidence:
    attempt = {"number": 1, "scope": "model", "turn": 0, "status": "failed", "ended_at": "then"}
    return replace(seen, attempts={TALK: [{**attempt, **dict.fromkeys(invariants.TOKENS, 0), "output_tokens": 1}]})


@spoils("nothing_is_left_to_do")
def _a_session_that_wants_attention(seen: Evidence) -> None:
    row(seen, TALK)["attention"] = '{"code": "lost"}'


# --- effects ------------------------------------------------------------------------------------------------


@spoils("at_most_once_holds")
def _a_charge_that_happens_twice(seen: Evidence) -> Evidence:
    return replace(seen, effects=[*seen.effects, seen.effects[0]])


@spoils("at_most_once_holds")
def _a_put_that_happens_twice_under_one_key(seen: Evidence) -> Evidence:
    return replace(seen, effects=[*seen.effects, {**seen.effects[2], "at": at(23.4)}])


@spoils("at_most_once_holds")
def _a_call_that_did_nothing_and_is_complete(seen: Evidence) -> Evidence:
    return replace(seen, effects=seen.effects[1:])


@spoils("at_most_once_holds")
def _a_call_that_acted_and_is_not_reported(seen: Evidence) -> Evidence:
    effect = {**seen.effects[0], "body": {**seen.effects[0]["body"], "call": "c9"}}
    return replace(seen, effects=[*seen.effects, effect])


@spoils("nothing_acts_unapproved")
def _a_payment_before_its_approval(seen: Evidence) -> None:
    seen.effects[1]["at"] = at(14)


@spoils("nothing_acts_unapproved")
def _a_payment_that_was_denied(seen: Evidence) -> None:
    asked(seen)["answer"]["optionId"] = "deny"


@spoils("each_request_is_asked_and_closed_once")
def _a_request_that_is_closed_in_silence(seen: Evidence) -> None:
    event(seen, "input.resolved")["type"] = "session.attention"


@spoils("a_counted_answer_counts")
def _an_answer_that_was_counted_and_is_lost(seen: Evidence) -> None:
    asked(seen).update(status="withdrawn", answer=None)


# --- cancels ------------------------------------------------------------------------------------------------


@spoils("nothing_acts_after_it_was_stopped")
def _an_effect_after_its_turn_was_stopped(seen: Evidence) -> None:
    seen.effects[2]["at"] = at(26)


@spoils("an_accepted_cancel_stops_its_turn_once")
def _a_cancel_that_stops_nothing(seen: Evidence) -> None:
    event(seen, "turn.cancelled")["type"] = "turn.completed"


@spoils("an_accepted_cancel_stops_its_turn_once")
def _a_cancel_that_is_not_written_down(seen: Evidence) -> None:
    event(seen, "cancel.requested")["type"] = "session.attention"


@spoils("an_accepted_cancel_stops_its_turn_once")
def _a_cancel_that_is_written_down_after_it_was_accepted(seen: Evidence) -> None:
    event(seen, "cancel.requested")["at"] = stamp(23.5)


@spoils("an_accepted_cancel_stops_its_turn_once")
def _a_cancel_that_is_accepted_when_all_has_ended(seen: Evidence) -> Evidence:
    return replace(seen, cancels=[Cancel(TALK, Try(at(30), at(31), 200), "accepted")])


@spoils("nothing_begins_after_an_accepted_cancel")
def _a_call_that_begins_after_the_cancel_was_accepted(seen: Evidence) -> None:
    intent = next(each for each in seen.records[TALK] if each["slot"] == "intent/c3")
    intent["at"] = stamp(23.4)


@spoils("nothing_begins_after_an_accepted_cancel")
def _another_attempt_at_a_call_that_had_begun_before_its_cancel(seen: Evidence) -> None:
    effect = next(each for each in seen.effects if each["body"]["call"] == "c3")
    effect["at"] = at(23.5 + 30)


@spoils("nothing_begins_after_an_accepted_cancel")
def _an_approved_call_that_begins_after_the_cancel_of_the_turn_that_resumes_it(seen: Evidence) -> Evidence:
    request = event(seen, "cancel.requested")
    request.update(turn=2, at=stamp(16.2))
    return replace(seen, cancels=[Cancel(TALK, Try(at(16.1), at(16.3), 200), "accepted")])


# --- turns --------------------------------------------------------------------------------------------------


@spoils("nothing_fails")
def _a_turn_that_fails(seen: Evidence) -> None:
    event(seen, "turn.completed")["type"] = "turn.failed"


@spoils("consumed_deliveries_are_answered")
def _a_message_with_the_answer_to_another_one(seen: Evidence) -> None:
    event(seen, "message.completed", turn=0)["data"]["message"] = "one"


@spoils("consumed_deliveries_are_answered")
def _an_approval_after_which_nothing_is_said(seen: Evidence) -> None:
    event(seen, "message.completed", turn=2)["data"]["message"] = ""


# --- the model ----------------------------------------------------------------------------------------------


@spoils("requests_are_paired")
def _a_call_without_its_result_at_the_provider(seen: Evidence) -> Evidence:
    return replace(seen, unpaired=["no result for c0"])


@spoils("recorded_replies_are_not_asked_again")
def _a_reply_that_is_paid_twice(seen: Evidence) -> Evidence:
    return replace(seen, asked=[*seen.asked, Asked("call charge then say zero", 0, "", at(3))])


@spoils("streamed_text_is_the_message")
def _a_text_that_was_never_streamed(seen: Evidence) -> None:
    completed = next(each for each in seen.streams[TASK] if each["type"] == "message.completed")
    completed["data"]["message"] = "something else"


@spoils("everything_is_counted_once")
def _a_reply_that_is_counted_twice(seen: Evidence) -> None:
    row(seen, TASK)["steps"] += 1


# --- whole sessions -----------------------------------------------------------------------------------------


@spoils("forks_are_what_was_asked_for")
def _a_fork_at_another_turn(seen: Evidence) -> None:
    event(seen, "session.forked", FORK)["data"]["parent"]["turn"] = 1


@spoils("forks_are_what_was_asked_for")
def _two_forks_under_one_key(seen: Evidence) -> None:
    seen.forks[0].tries.append(Try(at(7), at(7.1), 201, session_id="ses_other"))


@spoils("forks_are_what_was_asked_for")
def _a_fork_that_is_refused_with_nonsense(seen: Evidence) -> None:
    seen.forks[0].tries.append(Try(at(7), at(7.1), 500))


@spoils("forks_are_what_was_asked_for")
def _a_place_that_is_offered_and_refused(seen: Evidence) -> Evidence:
    refused = Try(at(7), at(7.1), 409, code="fork_boundary_not_offered")
    return replace(seen, forks=[*seen.forks, Fork(TALK, {"turn": 0}, "k13", offered=True, tries=[refused])])


@spoils("deleted_sessions_leave_nothing")
def _a_session_that_is_there_after_its_deletion(seen: Evidence) -> Evidence:
    return replace(seen, sessions=[*seen.sessions, {**row(seen, TASK), "session_id": GONE}])


@spoils("deleted_sessions_leave_nothing")
def _state_of_a_deleted_session(seen: Evidence) -> Evidence:
    return replace(seen, with_other_rows=[GONE])


@spoils("deleted_sessions_leave_nothing")
def _an_effect_long_after_the_deletion(seen: Evidence) -> Evidence:
    late: Json = {"key": "k", "at": at(90), "body": {**seen.effects[0]["body"], "session": GONE}}
    return replace(seen, effects=[*seen.effects, late])


@spoils("deleted_sessions_leave_nothing")
def _a_deletion_without_a_receipt(seen: Evidence) -> Evidence:
    return replace(seen, tombstones={})


@spoils("what_was_accepted_is_answered_once")
def _a_control_that_is_accepted_and_gone(seen: Evidence) -> None:
    del rows(seen.deliveries, FORK)[1]


@spoils("each_delivery_is_answered_once")
def _a_control_that_is_carried_out_twice(seen: Evidence) -> None:
    append(seen, FORK, "context.cleared", 1, delivery_ids=["f1"])


@spoils("what_was_accepted_is_answered_once")
def _a_running_session_that_is_said_not_to_be_active(seen: Evidence) -> Evidence:
    return replace(seen, posts=[*seen.posts, Post("clear", "k12", TALK, tries=[Try(at(9), at(9.1), 200)])])


@pytest.mark.parametrize(("check", "spoil"), [pytest.param(c, s, id=f"{name}/{c}") for c, name, s in _SPOILS])
def test_what_is_wrong_is_found(check: str, spoil: Spoil) -> None:
    seen = sample.evidence()

    spoiled = spoil(seen) or seen

    assert check in promises.broken_promises(spoiled)


# --- what is not wrong --------------------------------------------------------------------------------------


def test_a_worker_that_was_away_may_act_late_if_its_call_is_reported_as_unknown() -> None:
    seen = sample.evidence()
    result = event(seen, "action.result", turn=3)
    result["data"] |= {"status": "failed", "error": {"code": "TOOL_OUTCOME_UNKNOWN"}}
    seen.effects[2]["at"] = at(26)
    away = replace(seen, absences=[Absence("frozen", at(23), at(25.5))])

    assert "nothing_acts_after_it_was_stopped" in promises.broken_promises(seen)
    assert promises.broken_promises(away) == {}


def test_what_was_about_to_happen_when_a_cancel_was_accepted_may_happen() -> None:
    seen = sample.evidence()
    seen.effects[2]["at"] = at(23.9)

    assert promises.broken_promises(seen) == {}


def test_a_try_without_an_answer_may_have_been_accepted() -> None:
    seen = sample.evidence()
    seen.posts[-1].tries.insert(0, Try(at(5), at(6), None, "timeout"))
    delivery(seen, TASK, "e1")["idempotency_key"] = "k7"

    assert promises.broken_promises(seen) == {}


def test_the_slowest_delivery_is_not_one_that_waited_behind_a_park() -> None:
    seen = sample.evidence()
    delivery(seen, TALK, "d3")["accepted_at"] = stamp(13)
    delivery(seen, TASK, "e0")["accepted_at"] = stamp(0.1)

    seconds, name = promises.slowest_delivery(seen)

    assert (round(seconds, 3), name) == (0.9, f"{TASK} e0")


# --- helpers ------------------------------------------------------------------------------------------------


def row(seen: Evidence, session_id: str) -> Json:
    return next(each for each in seen.sessions if each["session_id"] == session_id)


def event(seen: Evidence, type: str, session_id: str = TALK, turn: int | None = None) -> Json:
    """The first event of a type, in a turn if one is named."""
    return next(each for each in seen.events[session_id] if each["type"] == type and turn in (None, each["turn"]))


def delivery(seen: Evidence, session_id: str, delivery_id: str) -> Json:
    return next(each for each in seen.deliveries[session_id] if each["delivery_id"] == delivery_id)


def asked(seen: Evidence) -> Json:
    return seen.inputs[TALK][0]


def append(seen: Evidence, session_id: str, type: str, turn: int, **more: object) -> None:
    events = rows(seen.events, session_id)
    last = {"step": None, "data": None, "delivery_ids": None, "at": stamp(50), **more}
    events.append({"session_id": session_id, "idx": len(events), "type": type, "turn": turn, **last})


def rows(kept: Mapping[str, Sequence[Json]], session_id: str) -> list[Json]:
    """What the sample holds are lists, which may be changed."""
    return cast("list[Json]", kept[session_id])
