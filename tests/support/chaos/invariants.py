"""What must hold after every test, whatever was killed. Each check yields what it finds wrong, in words."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import pairwise
from typing import TypeAlias

from . import consent
from .agents import EFFECTS
from .evidence import Evidence, Json

Check: TypeAlias = Callable[[Evidence], Iterator[str]]

_ENDS = ("turn.completed", "turn.failed", "turn.cancelled")
_STEP_ENDS = ("step.completed", "step.failed")
_BOUNDARIES = ("session.waiting", "session.completed", "session.failed")
_TERMINAL = ("session.completed", "session.failed")
# What people do outside of turns is emitted at any time, of whichever turn it is about.
_AT_ANY_TIME = (
    *("input.resolved", "input.reminded", "cancel.requested", "delivery.refused"),
    *("session.attention", "session.recovered", "session.rebuilt", "session.forked"),
)
_CONTROLS = ("compact", "clear", "reset")
# How a control that was carried out ends for readers.
_CONTROL_ENDS = ("compaction.completed", "compaction.failed", "context.cleared", "session.completed")
#: What a provider counts, as the columns are called.
TOKENS = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens")
# A reply that is recorded and a request that is made are stamped by two processes.
_CLOCKS = 0.05


def check(evidence: Evidence, effects: Mapping[str, str] = EFFECTS) -> None:
    """Raise with everything that is wrong."""
    wrong = problems(evidence, effects)
    assert not wrong, "\n".join(f"{name}: {problem}" for name, found in wrong.items() for problem in found)


def problems(evidence: Evidence, effects: Mapping[str, str] = EFFECTS) -> dict[str, list[str]]:
    """What is wrong, by the names of the checks."""
    single = evidence.of_single_sessions()
    found = {each.__name__: list(each(single if each in OF_SINGLE_SESSIONS else evidence)) for each in INVARIANTS}
    found |= {at_most_once_holds.__name__: list(at_most_once_holds(evidence, effects))}
    return {name: wrong for name, wrong in found.items() if wrong}


# --- the log ------------------------------------------------------------------------------------------------


def indexes_are_dense(evidence: Evidence) -> Iterator[str]:
    for session in evidence.sessions:
        events = evidence.events.get(session["session_id"], ())
        if [event["idx"] for event in events] != list(range(len(events))):
            yield f"{session['session_id']} has the indexes {[event['idx'] for event in events]}"
        if session["next_index"] != len(events):
            yield f"{session['session_id']} has {len(events)} events, and its row says {session['next_index']}"


def streams_are_the_log(evidence: Evidence) -> Iterator[str]:
    """A reader gets every index once, and in order, with the type that the store has."""
    for session_id, stream in evidence.streams.items():
        given = [(event["meta"]["id"], event["type"]) for event in stream]
        kept = streamed(session_id, evidence)
        if given != kept:
            yield f"{session_id}: a reader got {given}, and the log holds {kept}"


def streamed(session_id: str, evidence: Evidence) -> list[tuple[str, str]]:
    """What of its log a session shows its readers: everything up to its terminal event."""
    events = [(f"{session_id}:{event['idx']}", event["type"]) for event in evidence.events.get(session_id, ())]
    end = next((number for number, (_, type) in enumerate(events, 1) if type in _TERMINAL), len(events))
    return events[:end]


def nothing_follows_the_end(evidence: Evidence) -> Iterator[str]:
    for session_id, events in evidence.events.items():
        types = [event["type"] for event in events]
        for index, type in enumerate(types[:-1]):
            if type in _TERMINAL:
                yield f"{session_id}: {types[index + 1 :]} after {type}"


def each_turn_ends_once(evidence: Evidence) -> Iterator[str]:
    """Each turn has one start, one end and one boundary; each step has one start and one end."""
    for session_id in evidence.events:
        events = outside_controls(evidence, session_id)
        turns: dict[int, Counter[str]] = defaultdict(Counter)
        steps: dict[tuple[int | None, int], Counter[str]] = defaultdict(Counter)
        for event in events:
            # An operator may end a session outside of any turn.
            if event["type"] in (*_ENDS, *_BOUNDARIES, "turn.started") and event["turn"] is not None:
                turns[event["turn"]][_kind(event["type"])] += 1
            elif event["type"] in ("step.started", *_STEP_ENDS):
                steps[event["turn"], event["step"]][_kind(event["type"])] += 1
        stopped = {event["turn"] for event in events if event["type"] == "turn.cancelled"}
        parked = {event["turn"] for event in events if event["type"] == "input.requested"}
        for turn, count in turns.items():
            # A turn that is stopped while it waits had ended, to its readers, when it parked.
            ends = 2 if count["turn ends"] == 2 and turn in stopped & parked else 1
            if count != {"turn.started": 1, "turn ends": ends, "boundary": ends}:
                yield f"{session_id} turn {turn}: {dict(count)}"
        for (turn, step), count in steps.items():
            # The outcome of a step is not known when its turn is stopped.
            unfinished = turn in stopped and count == {"step.started": 1}
            if count != {"step.started": 1, "step ends": 1} and not unfinished:
                yield f"{session_id} turn {turn} step {step}: {dict(count)}"


def _kind(type: str) -> str:
    if type in _ENDS:
        return "turn ends"
    if type in _STEP_ENDS:
        return "step ends"
    return "boundary" if type in _BOUNDARIES else type


def turns_do_not_overlap(evidence: Evidence) -> Iterator[str]:
    for session_id in evidence.events:
        events = outside_controls(evidence, session_id)
        of_turns = [event for event in events if event["type"] not in _AT_ANY_TIME and not _ended_by_operator(event)]
        numbers = [event["turn"] for event in of_turns if event["turn"] is not None]
        if any(later < earlier for earlier, later in pairwise(numbers)):
            yield f"{session_id}: the events belong to the turns {numbers}"
        stopped = {event["turn"] for event in events if event["type"] == "turn.cancelled"}
        for before, after in pairwise(of_turns):
            follows = after["type"] == "turn.started" or (
                after["type"] in ("action.result", "turn.cancelled") and after["turn"] in stopped
            )
            if before["type"] in _BOUNDARIES and not follows:
                yield f"{session_id}: {after['type']} at {after['idx']} follows a boundary"


def outside_controls(evidence: Evidence, session_id: str) -> list[Json]:
    """The events of the session but those of controls, which come between two turns."""
    controls = _controls(evidence, session_id)
    return [event for event in evidence.events[session_id] if not _is_of(event, controls)]


def _controls(evidence: Evidence, session_id: str) -> set[str]:
    deliveries = evidence.deliveries.get(session_id, ())
    return {each["delivery_id"] for each in deliveries if each.get("kind") in _CONTROLS}


def _is_of(event: Json, controls: set[str]) -> bool:
    # A control that is cancelled before it is carried out begins a turn, which ends at once.
    ids = event["delivery_ids"] or ()
    return bool(ids) and controls.issuperset(ids) and event["type"] != "turn.started"


def consumed_by_controls(evidence: Evidence, session_id: str) -> Counter[str]:
    """How often each control was carried out."""
    controls = _controls(evidence, session_id)
    return Counter(
        delivery
        for event in evidence.events.get(session_id, ())
        if event["type"] in _CONTROL_ENDS and _is_of(event, controls)
        for delivery in event["delivery_ids"]
    )


def _ended_by_operator(event: Json) -> bool:
    return event["type"] == "session.failed" and event["turn"] is None


def each_action_has_one_result(evidence: Evidence) -> Iterator[str]:
    """A call that people are asked about is an action once it waits for them no more."""
    for session_id, events in evidence.events.items():
        open = {row["request"]["callId"] for row in evidence.inputs.get(session_id, ()) if row["status"] == "open"}
        gated = {
            request["action"]["callId"]
            for event in events
            if event["type"] == "input.requested"
            for request in event["data"]["requests"]
            if event["data"]["details"][request["requestId"]]["kind"] == "approval"
        }
        asked = Counter(
            action["callId"]
            for event in events
            if event["type"] == "actions.requested"
            for action in event["data"]["actions"]
        ) + Counter(gated - open)
        reported = Counter(event["data"]["result"]["callId"] for event in events if event["type"] == "action.result")
        # A turn may end before people are asked about a call: its result is emitted, and it was no action before.
        refused = {
            event["data"]["result"]["callId"]
            for event in events
            if event["type"] == "action.result" and event["data"]["status"] == "rejected"
        }
        reported -= Counter(refused - asked.keys())
        if asked != reported or any(count > 1 for count in asked.values()):
            yield f"{session_id}: asked {dict(asked)}, reported {dict(reported)}"


# --- deliveries ---------------------------------------------------------------------------------------------


def each_delivery_is_answered_once(evidence: Evidence) -> Iterator[str]:
    """An accepted delivery was consumed by one turn, or visibly refused; a caller's receipt is a delivery."""
    for session in evidence.sessions:
        session_id = session["session_id"]
        events = evidence.events.get(session_id, ())
        consumed = Counter(
            delivery for event in events if event["type"] == "turn.started" for delivery in event["delivery_ids"] or ()
        )
        consumed += consumed_by_controls(evidence, session_id)
        shown = Counter(
            delivery for event in events if event["type"] == "message.received" for delivery in event["delivery_ids"]
        )
        refused = Counter(event["data"]["deliveryId"] for event in events if event["type"] == "delivery.refused")
        for delivery in evidence.deliveries.get(session_id, ()):
            if delivery.get("kind") == "fork":
                # It holds the key of the request that made the session, and counts as read.
                continue
            known = delivery["delivery_id"]
            expected = (1, 0) if delivery["refused"] is None else (0, 1)
            if (consumed[known], refused[known]) != expected or (delivery["turn"] is None) != (expected[0] == 0):
                yield (
                    f"{session_id} {known}: turn {delivery['turn']}, refused {delivery['refused']}; "
                    f"consumed {consumed[known]} times, refused {refused[known]} times"
                )
        journal = Counter(
            record["body"]["deliveryId"]
            for record in evidence.records.get(session_id, ())
            if record["slot"].startswith("delivery/")
        )
        yield from (f"{session_id}: the journal holds {known} {n} times" for known, n in journal.items() if n > 1)
        said = Counter(
            record["body"]["deliveryId"]
            for record in evidence.records.get(session_id, ())
            if record["slot"].startswith("delivery/") and record["body"].get("message") is not None
        )
        if said != shown:
            yield f"{session_id}: the journal holds the messages {dict(said)}, readers were shown {dict(shown)}"
    for session_id, delivery_id in evidence.receipts:
        if delivery_id not in {each["delivery_id"] for each in evidence.deliveries.get(session_id, ())}:
            yield f"{session_id}: {delivery_id} was accepted and is gone"


def each_delivery_settles_once(evidence: Evidence) -> Iterator[str]:
    """One event tells the end of each delivery, and its row has it, unless people are asked about it."""
    for session in evidence.sessions:
        session_id = session["session_id"]
        events = evidence.events.get(session_id, ())
        ends = Counter(
            delivery
            for event in events
            if event["type"] in (*_ENDS, *_CONTROL_ENDS, "session.failed")
            for delivery in event["delivery_ids"] or ()
        )
        refused = Counter(event["data"]["deliveryId"] for event in events if event["type"] == "delivery.refused")
        asks = any(each["status"] == "open" for each in evidence.inputs.get(session_id, ()))
        for delivery in evidence.deliveries.get(session_id, ()):
            known, outcome = delivery["delivery_id"], delivery["outcome"]
            if delivery.get("kind") == "fork":
                continue
            if outcome is None and asks and not ends[known] + refused[known]:
                continue
            if outcome is None or ends[known] + refused[known] != 1:
                yield f"{session_id} {known}: {outcome}, told by {ends[known]} ends and {refused[known]} refusals"


def every_session_has_settled(evidence: Evidence) -> Iterator[str]:
    """A session's row agrees with its last boundary, and no late attempt may write to it."""
    for session in evidence.sessions:
        events = evidence.events.get(session["session_id"], ())
        last = next((event["type"] for event in reversed(events) if event["type"] in _BOUNDARIES), "none")
        if last == "none" and events and events[0]["type"] == "session.forked":
            # It begins between two turns.
            last = "session.waiting"
        if last != f"session.{session['status']}":
            yield f"{session['session_id']} is {session['status']}, and its last boundary is {last}"
    for fence in evidence.fences:
        yield f"{fence['session_id']}: the fence {fence['scope']} of turn {fence['turn']} is left"


def every_attempt_has_ended(evidence: Evidence) -> Iterator[str]:
    """What is reported of attempts ends with them, and says of each token which attempt has used it."""
    for session in evidence.sessions:
        session_id = session["session_id"]
        attempts = evidence.attempts.get(session_id, ())
        for each in attempts:
            if each["status"] == "running" or each["ended_at"] is None:
                yield f"{session_id}: attempt {each['number']} at {each['scope']} of turn {each['turn']} has not ended"
        for unit in TOKENS:
            used = sum(each[unit] for each in attempts)
            if used != session[unit]:
                yield f"{session_id} has used {session[unit]} {unit}, and its attempts {used}"


# --- effects ------------------------------------------------------------------------------------------------


def at_most_once_holds(evidence: Evidence, effects: Mapping[str, str]) -> Iterator[str]:
    """One effect when the call is reported as completed, at most one else; a tool that may repeat has one key."""
    happened: dict[tuple[str, str], list[Json]] = defaultdict(list)
    for effect in evidence.effects:
        happened[effect["body"]["session"], effect["body"]["call"]].append(effect)
    for session_id, events in evidence.events.items():
        for event in events:
            if event["type"] != "action.result" or event["data"]["result"].get("toolName") not in effects:
                continue
            result = event["data"]["result"]
            made = happened.pop((session_id, result["callId"]), [])
            completed = event["data"]["status"] == "completed"
            yield from _of_call(effects[result["toolName"]], made, completed, f"{session_id} {result['callId']}")
    for (session_id, call_id), made in happened.items():
        if session_id in evidence.events:
            yield f"{session_id} {call_id}: {len(made)} effects, and none was reported"


def _of_call(effects: str, made: list[Json], completed: bool, name: str) -> Iterator[str]:
    if len({effect["key"] for effect in made}) > 1:
        yield f"{name}: effects with different keys {[effect['key'] for effect in made]}"
    if effects == "at_most_once" and len(made) > 1:
        yield f"{name}: {len(made)} effects of a tool that may have one"
    if effects == "idempotent" and len(made) > 1:
        yield f"{name}: {len(made)} effects, though the other side honours its key"
    if completed and not made:
        yield f"{name}: reported as completed, without an effect"


# --- the model ----------------------------------------------------------------------------------------------


def requests_are_paired(evidence: Evidence) -> Iterator[str]:
    """The provider was never shown a call without exactly one result."""
    yield from evidence.unpaired


def recorded_replies_are_not_asked_again(evidence: Evidence) -> Iterator[str]:
    """No request for a step was made after that step's reply was in the journal, but by a worker that was frozen."""
    recorded = _recorded_replies(evidence)
    for request in evidence.asked:
        at = recorded.get((request.said, request.step))
        if at is not None and request.at > at + _CLOCKS and not evidence.may_be_late(request.at, "frozen"):
            yield f"{request.said!r} step {request.step} was asked {request.at - at:.3f} s after its reply was recorded"


def _recorded_replies(evidence: Evidence) -> dict[tuple[str, int], float]:
    """When the reply of each place was recorded. Tests say each message once, so a message names its turn."""
    replies: dict[tuple[str, int], float] = {}
    ambiguous: set[tuple[str, int]] = set()
    for records in evidence.records.values():
        messages = {each["turn"]: each["body"]["message"] for each in records if each["slot"] == "delivery/0"}
        for record in records:
            if record["slot"] == "reply" and isinstance(messages.get(record["turn"]), str):
                place = (messages[record["turn"]], record["step"])
                if place in replies:
                    ambiguous.add(place)
                replies[place] = datetime.fromisoformat(record["at"]).timestamp()
    return {place: at for place, at in replies.items() if place not in ambiguous}


def streamed_text_is_the_message(evidence: Evidence) -> Iterator[str]:
    """Within an attempt the text so far grows by the deltas; what is completed is what its own attempt emitted."""
    for stream in evidence.streams.values():
        so_far: dict[tuple[str, int], str] = {}
        for event in stream:
            data: Json = event.get("data") or {}
            match event["type"]:
                case "step.superseded":
                    so_far.pop((data["turnId"], data["stepIndex"]), None)
                case "message.appended":
                    place = (data["turnId"], data["stepIndex"])
                    so_far[place] = so_far.get(place, "") + data["messageDelta"]
                    if so_far[place] != data["messageSoFar"]:
                        yield f"{event['meta']['id']}: {data['messageSoFar']!r} instead of {so_far[place]!r}"
                case "message.completed":
                    streamed_text = so_far.pop((data["turnId"], data["stepIndex"]), "")
                    if streamed_text != data["message"]:
                        yield f"{event['meta']['id']}: streamed {streamed_text!r}, completed {data['message']!r}"
                case _:
                    pass


def everything_is_counted_once(evidence: Evidence) -> Iterator[str]:
    """The read model counts what the journal holds."""
    for session in evidence.sessions:
        records = evidence.records.get(session["session_id"], ())
        replies = [each for each in records if each["slot"] == "reply" and each["format"].startswith("pydantic-ai/")]
        tokens = sum(each["body"].get("usage", {}).get("inputTokens", 0) for each in records)
        counted = (session["steps"], session["input_tokens"])
        if counted != (len(replies), tokens):
            yield f"{session['session_id']} counts {counted} steps and tokens for {len(replies)} replies"


INVARIANTS: tuple[Check, ...] = (
    indexes_are_dense,
    streams_are_the_log,
    nothing_follows_the_end,
    each_turn_ends_once,
    turns_do_not_overlap,
    each_action_has_one_result,
    each_delivery_is_answered_once,
    each_delivery_settles_once,
    every_session_has_settled,
    every_attempt_has_ended,
    requests_are_paired,
    recorded_replies_are_not_asked_again,
    streamed_text_is_the_message,
    everything_is_counted_once,
    *consent.CHECKS,
)

#: The log of a session that hands work on has more: what its descendants ask, and results that are read at any time.
#: tests/children looks at that.
OF_SINGLE_SESSIONS: tuple[Check, ...] = (
    turns_do_not_overlap,
    each_action_has_one_result,
    each_delivery_is_answered_once,
    each_delivery_settles_once,
    consent.each_request_is_asked_and_closed_once,
)
