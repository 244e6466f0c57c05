"""What must hold of everything that people are asked: nothing acts without consent, or after it was stopped."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from .evidence import Evidence, Json

# The ledger, the store and its callers are processes of their own, on one clock.
_CLOCKS = 0.05


def nothing_acts_unapproved(evidence: Evidence) -> Iterator[str]:
    """A call that was asked about acts after it was approved, and with what was approved."""
    asked = {
        (session_id, row["request"]["callId"]): row
        for session_id, rows in evidence.inputs.items()
        for row in rows
        if row["kind"] == "approval"
    }
    for effect in evidence.effects:
        row = asked.get((effect["body"]["session"], effect["body"]["call"]))
        if row is None:
            continue
        name = f"{row['session_id']} {row['request_id']}"
        if not approved(row):
            yield f"{name}: acted, and it is {row['status']} with {row['answer']}"
        elif effect["at"] < seconds(row["closed_at"]) - _CLOCKS:
            yield f"{name}: acted before it was approved"
        elif effect["body"]["note"] != arguments(row)["note"]:
            yield f"{name}: acted on {effect['body']['note']!r}, and {arguments(row)['note']!r} was approved"


def each_request_is_asked_and_closed_once(evidence: Evidence) -> Iterator[str]:
    """Readers were shown the requests that the store holds, by the same ids, and one end of each that has one."""
    for session in evidence.sessions:
        session_id = session["session_id"]
        events = evidence.events.get(session_id, ())
        shown = {
            request["requestId"]
            for event in events
            if event["type"] == "input.requested"
            for request in event["data"]["requests"]
        }
        rows = {row["request_id"]: row["status"] for row in evidence.inputs.get(session_id, ())}
        if shown != rows.keys():
            yield f"{session_id}: shown {sorted(shown)}, kept {sorted(rows)}"
        shown_ends = Counter((each["data"]["requestId"], each["data"]["status"]) for each in events if _resolves(each))
        closed = Counter((request_id, status) for request_id, status in rows.items() if status != "open")
        if shown_ends != closed:
            yield f"{session_id}: closed {dict(closed)}, shown {dict(shown_ends)}"
        if session["status"] in ("completed", "failed") and "open" in rows.values():
            yield f"{session_id} has ended, and still asks"


def nothing_acts_after_it_was_stopped(evidence: Evidence) -> Iterator[str]:
    """Nothing that a turn was to do, or one that waited before it, happens after `turn.cancelled`.

    A worker that was frozen or cut off when its turn was stopped may still act: its call is reported as unknown.
    """
    for session_id, events in evidence.events.items():
        stopped = {event["turn"]: seconds(event["at"]) for event in events if event["type"] == "turn.cancelled"}
        unknown = {event["data"]["result"]["callId"] for event in events if _is_unknown(event)}
        for effect in (each for each in evidence.effects if each["body"]["session"] == session_id):
            for turn, at in stopped.items():
                late = effect["body"]["turn"] <= turn and effect["at"] > at + _CLOCKS
                excused = effect["body"]["call"] in unknown and evidence.may_be_late(effect["at"])
                if late and not excused:
                    yield f"{session_id} {effect['body']['call']}: acted {effect['at'] - at:.3f} s after turn.cancelled"


CHECKS = (nothing_acts_unapproved, each_request_is_asked_and_closed_once, nothing_acts_after_it_was_stopped)


def approved(row: Json) -> bool:
    """Whether an approver agreed, or silence was declared to mean that."""
    return row["status"] in ("answered", "expired") and _answer(row).get("optionId") == "approve"


def arguments(row: Json) -> Json:
    """What was approved: the model's arguments, or those that the approver put in their place."""
    return _answer(row).get("arguments") or row["request"]["input"]


def seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def _answer(row: Json) -> Json:
    return row["answer"] or {}


def _is_unknown(event: Json) -> bool:
    return event["type"] == "action.result" and event["data"].get("error", {}).get("code") == "TOOL_OUTCOME_UNKNOWN"


def _resolves(event: Json) -> bool:
    return event["type"] == "input.resolved"
