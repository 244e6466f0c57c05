"""Evidence of a run in which everything held, written by hand: two sessions that saw most of what a session can see."""

from datetime import UTC, datetime
from typing import Any

from tests.support.chaos import invariants
from tests.support.chaos.evidence import Asked, Cancel, Deletion, Evidence, Fork, Json, Post, Try

TALK, TASK, FORK, GONE = "ses_talk", "ses_task", "ses_fork", "ses_gone"

_BEGAN = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def at(second: float) -> float:
    """A moment of the run."""
    return _BEGAN + second


def stamp(second: float) -> str:
    return datetime.fromtimestamp(at(second), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Log:
    """The events of one session, and what a reader is given of them."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.rows: list[Json] = []

    def add_event(
        self, second: float, type: str, turn: int | None = None, step: int | None = None, **more: Any
    ) -> None:
        ids = more.pop("ids", None)
        row = {"session_id": self.session_id, "idx": len(self.rows), "type": type, "turn": turn, "step": step}
        self.rows.append({**row, "data": more or None, "delivery_ids": ids, "at": stamp(second)})

    def begin(self, second: float, turn: int, delivery: str, message: str | None) -> None:
        self.add_event(second, "turn.started", turn, ids=[delivery])
        if message is not None:
            self.add_event(second, "message.received", turn, ids=[delivery], message=message)

    def say(self, second: float, turn: int, step: int, words: str) -> None:
        place = {"turnId": f"turn_{turn}", "stepIndex": step}
        self.add_event(second, "step.started", turn, step)
        self.add_event(second, "message.appended", turn, step, **place, messageDelta=words)
        self.add_event(second, "message.completed", turn, step, **place, message=words)
        self.add_event(second, "step.completed", turn, step)

    def end(self, second: float, turn: int, how: str = "completed", *settled: str) -> None:
        self.add_event(second, f"turn.{how}", turn, ids=list(settled))
        self.add_event(second, "session.waiting", turn)

    def stream(self) -> list[Json]:
        """As a reader gets it: the text so far in each delta."""
        given: list[Json] = []
        for row in self.rows:
            data = dict(row["data"] or {})
            if row["type"] == "message.appended":
                data["messageSoFar"] = data["messageDelta"]
            given.append({"type": row["type"], "data": data, "meta": {"id": f"{self.session_id}:{row['idx']}"}})
        return given


def _result(tool: str, call: str, status: str = "completed") -> Json:
    return {"result": {"callId": call, "toolName": tool}, "status": status}


def _record(turn: int, step: int, slot: str, second: float, **body: Any) -> Json:
    form = "pydantic-ai/2" if slot == "reply" else "perdure/1"
    if slot == "reply":
        body["usage"] = {"inputTokens": 10}
    return {"turn": turn, "step": step, "slot": slot, "format": form, "body": body, "at": stamp(second)}


def _consumed(turn: int, delivery: str, message: str | None, second: float) -> Json:
    return _record(turn, 0, "delivery/0", second, deliveryId=delivery, message=message)


def _delivery(session: str, delivery: str, key: str | None, turn: int | None, second: float) -> Json:
    row = {"session_id": session, "delivery_id": delivery, "idempotency_key": key, "turn": turn}
    left = ("session_not_active", "refused") if turn is None else (None, "completed")
    return {**row, "refused": left[0], "outcome": left[1], "accepted_at": stamp(second)}


def _effect(tool: str, call: str, turn: int, second: float) -> Json:
    body = {"tool": tool, "note": f"note of {call}", "session": TALK, "turn": turn, "call": call}
    return {"key": f"key of {call}", "body": body, "at": at(second)}


def _post(kind: Any, session: str, key: str, delivery: str, second: float, message: str = "", **more: Any) -> Post:
    done = Try(at(second), at(second + 0.1), 200, session_id=session, delivery_id=delivery, **more)
    words = message.rpartition("say ")[2] if message else ""
    return Post(kind, key, "" if kind == "create" else session, message, words, [done])


def evidence() -> Evidence:
    """Each call makes it anew, so that it can be spoiled.

    The conversation calls a tool; is asked about a payment, which is approved; and is stopped in the middle of a text.
    The task answers once; a message that came too late is refused. The conversation was forked after its first turn;
    the history of the fork was dropped. Another session was deleted.
    """
    talk, task, fork = _talk(), _task(), _fork()
    sessions = [
        _session(TALK, "waiting", talk, 4),
        _session(TASK, "completed", task, 1),
        _session(FORK, "waiting", fork, 0),
    ]
    return Evidence(
        sessions=sessions,
        attempts={session["session_id"]: _attempts(session) for session in sessions},
        events={TALK: talk.rows, TASK: task.rows, FORK: fork.rows},
        records=_records(),
        deliveries=_deliveries(),
        inputs={TALK: [_approval()]},
        effects=[_effect("charge", "c0", 0, 3.5), _effect("pay", "c1", 1, 17.5), _effect("put", "c3", 3, 23.5)],
        asked=_asked(),
        streams={TALK: talk.stream(), TASK: task.stream(), FORK: fork.stream()},
        followed=[(TALK, talk.stream()[:7]), (TASK, task.stream())],
        receipts=[(TALK, "d0"), (TALK, "d1"), (TALK, "d2"), (TALK, "d3"), (TASK, "e0"), (TASK, "e1")],
        posts=_posts(),
        forks=[Fork(TALK, {"turn": 0}, "k8", tries=[Try(at(6.9), at(7), 201, session_id=FORK)])],
        deletions=[Deletion(GONE, [Try(at(8), at(8.5), 202, session_id=GONE)])],
        tombstones={GONE: {"requested_at": stamp(8), "finished_at": None}},
        with_other_rows=[TALK],
        cancels=[
            Cancel(TALK, Try(at(23.1), at(23.3), 200, session_id=TALK), "accepted"),
            Cancel(TALK, Try(at(40), at(40.1), 200, session_id=TALK), "no_active_turn"),
        ],
    )


def _talk() -> _Log:
    log = _Log(TALK)
    log.add_event(1, "session.started", 0)
    log.begin(1, 0, "d0", "call charge then say zero")
    log.add_event(1, "step.started", 0, 0)
    log.add_event(2, "actions.requested", 0, 0, actions=[{"callId": "c0"}])
    log.add_event(4, "action.result", 0, 0, **_result("charge", "c0"))
    log.add_event(4, "step.completed", 0, 0)
    log.say(5, 0, 1, "zero")
    log.end(6, 0, "completed", "d0")
    log.begin(11, 1, "d1", "call pay then say one")
    log.add_event(11, "step.started", 1, 0)
    log.add_event(12, "step.completed", 1, 0)
    request = {"requestId": "r1", "action": {"callId": "c1"}}
    log.add_event(12, "input.requested", 1, 0, requests=[request], details={"r1": {"kind": "approval"}})
    log.end(12, 1)
    log.add_event(15, "input.resolved", 1, 0, requestId="r1", status="answered")
    log.begin(16, 2, "d2", None)
    log.add_event(18, "action.result", 2, 0, **_result("pay", "c1"))
    log.say(19, 2, 0, "one")
    log.end(19, 2, "completed", "d1", "d2")
    log.begin(21, 3, "d3", "call put then say three")
    log.add_event(21, "step.started", 3, 0)
    log.add_event(22, "actions.requested", 3, 0, actions=[{"callId": "c3"}])
    log.add_event(23.2, "cancel.requested", 3, turnId="turn_3")
    log.add_event(24, "action.result", 3, 0, **_result("put", "c3"))
    log.end(25, 3, "cancelled", "d3")
    return log


def _task() -> _Log:
    log = _Log(TASK)
    log.add_event(1, "session.started", 0)
    log.begin(1, 0, "e0", "say task")
    log.say(2, 0, 0, "task")
    log.add_event(2, "turn.completed", 0, ids=["e0"])
    log.add_event(2, "delivery.refused", deliveryId="e1", code="session_not_active")
    log.add_event(2, "session.completed", 0)
    return log


def _fork() -> _Log:
    log = _Log(FORK)
    log.add_event(7, "session.forked", parent={"sessionId": TALK, "turn": 0})
    log.add_event(8.1, "context.cleared", 1, ids=["f1"])
    log.add_event(8.1, "session.waiting", 1, ids=["f1"])
    return log


def _records() -> dict[str, list[Json]]:
    return {
        TALK: [
            _consumed(0, "d0", "call charge then say zero", 1),
            _record(0, 0, "reply", 2),
            _record(0, 0, "intent/c0", 3),
            _record(0, 0, "call/c0", 4),
            _record(0, 1, "reply", 5),
            _consumed(1, "d1", "call pay then say one", 11),
            _record(1, 0, "reply", 12),
            _consumed(2, "d2", None, 16),
            _record(2, 0, "resume", 16, notes=[]),
            _record(1, 0, "intent/c1", 17),
            _record(1, 0, "call/c1", 18),
            _record(2, 0, "reply", 19),
            _consumed(3, "d3", "call put then say three", 21),
            _record(3, 0, "reply", 22),
            _record(3, 0, "intent/c3", 23),
            _record(3, 0, "call/c3", 24),
        ],
        TASK: [_consumed(0, "e0", "say task", 1), _record(0, 0, "reply", 2)],
    }


def _deliveries() -> dict[str, list[Json]]:
    return {
        TALK: [
            _delivery(TALK, "d0", "k0", 0, 0.5),
            _delivery(TALK, "d1", "k1", 1, 10.5),
            _delivery(TALK, "d2", "k2", 2, 15),
            _delivery(TALK, "d3", "k3", 3, 20.5),
        ],
        TASK: [_delivery(TASK, "e0", "k4", 0, 0.5), _delivery(TASK, "e1", "k5", None, 1.5)],
        FORK: [
            {**_delivery(FORK, "f0", "k8", 0, 7), "kind": "fork"},
            {**_delivery(FORK, "f1", "k9", 1, 8), "kind": "clear"},
        ],
    }


def _approval() -> Json:
    return {
        "session_id": TALK,
        "request_id": "r1",
        "kind": "approval",
        "status": "answered",
        "request": {"callId": "c1", "input": {"note": "note of c1"}},
        "answer": {"optionId": "approve"},
        "opened_at": stamp(12),
        "closed_at": stamp(15),
    }


def _asked() -> list[Asked]:
    return [
        Asked("call charge then say zero", 0, "", at(1.5)),
        Asked("call charge then say zero", 1, "done", at(4.5)),
        Asked("call pay then say one", 0, "", at(11.5)),
    ]


def _posts() -> list[Post]:
    return [
        _post("create", TALK, "k0", "d0", 0.4, "call charge then say zero"),
        _post("message", TALK, "k1", "d1", 10.4, "call pay then say one"),
        _post("answer", TALK, "k2", "d2", 14.9, outcomes=(("r1", "answered", "approve"),)),
        _post("message", TALK, "k3", "d3", 20.4, "call put then say three"),
        _post("create", TASK, "k4", "e0", 0.4, "say task"),
        _post("message", TASK, "k5", "e1", 1.4, "say late"),
        Post("message", "k6", TASK, "say later", "later", [Try(at(5), at(5.1), 409, code="session_not_active")]),
        Post("clear", "k9", FORK, tries=[Try(at(7.9), at(8), 202, session_id=FORK)]),
        Post("compact", "k10", TASK, tries=[Try(at(9), at(9.1), 200)]),
        Post("message", "k11", GONE, "say gone", "gone", [Try(at(9), at(9.1), 410, code="session_deleted")]),
        Post("create", "k7", "", "say never", "never", [Try(at(6), at(6.1), 503, code="unavailable")]),
    ]


def _session(session_id: str, status: str, log: _Log, replies: int) -> Json:
    steps = replies + (session_id == TALK)
    counts = {"steps": steps, **dict.fromkeys(invariants.TOKENS, 0), "input_tokens": 10 * steps}
    title = "call charge then say zero" if session_id == TALK else "say task"
    mode = "conversation" if session_id == TALK else "task"
    row = {"session_id": session_id, "mode": mode, "status": status, "next_index": len(log.rows), "title": title}
    return {**row, **counts, "attention": None, "updated_at": log.rows[-1]["at"]}


def _attempts(session: Json) -> list[Json]:
    """One attempt at each step."""
    attempt = {"number": 1, "scope": "model", "status": "succeeded", "ended_at": stamp(1)}
    used = {**dict.fromkeys(invariants.TOKENS, 0), "input_tokens": 10}
    return [{**attempt, "turn": number, **used} for number in range(session["steps"])]
