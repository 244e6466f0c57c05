"""What callers over HTTP were promised, against what became of it. Each check yields what is wrong, in words."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tests.support.chaos.consent import seconds
from tests.support.chaos.evidence import Cancel, Evidence, Json, Post, Try
from tests.support.chaos.invariants import Check, consumed_by_controls, problems, streamed

# The API, the store and the callers are processes of their own, on one clock.
_CLOCKS = 0.05

#: How long a call that has begun takes to act, beside busy neighbours.
_TIME_TO_ACT = 5.0
#: How long a turn may take to stop before its session is deleted without it.
_TIME_TO_STOP = 45.0

_TERMINAL = ("session.completed", "session.failed")
_ENDED = ("completed", "failed")

#: What a caller who asks for nothing wrong may get as a response, besides that it is accepted.
_REFUSALS = {
    (409, "session_not_active"),
    (409, "input_closed"),
    (409, "input_expired"),
    (429, "inbox_full"),
    (503, "unavailable"),
    (503, "outcome_unknown"),
}


def broken_promises(evidence: Evidence) -> dict[str, list[str]]:
    """Everything that is wrong, by the names of the checks: theirs and the ones of every test."""
    found = {each.__name__: list(each(evidence)) for each in ABOUT_WHOLE_SESSIONS}
    staying = evidence.of_those_that_stay()
    found |= {each.__name__: list(each(staying)) for each in PROMISES}
    return {**problems(staying), **{name: wrong for name, wrong in found.items() if wrong}}


# --- posts --------------------------------------------------------------------------------------------------


def what_was_accepted_is_answered_once(evidence: Evidence) -> Iterator[str]:
    """A 2xx names a delivery of a session that exists, consumed by one turn or refused by one event, never both."""
    rows = {(session_id, row["delivery_id"]) for session_id, each in evidence.deliveries.items() for row in each}
    keyed = {(session_id, row["idempotency_key"]) for session_id, each in evidence.deliveries.items() for row in each}
    sessions = {session["session_id"]: session for session in evidence.sessions}
    consumed, refused = _consumed(evidence), _refused(evidence)
    for post, tried in _accepted(evidence):
        place = (tried.session_id, tried.delivery_id or "")
        name = f"{post.kind} {post.key} ({tried.session_id} {tried.delivery_id})"
        if post.kind in ("compact", "clear") and not tried.session_id:
            # The contract's answer when there is no session any more.
            if post.session_id in sessions and sessions[post.session_id]["status"] not in _ENDED:
                yield f"{post.kind} {post.key}: answered that {post.session_id} is not active, and it has not ended"
        elif tried.session_id not in sessions:
            yield f"{name}: accepted, and there is no such session"
        elif tried.delivery_id is None and post.kind in ("compact", "clear"):
            # The contract's receipt names none; each row is checked below its key.
            if (tried.session_id, post.key) not in keyed:
                yield f"{name}: accepted, and there is no such delivery"
        elif tried.delivery_id is None:
            # An answer to what was answered already, in the same way: the model does not need it.
            continue
        elif place not in rows:
            yield f"{name}: accepted, and there is no such delivery"
        elif (consumed[place], refused[place]) not in ((1, 0), (0, 1)):
            times = f"consumed {consumed[place]} times, refused {refused[place]} times"
            session = sessions[tried.session_id]
            yield f"{name}: {times}; its session is a {session['mode']}, {session['status']}"


def one_key_has_one_receipt(evidence: Evidence) -> Iterator[str]:
    """Every try that was accepted got the same receipt, and no other post got that one."""
    owners: dict[str, set[str]] = defaultdict(set)
    for post in evidence.posts:
        receipts = {(tried.session_id, tried.delivery_id) for tried in post.tries if tried.accepted}
        if len(receipts) > 1:
            yield f"{post.kind} {post.key}: receipts {sorted(receipts, key=str)}"
        if post.kind in ("create", "message"):
            for _, delivery_id in receipts:
                owners[delivery_id or "none"].add(post.key)
    for delivery_id, keys in owners.items():
        if len(keys) > 1:
            yield f"{delivery_id} is the receipt of {sorted(keys)}"


def what_was_not_accepted_leaves_nothing(evidence: Evidence) -> Iterator[str]:
    """A post of which no try can have been accepted has no row under its key, and starts no session."""
    keys = {row["idempotency_key"]: row for rows in evidence.deliveries.values() for row in rows}
    titles = {session["title"]: session["session_id"] for session in evidence.sessions}
    for post in evidence.posts:
        if not post.tries or not all(_left_nothing(tried) for tried in post.tries):
            continue
        name = f"{post.kind} {post.key}, answered {[tried.status or tried.problem for tried in post.tries]}"
        if post.key in keys:
            row = keys[post.key]
            yield f"{name}: the delivery {row['delivery_id']} of {row['session_id']} was kept at {row['accepted_at']}"
        elif post.kind == "create" and post.message[:79] in {(title or "")[:79] for title in titles}:
            yield f"{name}: its session was kept"


def _left_nothing(tried: Try) -> bool:
    """Whether its caller learned so, or never reached an API."""
    known = tried.status is not None and not tried.accepted and tried.code != "outcome_unknown"
    return tried.problem == "refused" or known


def no_caller_gets_nonsense(evidence: Evidence) -> Iterator[str]:
    """Who asks for nothing wrong is accepted, or refused in a way that the contract knows."""
    for post in evidence.posts:
        for tried in post.tries:
            response = (tried.status, tried.code)
            if tried.status is not None and not tried.accepted and response not in _REFUSALS:
                yield f"{post.kind} {post.key} to {post.session_id or 'a new session'}: answered {response}"
    for cancel in evidence.cancels:
        if cancel.tried.status not in (None, 200, 503):
            yield f"cancel of {cancel.session_id}: answered {cancel.tried.status} {cancel.tried.code}"


def no_caller_is_refused_by_a_running_session(evidence: Evidence) -> Iterator[str]:
    """`session_not_active` is returned of a session that has ended by then."""
    ends = {
        session_id: seconds(event["at"])
        for session_id, events in evidence.events.items()
        for event in reversed(events)
        if event["type"] in _TERMINAL
    }
    for post in evidence.posts:
        for tried in post.tries:
            if tried.code == "session_not_active" and ends.get(post.session_id, float("inf")) > tried.ended + _CLOCKS:
                yield f"{post.kind} {post.key}: turned away from {post.session_id}, which had not ended"


def a_counted_answer_counts(evidence: Evidence) -> Iterator[str]:
    """A receipt that says `answered` is what the store holds in the end."""
    rows = {row["request_id"]: row for rows in evidence.inputs.values() for row in rows}
    for post, tried in _accepted(evidence):
        for request_id, status, option in tried.outcomes:
            row = rows.get(request_id)
            answer: Json = (row and row["answer"]) or {}
            kept = (row and row["status"], answer.get("optionId"))
            if status == "answered" and kept != (status, option):
                yield f"{post.key} {request_id}: reported {(status, option)}, and it is {kept}"


# --- turns --------------------------------------------------------------------------------------------------


def nothing_fails(evidence: Evidence) -> Iterator[str]:
    """No script fails by itself, and no death is a reason to fail: only a task that was stopped has failed."""
    for session_id, events in evidence.events.items():
        for event in events:
            data: Json = event["data"] or {}
            stopped = data.get("code") == "TURN_CANCELLED"
            if event["type"] in ("step.failed", "turn.failed", "session.failed") and not stopped:
                yield f"{session_id}: {event['type']} at {event['idx']}: {event['data']}"


def consumed_deliveries_are_answered(evidence: Evidence) -> Iterator[str]:
    """The turn that consumed a message, or the one that resumed it after an answer, has the scripted text."""
    for post, tried in _accepted(evidence):
        events = evidence.events.get(tried.session_id, ())
        received = [event for event in events if event["type"] == "message.received"]
        begun = next((event["turn"] for event in received if tried.delivery_id in event["delivery_ids"]), None)
        if not post.answer or begun is None:
            continue
        # Turns that consume an answer resume what was sent before, until another message is consumed.
        end = min((event["turn"] for event in received if event["turn"] > begun), default=float("inf"))
        its = [event for event in events if event["turn"] is not None and begun <= event["turn"] < end]
        said = [event["data"]["message"] for event in its if event["type"] == "message.completed"]
        stopped = any(event["type"] == "turn.cancelled" for event in its)
        if post.answer not in said and not stopped and not _noted(evidence, tried.session_id, begun, end):
            yield f"{tried.session_id} {tried.delivery_id}: {post.message!r} was answered with {said}"


def _noted(evidence: Evidence, session_id: str, begun: int, end: float) -> bool:
    """Whether a late answer was reported to the model in between: then it is that which the script answers."""
    return any(
        record["slot"] == "resume" and begun <= record["turn"] < end and record["body"].get("notes")
        for record in evidence.records.get(session_id, ())
    )


# --- cancels ------------------------------------------------------------------------------------------------


def an_accepted_cancel_stops_its_turn_once(evidence: Evidence) -> Iterator[str]:
    """It was written down when it was accepted, and one `turn.cancelled` of that turn follows.

    A turn that waited for people may have begun to resume with their answers: then that one is cancelled.
    """
    for cancel, request in _cancel_requests(evidence):
        name = f"{cancel.session_id}: a cancel asked for at {cancel.tried.began:.3f}"
        if request is None:
            yield f"{name} was accepted, and no cancel.requested was written by then"
            continue
        later = [
            event
            for event in evidence.events[cancel.session_id]
            if event["type"] == "turn.cancelled" and event["idx"] > request["idx"]
        ]
        stopped = [event for event in later if event["turn"] == request["turn"]]
        if not stopped:
            resuming = _resuming(evidence, cancel.session_id, request)
            stopped = [event for event in later if event["turn"] == resuming]
        if len(stopped) != 1:
            yield f"{name} was accepted for turn {request['turn']}, which was cancelled {len(stopped)} times after that"
        elif seconds(stopped[0]["at"]) < cancel.tried.began - _CLOCKS:
            yield f"{name} was accepted, and the last turn with a cancel request had been cancelled before"


def _resuming(evidence: Evidence, session_id: str, request: Json) -> int | None:
    """The turn that resumed a parked one, if that was to be cancelled."""
    before = [event for event in evidence.events[session_id] if event["idx"] < request["idx"]]
    parked = any(event["type"] == "input.requested" and event["turn"] == request["turn"] for event in before)
    return request["turn"] + 1 if parked else None


def nothing_begins_after_an_accepted_cancel(evidence: Evidence) -> Iterator[str]:
    """A caller who got `accepted` sees no effect of that turn begin, but those that were about to happen.

    A call that was asked about in an earlier turn acts in the one that resumes it, under its own turn's number.
    """
    intents = {
        (session_id, record["turn"], record["slot"].removeprefix("intent/")): seconds(record["at"])
        for session_id, records in evidence.records.items()
        for record in records
        if record["slot"].startswith("intent/")
    }
    for cancel, request in _cancel_requests(evidence):
        if request is None:
            continue
        answered = cancel.tried.ended + _CLOCKS
        for effect in evidence.effects:
            body = effect["body"]
            if body["session"] != cancel.session_id or body["turn"] > request["turn"] or effect["at"] <= answered:
                continue
            begun = intents.get((body["session"], body["turn"], body["call"]), answered + 1) <= answered
            # Of a call that had begun, this attempt may still act; another one, some time later, may not begin.
            in_time = effect["at"] <= answered + _TIME_TO_ACT or evidence.may_be_late(effect["at"])
            if not (begun and in_time):
                late = effect["at"] - cancel.tried.ended
                yield f"{cancel.session_id} {body['call']}: acted {late:.3f} s after its cancel was accepted"


def _cancel_requests(evidence: Evidence) -> Iterator[tuple[Cancel, Json | None]]:
    """Each accepted cancel, and the newest `cancel.requested` that was in the log when it was accepted."""
    for cancel in evidence.cancels:
        if cancel.status == "accepted":
            written = [
                event
                for event in evidence.events.get(cancel.session_id, ())
                if event["type"] == "cancel.requested" and seconds(event["at"]) <= cancel.tried.ended + _CLOCKS
            ]
            yield cancel, written[-1] if written else None


# --- the end ------------------------------------------------------------------------------------------------


def nothing_is_left_to_do(evidence: Evidence) -> Iterator[str]:
    """Every session waits or has ended; one that waits for people has asked them; none needs attention."""
    for session in evidence.sessions:
        session_id = session["session_id"]
        unread = [
            row["delivery_id"]
            for row in evidence.deliveries.get(session_id, ())
            if row["turn"] is None and row["refused"] is None
        ]
        asks = [row for row in evidence.inputs.get(session_id, ()) if row["status"] == "open"]
        if session["status"] not in ("waiting", *_ENDED):
            yield f"{session_id} is {session['status']} since {session['updated_at']}, with {unread} unread"
        elif unread and not asks:
            yield f"{session_id} is {session['status']} and has no open request, and has not consumed {unread}"
        if session.get("attention") is not None:
            yield f"{session_id} wants attention: {session['attention']}"


def live_readers_got_the_log(evidence: Evidence) -> Iterator[str]:
    """A reader that read while it happened, and reconnected at the next index when cut off, got the whole log."""
    for session_id, events in evidence.followed:
        given = [(event["meta"]["id"], event["type"]) for event in events]
        kept = streamed(session_id, evidence)
        if given != kept[: len(given)]:
            first = next((index for index, pair in enumerate(zip(given, kept, strict=False)) if pair[0] != pair[1]), -1)
            yield f"{session_id}: a live reader differs from the log at {first}: {given[first]} ({len(kept)} kept)"


# --- whole sessions -----------------------------------------------------------------------------------------


def forks_are_what_was_asked_for(evidence: Evidence) -> Iterator[str]:
    """One session for each key, which begins where it was asked to; or a refusal that names a reason."""
    gone = {each.session_id for each in evidence.deletions}
    for fork in evidence.forks:
        name = f"the fork {fork.key} of {fork.parent} at {fork.place}"
        made = {tried.session_id for tried in fork.tries if tried.accepted}
        if len(made) > 1:
            yield f"{name} is {sorted(made)}"
        for session_id in made - gone:
            events = evidence.events.get(session_id, ())
            began = events[0]["data"] if events and events[0]["type"] == "session.forked" else None
            if began != {"parent": {"sessionId": fork.parent, **fork.place}}:
                yield f"{name} is {session_id}, which begins with {began}"
        for tried in fork.tries:
            refused = (409, "fork_boundary_not_offered")
            known = (tried.status, tried.code) in {*_REFUSALS, *(() if fork.offered else (refused,))}
            if tried.status is not None and not tried.accepted and not known:
                yield f"{name}: answered {tried.status} {tried.code}"


def deleted_sessions_leave_nothing(evidence: Evidence) -> Iterator[str]:
    """What was accepted for deletion has no row, and a receipt; its tools do nothing after that."""
    for deletion in evidence.deletions:
        session_id = deletion.session_id
        for tried in deletion.tries:
            if tried.status not in (None, 200, 202, 503):
                yield f"the deletion of {session_id}: answered {tried.status} {tried.code}"
        if not deletion.accepted:
            continue
        tombstone = evidence.tombstones.get(session_id)
        if tombstone is None:
            yield f"{session_id} was deleted, and has no receipt"
            continue
        kinds = {
            "its row": [session["session_id"] for session in evidence.sessions],
            "fences": [fence["session_id"] for fence in evidence.fences],
            "attempts": evidence.attempts,
            "state, a token or a dead letter": evidence.with_other_rows,
            **{"events": evidence.events, "records": evidence.records},
            **{"deliveries": evidence.deliveries, "inputs": evidence.inputs},
        }
        yield from (f"{session_id} was deleted, and has {kind}" for kind, left in kinds.items() if session_id in left)
        # A turn that runs has the time to stop; by then everything is gone, and no intent can be written.
        end = seconds(tombstone["requested_at"]) + _TIME_TO_STOP + _TIME_TO_ACT
        for effect in (each for each in evidence.effects if each["body"]["session"] == session_id):
            if effect["at"] > end and not evidence.may_be_late(effect["at"]):
                yield f"{session_id} was deleted, and acted {effect['at'] - end:.3f} s too late"


# --- what is reported of it all -----------------------------------------------------------------------------


def slowest_delivery(evidence: Evidence) -> tuple[float, str]:
    """How long the slowest delivery waited to be consumed, and which one it was; not what waited behind a park."""
    slowest = (0.0, "none")
    for session_id, events in evidence.events.items():
        started = {each: event for event in events if event["type"] == "turn.started" for each in event["delivery_ids"]}
        for row in evidence.deliveries.get(session_id, ()):
            consumed = started.get(row["delivery_id"])
            if consumed is not None and not _parked(evidence.inputs.get(session_id, ()), row, consumed):
                took = seconds(consumed["at"]) - seconds(row["accepted_at"])
                slowest = max(slowest, (took, f"{session_id} {row['delivery_id']}"))
    return slowest


def _parked(inputs: Sequence[Json], row: Json, consumed: Json) -> bool:
    """Whether a request was open while the delivery waited."""
    return any(
        each["opened_at"] <= consumed["at"] and (each["closed_at"] or "~") >= row["accepted_at"] for each in inputs
    )


def answers(evidence: Evidence) -> Mapping[str, int]:
    """How often callers got which response."""
    tries = [tried for post in evidence.posts for tried in post.tries]
    responses = Counter(str(tried.status or tried.problem) for tried in tries)
    responses += Counter("delayed" for tried in tries if tried.delayed)
    of_forks = (f"fork {each.status or each.problem}" for fork in evidence.forks for each in fork.tries)
    of_deletions = (f"deletion {each.status or each.problem}" for gone in evidence.deletions for each in gone.tries)
    return (
        responses
        + Counter(f"cancel {cancel.status or cancel.tried.status or 'lost'}" for cancel in evidence.cancels)
        + Counter(of_forks)
        + Counter(of_deletions)
    )


# --- helpers ------------------------------------------------------------------------------------------------


def _accepted(evidence: Evidence) -> Iterator[tuple[Post, Try]]:
    for post in evidence.posts:
        if (tried := post.accepted) is not None:
            yield post, tried


def _consumed(evidence: Evidence) -> Counter[tuple[str, str]]:
    consumed = Counter(
        (session_id, delivery_id)
        for session_id, events in evidence.events.items()
        for event in events
        if event["type"] == "turn.started"
        for delivery_id in event["delivery_ids"] or ()
    )
    for session_id in evidence.events:
        for delivery_id, times in consumed_by_controls(evidence, session_id).items():
            consumed[session_id, delivery_id] += times
    return consumed


def _refused(evidence: Evidence) -> Counter[tuple[str, str]]:
    return Counter(
        (session_id, event["data"]["deliveryId"])
        for session_id, events in evidence.events.items()
        for event in events
        if event["type"] == "delivery.refused"
    )


#: Checks that are also about sessions that somebody wanted deleted.
ABOUT_WHOLE_SESSIONS: tuple[Check, ...] = (forks_are_what_was_asked_for, deleted_sessions_leave_nothing)

PROMISES: tuple[Check, ...] = (
    what_was_accepted_is_answered_once,
    one_key_has_one_receipt,
    what_was_not_accepted_leaves_nothing,
    no_caller_gets_nonsense,
    no_caller_is_refused_by_a_running_session,
    a_counted_answer_counts,
    nothing_fails,
    consumed_deliveries_are_answered,
    an_accepted_cancel_stops_its_turn_once,
    nothing_begins_after_an_accepted_cancel,
    nothing_is_left_to_do,
    live_readers_got_the_log,
)
