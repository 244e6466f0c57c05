"""Deliveries (accepted once, then read by a turn or refused), votes, cancel requests and the attention of sessions.

An accepted delivery is deleted with its session only. Votes on input requests are counted under the session's lock; the
first verdict closes a request.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from perdure.errors import (
    Conflict,
    IdempotencyConflict,
    InboxFull,
    NoActiveSession,
    NotFound,
    SessionDeleted,
    SessionGone,
    TokenConflict,
    Unavailable,
)
from perdure.protocol import names
from perdure.protocol.deliveries import (
    CHILD_ANSWER,
    CHILD_INPUT,
    CHILD_RESULT,
    MAIN,
    RESET,
    DeliveryBody,
    DeliveryRef,
    Lineage,
)
from perdure.protocol.events import EventType, NewEvent, delivery_refused
from perdure.protocol.inputs import InputAnswer
from perdure.protocol.requests import Attention
from perdure.session.inputs import is_newer, verdict
from perdure.store.deliveries import Accepted, NewDelivery
from perdure.store.inputs import Answered, Answering, InputQuery, InputRow, Vote, Waits
from perdure.store.values import Lane, NewSession, SessionRow

from . import queue, rows, runs
from .database import Row, Transaction, Value, Written
from .history.slots import BEFORE_STEPS, write_slot
from .rows import LockedSession, after, encode


async def create_session(
    tx: Transaction, session: NewSession, delivery: NewDelivery | None, now: str
) -> Accepted | None:
    # The delivery comes first: of two concurrent requests with one key, the later one waits here before any write.
    accepted = None if delivery is None else await insert(tx, delivery, now)
    if accepted is not None and not accepted.fresh:
        return accepted
    if session.parent_id is not None:
        await _check_child(tx, session.session_id, session.parent_id)
    if session.lane_of is not None:
        await join_lanes(tx, session.lane_of)
    if await tx.row("insert_session", **rows.new_session(session, now)) is None:
        raise Conflict("A session with this id exists already.", session_id=session.session_id)
    if await tx.row("insert_route", token_hash=session.token_hash, session_id=session.session_id) is None:
        raise TokenConflict
    if session.named:
        await name_session(tx, session.token_hash, session.session_id)
    if session.run is not None:
        await runs.create_run(tx, session, session.run, now)
    if session.request is not None:
        slot: dict[str, Value] = {"name": names.REQUEST_SLOT, "value": encode({"value": session.request}), "version": 1}
        await write_slot(tx, session.session_id, 0, BEFORE_STEPS, slot)
    if session.callback is not None:
        await tx.run("insert_callback", session_id=session.session_id, callback=encode(session.callback))
    return accepted


async def name_session(tx: Transaction, token_hash: str, session_id: str) -> None:
    await tx.run("insert_instance", token_hash=token_hash, session_id=session_id)
    await tx.run("purge_instances", token_hash=token_hash)


async def _check_child(tx: Transaction, session_id: str, parent_id: str) -> None:
    """Raise if the child was deleted, or if what ends or deletes its parent would not find it any more."""
    if await tx.row("deletion", session_id=session_id) is not None:
        raise SessionDeleted("This session was deleted.", session_id=session_id)
    await _lock_open(tx, parent_id)


async def _lock_open(tx: Transaction, session_id: str) -> None:
    """Lock a session that gets a child or a lane; `SessionGone` if it has ended, or is being deleted."""
    session = await rows.lock(tx, session_id)
    if session.ended or await tx.row("deletion", session_id=session_id) is not None:
        raise SessionGone("The session has ended.", session_id=session_id)


async def accept(tx: Transaction, delivery: NewDelivery, now: str) -> Written[Accepted]:
    session = await rows.find(tx, delivery.session_id)
    # Under the lock, so the later of two requests with one key finds the first one. A repeated request gets its
    # receipt even when the session has ended meanwhile or its inbox is full.
    if (first := await find_first(tx, delivery)) is not None:
        return Written(first)
    # One that interrupts takes the place of the others that wait, so it has room. In a task it waits with them.
    is_task = session is not None and session.row.mode == "task"
    limited = delivery.mode != "interrupt" or is_task
    # The message of a task is never dropped for another one.
    full = limited and not is_task and delivery.overflow != "reject" and await _is_full(tx, delivery)
    accepted = await enqueue(tx, session, delivery, now, limited=limited and not full)
    if session is None or not accepted.fresh:
        return Written(accepted)
    dropped = await queue.drop(tx, session.row, delivery, accepted.delivery, now) if full else ()
    events = (*dropped, *await queue.admit(tx, session, accepted.delivery, now))
    return Written(accepted, await rows.emit(tx, session.row, events, now) if events else None)


async def enqueue(
    tx: Transaction, session: LockedSession | None, delivery: NewDelivery, now: str, *, limited: bool = True
) -> Accepted:
    """Append the delivery to the session's inbox; with `limited`, `InboxFull` when `delivery.limit` is reached."""
    if session is None or session.ended:
        raise SessionGone("The session has ended.", session_id=delivery.session_id)
    waiting = await _waiting(tx, delivery.session_id)
    if limited and delivery.limit is not None and waiting.count >= delivery.limit:
        raise InboxFull(session_id=delivery.session_id)
    # Many deliveries arrive in one millisecond, and clocks of processes differ. The order is that of the lock.
    if waiting.newest is not None and waiting.newest >= now:
        now = after(waiting.newest)
    accepted = await insert(tx, delivery, now)
    return replace(accepted, unsignalled=session.row.unsignalled > 0) if accepted.fresh else accepted


async def refuse(
    tx: Transaction, session_id: str, delivery_id: str, code: str, event: NewEvent, now: str
) -> Written[bool]:
    session = await rows.lock(tx, session_id)
    found = await tx.row("delivery", session_id=session_id, delivery_id=delivery_id)
    if found is not None and (found["turn"] is not None or found["refused"] is not None):
        return Written(found["turn"] is None)
    if found is not None:
        await tx.run("refuse_delivery", session_id=session_id, delivery_id=delivery_id, code=code, now=now)
    if session.row.status != "running" and not await _is_still_meant(tx, session.row):
        # A cancel request for the next turn meant this delivery: without it there is no turn to stop.
        await tx.run("set_cancel", session_id=session_id, turn=None, meant=None)
    # No event may follow the one that ends the session.
    return Written(True, None if session.ended else await rows.emit(tx, session.row, (event,), now))


async def _is_still_meant(tx: Transaction, session: SessionRow) -> bool:
    """Whether anything is left that a cancel request for a turn that has not begun may have meant."""
    if await tx.row("has_open_input", session_id=session.session_id) is not None:
        return True
    oldest, until = (await _waiting(tx, session.session_id)).oldest, session.cancel_until
    # An older build does not note until when what it meant was accepted.
    return oldest is not None and (until is None or oldest <= until)


async def refuse_unread(tx: Transaction, session_id: str, now: str) -> Sequence[NewEvent]:
    """At the end of a session: refuse the deliveries that no turn has read, and return the events of the refusals."""
    code, message = NoActiveSession.wire_code, "The session ended before this delivery was read."
    refused = await tx.rows("refuse_unread", session_id=session_id, code=code, now=now)
    return [delivery_refused(row["delivery_id"], code, message) for row in refused]


async def report_end(tx: Transaction, session: SessionRow, now: str) -> None:
    """Deliver to the session's parent that it has ended. A parent that has ended before waits for nothing."""
    if session.parent is None:
        return
    lineage = Lineage.model_validate(session.parent)
    # A child is locked before its parent, everywhere.
    parent = await rows.find(tx, lineage.session_id)
    if parent is None or parent.ended:
        return
    action = names.action_of_child(lineage.name, lineage.call_id)
    report_id = names.delivery_of_child(session.session_id)
    ref = DeliveryRef(id=report_id, kind=CHILD_RESULT, token_hash="", action=action)
    await _report(tx, session, parent, ref, DeliveryBody(kind=CHILD_RESULT, child_session_id=session.session_id), now)


async def report_ended(tx: Transaction, session_id: str, now: str) -> None:
    """The same for a session that has ended before. Its parent gets it once."""
    session = await rows.find(tx, session_id)
    if session is not None and session.ended:
        await report_end(tx, session.row, now)


async def report_inputs(
    tx: Transaction, session: SessionRow, request_ids: Sequence[str], what: Literal["opened", "closed"], now: str
) -> None:
    """Deliver to the root of the session's family that these requests were opened, or closed."""
    if session.parent is None or not request_ids:
        return
    root = await rows.find(tx, Lineage.model_validate(session.parent).root_session_id)
    if root is None or root.ended:
        return
    kind = CHILD_INPUT if what == "opened" else CHILD_ANSWER
    for each in request_ids:
        ref = DeliveryRef(id=names.delivery_of_input(each, what), kind=kind, token_hash="", request_id=each)
        body = DeliveryBody(kind=kind, child_session_id=session.session_id, answers=(each,))
        await _report(tx, session, root, ref, body, now)


async def _report(
    tx: Transaction, session: SessionRow, to: LockedSession, ref: DeliveryRef, body: DeliveryBody, now: str
) -> None:
    report = NewDelivery(
        session_id=to.row.session_id,
        delivery_id=ref.id,
        body=body.model_dump(mode="json", exclude_none=True),
        owner=session.principal.owner,
        ref=ref.model_dump(mode="json"),
    )
    await enqueue(tx, to, report, now, limited=False)


async def expects_turn(tx: Transaction, session_id: str) -> bool:
    """Whether another turn will run: an input request is open or a delivery waits."""
    if await tx.row("has_open_input", session_id=session_id) is not None:
        return True
    return await has_unread(tx, session_id)


async def has_unread(tx: Transaction, session_id: str) -> bool:
    """Whether a delivery waits to be read by a turn."""
    return (await _waiting(tx, session_id)).count > 0


async def begin_waiting(tx: Transaction, session_id: str) -> None:
    """A session that was begun without a delivery, or whose first one was withdrawn, is not about to begin a turn."""
    session = await rows.find(tx, session_id)
    if session is not None and not session.ended and not await has_unread(tx, session_id):
        # A cancel request meant the turn that does not begin.
        await tx.run("begin_waiting", session_id=session_id)


@dataclass(frozen=True)
class _Waiting:
    """The unread deliveries: how many there are, and when the newest and the oldest one were accepted."""

    count: int
    newest: str | None
    oldest: str | None


async def _is_full(tx: Transaction, delivery: NewDelivery) -> bool:
    return delivery.limit is not None and (await _waiting(tx, delivery.session_id)).count >= delivery.limit


async def _waiting(tx: Transaction, session_id: str) -> _Waiting:
    found = await tx.row("waiting", session_id=session_id)
    return _Waiting(0, None, None) if found is None else _Waiting(found["waiting"], found["newest"], found["oldest"])


async def insert(tx: Transaction, delivery: NewDelivery, now: str) -> Accepted:
    """Write the delivery, or return the earlier one under its key."""
    written = await tx.row("insert_delivery", **rows.new_delivery(delivery, now))
    # After the insert, which waits for a deletion of the first delivery under this key.
    await refuse_deleted_key(tx, delivery)
    if written is not None:
        return Accepted(rows.delivery(written), fresh=True)
    first = await find_first(tx, delivery)
    if first is None:
        raise Conflict("The first delivery under this key cannot be found.")
    return first


async def refuse_deleted_key(tx: Transaction, delivery: NewDelivery) -> None:
    """`SessionDeleted` when the key belongs to a session that was deleted: a retry must not start it again."""
    if (key := delivery.idempotency_key) is None:
        return
    if found := await tx.row("deleted_key", key_hash=key_hash(delivery.owner, key)):
        names_of = ("session_id", "delivery_id", "accepted_at", "digest")
        raise SessionDeleted(**{name: found[name] for name in names_of})


def key_hash(owner: str, key: str) -> str:
    content = json.dumps([owner, key]).encode()
    return hashlib.sha256(b"perdure/key/" + content).hexdigest()


async def find_first(tx: Transaction, delivery: NewDelivery) -> Accepted | None:
    """The delivery that was accepted earlier under this key or this id."""
    found = await _first(tx, delivery)
    if found is None:
        return None
    if found["digest"] != delivery.digest:
        raise IdempotencyConflict(meta={"submissionId": found["delivery_id"]})
    # The first delivery may belong to another session: a key is unique for its owner.
    session = await tx.row("session", session_id=found["session_id"])
    return Accepted(rows.delivery(found), fresh=False, unsignalled=session is not None and bool(session["untold"]))


async def _first(tx: Transaction, delivery: NewDelivery) -> Row | None:
    if delivery.idempotency_key is not None:
        found = await tx.row("delivery_by_key", owner=delivery.owner, idempotency_key=delivery.idempotency_key)
        if found is not None:
            return found
    return await tx.row("delivery", session_id=delivery.session_id, delivery_id=delivery.delivery_id)


async def set_attention(
    tx: Transaction, session_id: str, attention: Attention, turn: int | None, now: str
) -> Written[bool]:
    """Mark the session as one that cannot continue without help. Repeating the same code changes nothing.

    False also when `turn`, which could not continue, has ended meanwhile.
    """
    session = await rows.find(tx, session_id)
    if session is None or session.ended:
        return Written(False)
    if turn is not None and session.row.turns > turn and session.row.status != "running":
        return Written(False)
    known = session.row.attention
    if known is not None and known["code"] == attention.code:
        return Written(False)
    # The event's index makes its key unique.
    number = session.row.events
    data = {"code": attention.code, "message": attention.message}
    stored = {**data, "since": now, "number": number}
    await tx.run("set_attention", session_id=session_id, attention=encode(stored))
    event = NewEvent(type=EventType.SESSION_ATTENTION, key=names.session_key(f"attention/{number}"), data=data)
    return Written(True, await rows.emit(tx, session.row, (event,), now))


# --- lanes --------------------------------------------------------------------------------------------------
# A lane is locked after the session that it belongs to, and never the other way round.

#: More than any agent declares. Of those that have ended, the newest are known.
_MOST_LANES = 100


async def join_lanes(tx: Transaction, session_id: str) -> None:
    """Before a lane of the session is written: `SessionGone` if the session has ended, or is being deleted."""
    await _lock_open(tx, session_id)
    await tx.run("begin_lanes", session_id=session_id)


async def lanes(tx: Transaction, session_id: str) -> list[Lane]:
    """The lanes of the session but the main one, also the newest of those that have ended, oldest first."""
    found = await tx.rows("lanes", session_id=session_id, limit=_MOST_LANES)
    found = sorted(found, key=lambda row: (row["created_at"], row["session_id"]))
    return [Lane(row["session_id"], row["lane"], row["closed_at"] is not None, row["next_index"]) for row in found]


async def end_lanes(tx: Transaction, main: SessionRow, now: str) -> None:
    """With the session, its lanes end, each after what it has accepted before."""
    if main.lane != MAIN:
        return
    for lane in await lanes(tx, main.session_id):
        session = None if lane.ended else await rows.find(tx, lane.session_id)
        if session is None or session.ended:
            continue
        ref = DeliveryRef(id=names.delivery_of_lane(lane.session_id), kind=RESET, token_hash="")
        reset = NewDelivery(
            session_id=lane.session_id,
            delivery_id=ref.id,
            body=DeliveryBody(kind=RESET, principal=main.principal).model_dump(mode="json", exclude_none=True),
            owner=main.principal.owner,
            ref=ref.model_dump(mode="json"),
        )
        await enqueue(tx, session, reset, now, limited=False)


# --- votes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Count:
    """The requests before and after the votes."""

    before: dict[str, InputRow]
    after: dict[str, InputRow]

    @property
    def changed(self) -> Sequence[InputRow]:
        return [row for request_id, row in self.after.items() if row != self.before[request_id]]

    @property
    def closed(self) -> Sequence[InputRow]:
        return [row for row in self.changed if row.status == "answered"]

    def is_late(self, votes: Sequence[Vote]) -> bool:
        """Whether a vote differs from the answer with which its request was closed before."""
        return any(_is_late(self.before[vote.request_id], vote.answer) for vote in votes)


async def answer(
    tx: Transaction, answering: Answering, to_event: Callable[[InputRow], NewEvent], now: str
) -> Written[Answered]:
    session = await rows.find(tx, answering.session_id)
    # Under the lock, so the later of two requests with one key finds the first one.
    if (first := await find_first(tx, answering.delivery)) is not None:
        return Written(await _repeated(tx, answering, first))
    before = await _requests(tx, answering)
    if any(row.status == "open" and is_newer(row.request, *row.votes) for row in before.values()):
        # Its rules for votes may be others.
        raise Unavailable("A newer version has made this request; try again.")
    after = dict(before)
    for vote in answering.votes:
        after[vote.request_id] = _voted(after[vote.request_id], vote, answering.delivery.delivery_id, now)
    count = _Count(before, after)
    delivered = None
    if count.closed or answering.always or (answering.late and count.is_late(answering.votes)):
        # An answer that closes a request ignores the limit: only it lets the session continue and empty its inbox.
        delivered = await enqueue(tx, session, answering.delivery, now, limited=not count.closed)
        # A concurrent request in another session has used the same key.
        if not delivered.fresh:
            return Written(await _repeated(tx, answering, delivered))
    for row in count.changed:
        await tx.run("update_input", **rows.input_state(row))
    if session is not None:
        await report_inputs(tx, session.row, [row.request.request_id for row in count.closed], "closed", now)
    head = None if session is None else await rows.emit(tx, session.row, [to_event(row) for row in count.closed], now)
    # Also without a new delivery: the caller then signals the first answer again, and earlier deliveries precede it.
    unsignalled = session is not None and session.row.unsignalled > 0
    return Written(replace(_answered(answering, count.after, delivered), unsignalled=unsignalled), head)


async def _repeated(tx: Transaction, answering: Answering, first: Accepted) -> Answered:
    """The result of the first request under this key."""
    return _answered(answering, await _requests(tx, answering), first)


def _answered(answering: Answering, by_id: dict[str, InputRow], accepted: Accepted | None) -> Answered:
    found = [by_id[vote.request_id] for vote in answering.votes]
    delivery = accepted.delivery if accepted else None
    return Answered(
        rows=found,
        closed=frozenset(
            row.request.request_id for row in found if delivery is not None and row.delivery_id == delivery.delivery_id
        ),
        delivery=delivery,
        fresh=accepted is None or accepted.fresh,
        unsignalled=accepted is not None and accepted.unsignalled,
    )


async def _requests(tx: Transaction, answering: Answering) -> dict[str, InputRow]:
    """The voted requests, each once, in the order of the votes."""
    wanted = list(dict.fromkeys(vote.request_id for vote in answering.votes))
    found = [rows.input_row(row) for row in await tx.rows("inputs_by_id", request_ids=wanted)] if wanted else []
    ours = {row.request.request_id: row for row in found if row.request.session_id == answering.session_id}
    if missing := [each for each in wanted if each not in ours]:
        raise NotFound("This session has no such request.", request_ids=missing)
    return {each: ours[each] for each in wanted}


def _is_late(row: InputRow, answer: InputAnswer) -> bool:
    if row.status == "open":
        return False
    return row.status != "answered" or row.answer is None or not row.answer.same(answer)


def _voted(row: InputRow, vote: Vote, delivery_id: str, now: str) -> InputRow:
    """The request after one more vote. Only the first vote of each principal on an open request counts.

    A vote with `ends` always closes an open request.
    """
    if row.status != "open":
        return row
    if not vote.ends and any(vote.answer.same_principal(earlier) for earlier in row.votes):
        return row
    row = replace(row, votes=(*row.votes, vote.answer))
    decided = vote.answer if vote.ends else verdict(row.request, row.votes)
    if decided is None:
        return row
    return replace(row, status="answered", answer=decided, closed_at=now, delivery_id=delivery_id)


def inputs_query(query: InputQuery) -> tuple[str, dict[str, Value]]:
    """The query with the best index for this filter, and the values that only this query takes."""
    if query.root is not None:
        return "inputs_of_family", {"root": query.root, "status": query.status}
    if query.session_id is not None:
        return "inputs_of_session", {"session_id": query.session_id, "status": query.status}
    if query.status == "open":
        return "inputs_open", {}
    return "inputs", {"status": query.status}


async def waits(tx: Transaction, session_ids: Sequence[str]) -> Mapping[str, Waits]:
    """What these sessions wait for, in two queries: a list of sessions is looked at often."""
    queued = {row["session_id"]: row["queued"] for row in await tx.rows("queued_of", ids=list(session_ids))}
    inputs: dict[str, list[InputRow]] = {}
    for row in await tx.rows("open_inputs_of", ids=list(session_ids)):
        inputs.setdefault(row["listed"], []).append(rows.input_row(row))
    return {each: Waits(inputs.get(each, ()), queued.get(each, 0)) for each in session_ids}
