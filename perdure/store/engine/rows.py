"""Rows and the values that they hold, the lock of a session's row, its event log, and cursors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic_core import from_json

from perdure.errors import SessionGone
from perdure.protocol import names
from perdure.protocol.deliveries import MAIN, Bounds, Capabilities, Principal
from perdure.protocol.events import EVENT_EXPIRED, Event, NewEvent, Usage, read_data, stored_data
from perdure.protocol.inputs import InputAnswer, InputRequest
from perdure.protocol.wire import JsonObject
from perdure.session.inputs import ANSWER, REQUEST
from perdure.session.state import Chain
from perdure.store.base import RawRecord
from perdure.store.deliveries import DeliveryRow, NewDelivery
from perdure.store.inputs import InputRow
from perdure.store.lifecycle import DeadLetter
from perdure.store.values import Below, NewRecord, NewSession, Record, SessionRow, SessionStatus, Slot

from .database import Row, Transaction, Value


def session(row: Row) -> SessionRow:
    return SessionRow(
        session_id=row["session_id"],
        agent=row["agent"],
        mode=row["mode"],
        status=_status(row),
        principal=Principal.model_validate(decode(row["principal"])),
        capabilities=Capabilities.model_validate(decode(row["capabilities"])),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        turns=row["turns"],
        steps=row["steps"],
        tool_calls=row["tool_calls"],
        usage=usage(row),
        below=Below(
            usage=Usage(
                input_tokens=row["below_input_tokens"],
                output_tokens=row["below_output_tokens"],
                cache_read_tokens=row["below_cache_read_tokens"],
                cache_write_tokens=row["below_cache_write_tokens"],
            ),
            cost=row["below_cost"],
            tokens_before=row["below_tokens_before"],
            cost_before=row["below_cost_before"],
        ),
        events=row["next_index"],
        error=decode_some(row["error"]),
        parent=decode_some(row["parent"]),
        title=row["title"],
        cancel_turn=row["cancel_turn"],
        cancel_until=_cancel_until(row),
        attention=decode_some(row["attention"]),
        unsignalled=row["untold"],
        bounds=None if row["bounds"] is None else Bounds.model_validate(decode(row["bounds"])),
        forked_from=row["forked_from"],
        forked_turns=row["forked_turns"],
        fork_place=decode_some(row["fork_place"]),
        left_out=[(first, until) for first, until in decode_some(row["left_out"]) or ()],
        records_expired=bool(row["expired_records"]),
        run=row["run"],
        lane=row["lane"],
        lane_of=row["parent_id"] if row["lane"] not in (None, MAIN) else None,
        steered=bool(row["steered"]),
        tags=decode_some(row["tags"]) or {},
        notes=decode_some(row["notes"]) or (),
    )


def cancel_meant(turn: int, until: str | None) -> str | None:
    return None if until is None else encode({"turn": turn, "until": until})


def _cancel_until(row: Row) -> str | None:
    meant = decode_some(row["cancel_meant"])
    # An older build may have noted a request for another turn since.
    return meant["until"] if meant is not None and meant["turn"] == row["cancel_turn"] else None


def _status(row: Row) -> SessionStatus:
    """The session's status. Old builds let a late attempt overwrite the status of a closed session."""
    if row["closed_at"] is None or row["status"] in ("completed", "failed"):
        return row["status"]
    return "completed" if row["error"] is None else "failed"


def new_session(session: NewSession, now: str) -> dict[str, Value]:
    return {
        "session_id": session.session_id,
        "agent": session.agent,
        "mode": session.mode,
        "owner": session.principal.owner,
        "principal": encode(session.principal.model_dump()),
        "capabilities": encode(session.capabilities.model_dump()),
        "parent": encode_some(session.parent),
        "parent_id": session.parent_id or session.lane_of,
        "lane": session.lane,
        "root_id": session.root_id,
        "title": printable(session.title),
        "tags": tags_text(session.tags),
        "bounds": bounds_text(session.bounds),
        "run": None if session.run is None else session.run.name,
        "now": now,
    }


def tags_text(tags: Mapping[str, str]) -> str | None:
    """The tags in one form, so that a query finds one of them in the text."""
    return encode(dict(sorted(tags.items()))) if tags else None


def tag_text(tag: tuple[str, str] | None) -> str | None:
    """How one tag is written in `tags_text`. Quotes in texts are escaped, so it is found nowhere else."""
    return None if tag is None else encode(dict([tag]))[1:-1]


def bounds_text(bounds: Bounds | None) -> str | None:
    return None if bounds is None else encode(bounds.model_dump(mode="json"))


def read_model(session: SessionRow) -> dict[str, Value]:
    """The columns of a session's row that commits change."""
    return {
        "session_id": session.session_id,
        "status": session.status,
        "turns": session.turns,
        "steps": session.steps,
        "tool_calls": session.tool_calls,
        **tokens(session.usage),
        "next_index": session.events,
        "error": encode_some(session.error),
        "cancel_turn": session.cancel_turn,
        "attention": encode_some(session.attention),
        "now": session.updated_at,
    }


def usage(row: Row) -> Usage:
    return Usage(
        input_tokens=row["input_tokens"],
        output_tokens=row["output_tokens"],
        cache_read_tokens=row["cache_read_tokens"],
        cache_write_tokens=row["cache_write_tokens"],
    )


def tokens(usage: Usage) -> dict[str, Value]:
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read_tokens": usage.cache_read_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
    }


def delivery(row: Row) -> DeliveryRow:
    return DeliveryRow(
        session_id=row["session_id"],
        delivery_id=row["delivery_id"],
        body=None if row["body"] is None else _versioned(row["body"]),
        turn=row["turn"],
        refused=row["refused"],
        accepted_at=row["accepted_at"],
        kind=row["kind"],
        ref=decode_some(row["ref"]),
        started_at=row["started_at"],
        settled_at=row["settled_at"],
        outcome=row["outcome"],
        error=decode_some(row["error"]),
        edits=row["edits"],
        lane=row["lane"],
        mode=row["mode"],
        moved_to=row["position"],
        answered_by=row["answered_by_turn"],
    )


def new_delivery(delivery: NewDelivery, now: str) -> dict[str, Value]:
    return {
        "session_id": delivery.session_id,
        "delivery_id": delivery.delivery_id,
        "kind": delivery.body.get("kind", "message"),
        "owner": delivery.owner,
        "idempotency_key": delivery.idempotency_key,
        "digest": delivery.digest,
        "body": encode(delivery.body),
        "ref": encode_some(delivery.ref),
        "lane": delivery.lane,
        "mode": delivery.mode,
        "now": now,
    }


def raw_record(row: Row) -> RawRecord:
    return RawRecord(
        row["turn"], row["step"], row["slot"], row["format"], row["body"], attempt=row["attempt"], at=row["at"]
    )


def record(row: Row) -> Record:
    return decoded(raw_record(row))


def decoded(raw: RawRecord) -> Record:
    body, format = _versioned(raw.text), raw.format
    return Record(
        turn=raw.turn,
        step=raw.step,
        key=raw.key,
        format=f"{format.rpartition('/')[0]}/{_DAMAGED}" if body is _NO_JSON else format,
        body=body,
        attempt=raw.attempt,
        at=raw.at,
        size=len(raw.text),
    )


def new_record(session_id: str, record: NewRecord, attempt: int | None, now: str) -> dict[str, Value]:
    return {
        "session_id": session_id,
        "turn": record.turn,
        "step": record.step,
        "slot": record.key,
        "format": record.format,
        "body": encode(record.body),
        "attempt": attempt,
        "now": now,
    }


def new_dead_letter(session: SessionRow, event: NewEvent, now: str) -> dict[str, Value]:
    data = event.data or {}
    return {
        "dead_letter_id": names.turn_workflow(session.session_id, event.turn or 0),
        "session_id": session.session_id,
        "turn": event.turn or 0,
        "owner": session.principal.owner,
        "agent": session.agent,
        "code": printable(data.get("code", "")),
        "message": printable(data.get("message", "")),
        "now": now,
    }


def dead_letter(row: Row) -> DeadLetter:
    return DeadLetter(
        session_id=row["session_id"],
        turn=row["turn"],
        agent=row["agent"],
        code=row["code"],
        message=row["message"],
        failed_at=row["failed_at"],
        requeued_at=row["requeued_at"],
    )


def event(row: Row) -> Event:
    return Event(
        type=row["type"],
        key=row["key"],
        data=read_data(row["type"], decode_some(row["data"])),
        turn=row["turn"],
        step=row["step"],
        attempt=row["attempt"],
        delivery_ids=decode_some(row["delivery_ids"]) or (),
        index=row["idx"],
        at=row["at"],
    )


def with_expired(events: Sequence[Event], start: int, limit: int) -> list[Event]:
    """The events from `start` on, with an `event.expired` for each that retention has deleted."""
    filled: list[Event] = []
    for event in events:
        missing = range(start + len(filled), event.index)
        filled += [
            Event(type=EVENT_EXPIRED, key=f"expired/{index}", index=index, at=event.at)
            for index in missing[: limit - len(filled)]
        ]
        if len(filled) >= limit:
            break
        filled.append(event)
    return filled


def new_event(session_id: str, event: NewEvent, index: int, now: str) -> dict[str, Value]:
    return {
        "session_id": session_id,
        "idx": index,
        "key": event.key,
        "type": event.type,
        "turn": event.turn,
        "step": event.step,
        "attempt": event.attempt,
        "data": encode_some(stored_data(event.type, event.data)),
        # Few events name deliveries; NULL takes less space than an empty list.
        "delivery_ids": encode_some(event.delivery_ids or None),
        "now": now,
    }


def slot(row: Row) -> Slot:
    return Slot(name=row["name"], value=_versioned(row["value"]), version=row["version"])


def input_row(row: Row) -> InputRow:
    answer = decode_some(row["answer"])
    return InputRow(
        request=InputRequest.model_validate(_lifted(REQUEST, decode(row["request"]))),
        status=row["status"],
        opened_at=row["opened_at"],
        requester=Principal.model_validate(decode(row["requester"])),
        votes=tuple(InputAnswer.model_validate(_lifted(ANSWER, vote)) for vote in decode(row["votes"])),
        answer=None if answer is None else InputAnswer.model_validate(_lifted(ANSWER, answer)),
        closed_at=row["closed_at"],
        delivery_id=row["delivery_id"],
    )


def _lifted(chain: Chain, stored: JsonObject) -> JsonObject:
    """The value in today's version. One of a newer build is read as far as it goes, so that people see the request."""
    version = stored.get("version", 1)
    if isinstance(version, int) and version > chain.version:
        return stored
    return {**chain.lift(version, stored), "version": chain.version}


def new_input(request: InputRequest, session: SessionRow, now: str) -> dict[str, Value]:
    return {
        "request_id": request.request_id,
        "session_id": request.session_id,
        "root_id": session.root_id,
        "agent": request.agent,
        "kind": request.kind,
        "requester": encode(session.principal.model_dump()),
        "request": encode(request.model_dump()),
        "now": now,
    }


def input_state(row: InputRow) -> dict[str, Value]:
    """The columns of a request's row that answers change."""
    return {
        "request_id": row.request.request_id,
        "status": row.status,
        "votes": encode([vote.model_dump() for vote in row.votes]),
        "answer": answer_text(row.answer),
        "delivery_id": row.delivery_id,
        "closed_at": row.closed_at,
    }


def answer_text(answer: InputAnswer | None) -> str | None:
    return None if answer is None else encode(answer.model_dump())


#: The last second that a date can show. Builds before the limit of deadlines have stored later ones.
_LAST_SECOND = 253_402_300_799.0
_COMPACT = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_ESCAPED = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True)


def encode(value: Any) -> str:
    text = _COMPACT.encode(value)
    return text if _is_utf8(text) else _ESCAPED.encode(value)


def decode(text: str) -> Any:
    try:
        # Twice as fast. A worker decodes all records of a session when it serves it for the first time.
        return from_json(text)
    except ValueError:
        # Not so strict: it reads halves of characters, and deeper values.
        return json.loads(text)


#: A version that no code reads, and a value of it: what stands for text that is damaged. Who asks for the value gets
#: `UnreadableState`, and the others in the same query are not affected.
_DAMAGED = "damaged"
_NO_JSON: JsonObject = {"version": _DAMAGED}


def _versioned(text: str) -> JsonObject:
    try:
        return decode(text)
    except ValueError:
        return _NO_JSON


def encode_some(value: Any) -> str | None:
    return None if value is None else encode(value)


def decode_some(text: str | None) -> Any:
    return None if text is None else decode(text)


def printable(text: str | None) -> str | None:
    """The text with the characters replaced that a database cannot store."""
    if text is None:
        return None
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def utc_now() -> str:
    return stamp(datetime.now(UTC))


def before(now: str, seconds: float) -> str:
    """The time `seconds` before `now`."""
    return stamp(datetime.fromisoformat(now) - timedelta(seconds=seconds))


def stamp_after(now: str, seconds: float) -> str:
    """The time `seconds` after `now`."""
    return before(now, -seconds)


def after(moment: str) -> str:
    """The next distinct time stamp."""
    return stamp(datetime.fromisoformat(moment) + timedelta(milliseconds=1))


def stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def stamp_of(seconds: float) -> str:
    """The time stamp of so many seconds since 1970; of more than a date can show, the last one."""
    return stamp(datetime.fromtimestamp(min(seconds, _LAST_SECOND), UTC))


async def append(tx: Transaction, session_id: str, head: int, events: Sequence[NewEvent], now: str) -> int:
    """Append the events whose keys are new, from index `head` on. The session's row must be locked."""
    if not events:
        return head
    known = {row["key"] for row in await tx.rows("known_keys", session_id=session_id, keys=[e.key for e in events])}
    for event in events:
        if event.key in known:
            continue
        await tx.run("insert_event", **new_event(session_id, event, head, now))
        known.add(event.key)
        head += 1
    return head


async def emit(tx: Transaction, session: SessionRow, events: Sequence[NewEvent], now: str) -> int | None:
    """Append the events and update the session's row. The new head, or None when no event was new."""
    head = await append(tx, session.session_id, session.events, events, now)
    if head == session.events:
        return None
    await tx.run("advance_session", session_id=session.session_id, next_index=head, now=now)
    return head


@dataclass(frozen=True)
class LockedSession:
    """A session whose row this transaction has locked."""

    row: SessionRow
    closed_at: str | None

    @property
    def ended(self) -> bool:
        return self.closed_at is not None or self.row.ended


async def find(tx: Transaction, session_id: str) -> LockedSession | None:
    found = await tx.row("lock_session", session_id=session_id)
    return None if found is None else LockedSession(session(found), found["closed_at"])


async def lock(tx: Transaction, session_id: str) -> LockedSession:
    session = await find(tx, session_id)
    if session is None:
        raise SessionGone(session_id=session_id)
    return session
