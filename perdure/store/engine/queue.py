"""What waits in a session: its order, what the mode of a new message does to it; and what is set for it and its lanes.

All of this happens under the session's lock, together with the acceptance of the message or its change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from perdure.errors import Conflict, InboxFull, Invalid, SessionGone
from perdure.protocol.events import OVERFLOWED, SUPERSEDED, NewEvent, cancel_requested, delivery_refused, inbox_overflow
from perdure.protocol.wire import JsonObject
from perdure.session.queue import between, summary_of, with_summary_of
from perdure.store.deliveries import Change, DeliveryRow, NewDelivery
from perdure.store.values import MOST_TAGS, LaneSettings, SessionRow

from . import rows
from .database import Transaction, Written
from .rows import LockedSession, decode_some, encode, encode_some

#: The modes of messages that wait for a turn of their own. None: an older build has accepted it.
_SUMMARIZED = (None, "followup", "collect")

#: Keys grow as deliveries are moved again and again. Drivers take no longer text in a reference (session/state.py).
_LONGEST_KEY = 255


async def lane_settings(tx: Transaction, session_id: str) -> LaneSettings | None:
    found = await tx.row("lane_settings", session_id=session_id)
    return None if found is None else LaneSettings(found["agent"], decode_some(found["lane_settings"]) or {})


async def set_lane(tx: Transaction, session_id: str, lane: str, changes: JsonObject) -> LaneSettings:
    # The lock comes first: of two requests for different fields both count.
    session = await rows.lock(tx, session_id)
    known = await lane_settings(tx, session_id)
    if session.ended or known is None:
        raise SessionGone("The session has ended.", session_id=session_id)
    set_now = {**known.lanes.get(lane, {}), **changes}
    lanes = {**known.lanes, lane: {name: value for name, value in set_now.items() if value is not None}}
    lanes = {name: fields for name, fields in lanes.items() if fields}
    await tx.run("set_lane_settings", session_id=session_id, settings=encode(lanes) if lanes else None)
    return LaneSettings(known.agent, lanes)


async def set_tags(tx: Transaction, session_id: str, changes: Mapping[str, str | None]) -> SessionRow:
    # As above: of two requests for different tags both count.
    row = (await rows.lock(tx, session_id)).row
    tags = {name: text for name, text in {**row.tags, **changes}.items() if text is not None}
    if len(tags) > MOST_TAGS:
        raise Invalid(f"A session has at most {MOST_TAGS} tags.")
    await tx.run("set_tags", session_id=session_id, tags=rows.tags_text(tags))
    return replace(row, tags=tags)


async def edit(tx: Transaction, read: DeliveryRow, change: Change, now: str) -> Written[DeliveryRow | None]:
    """Change a delivery that waits; None when it waits no more, or was changed since it was read."""
    # Under the lock, so that no turn reads it meanwhile.
    session = await rows.lock(tx, read.session_id)
    place = {"session_id": read.session_id, "delivery_id": read.delivery_id}
    edited = {
        "body": encode(change.body or read.body),
        "ref": encode_some(read.ref),
        "mode": change.mode or read.mode,
        "position": read.moved_to if change.position is None else await _key_of(tx, read, change.position),
    }
    if change.mode == "interrupt" and read.ref is not None:
        # It takes the place of all that wait now, also of those that were accepted after it.
        edited["ref"] = encode({**read.ref, "supersedes": await _newest(tx, read.session_id)})
    found = await tx.row("edit_delivery", **place, **edited, edits=read.edits)
    if found is None:
        return Written(None)
    row = rows.delivery(found)
    events = await admit(tx, session, row, now) if change.mode is not None else ()
    return Written(row, await rows.emit(tx, session.row, events, now))


async def _newest(tx: Transaction, session_id: str) -> str | None:
    """When the newest waiting delivery was accepted."""
    found = await tx.row("waiting", session_id=session_id)
    return None if found is None else found["newest"]


async def _key_of(tx: Transaction, moved: DeliveryRow, position: int) -> str | None:
    """The key with which the delivery has this position among those that wait in its lane."""
    waiting = [rows.delivery(row) for row in await tx.rows("queue", session_id=moved.session_id, lane=moved.lane)]
    keys = [each.place[0] for each in waiting if each.delivery_id != moved.delivery_id]
    if not keys:
        # It has that place, and those that come later come after it.
        return moved.moved_to
    before = keys[: position - 1]
    key = between(before[-1] if before else "", keys[len(before)] if len(before) < len(keys) else None)
    if len(key) > _LONGEST_KEY:
        raise Conflict("What waits here was moved too often; withdraw the message, and send it again.")
    return key


async def admit(tx: Transaction, session: LockedSession, message: DeliveryRow, now: str) -> Sequence[NewEvent]:
    """Do what the mode of a message asks of the session, when it is accepted or its mode changes; its events."""
    if session.ended or message.kind != "message":
        return ()
    match message.mode:
        case "steer":
            await tx.run("set_steered", session_id=message.session_id, steered=1)
            return ()
        case "interrupt":
            return await interrupt(tx, session.row, message, now)
        case _:
            return ()


async def drop(
    tx: Transaction, session: SessionRow, new: NewDelivery, accepted: DeliveryRow, now: str
) -> Sequence[NewEvent]:
    """Refuse messages until no more wait than may: the oldest ones, or the one that was accepted now; its events.

    What answers or controls a session is not dropped.
    """
    code, reason = OVERFLOWED, "Too many deliveries waited; this one was dropped."
    found = await tx.rows("queue", session_id=new.session_id, lane=new.lane)
    excess = max(1, len(found) - (new.limit or 0))
    match new.overflow:
        case "drop_newest" | "reject":
            dropped = [accepted.delivery_id]
        case "drop_oldest":
            dropped = [row["delivery_id"] for row in found if row["kind"] == "message"][:excess]
        case "summarize":
            dropped = await _summarize(tx, new.session_id, list(map(rows.delivery, found)), excess)
            code, reason = SUPERSEDED, "Too many deliveries waited; a later message tells how this one began."
    if found[0]["delivery_id"] in dropped and await _running(tx, session) is None:
        # A cancel request for the next turn meant this one, and not what comes after it.
        await tx.run("set_cancel", session_id=new.session_id, turn=None, meant=None)
    for each in dropped:
        await tx.run("refuse_delivery", session_id=new.session_id, delivery_id=each, code=code, now=now)
    refused = [delivery_refused(each, code, reason) for each in dropped]
    return [*refused, inbox_overflow(accepted.delivery_id, dropped, new.overflow)]


async def _summarize(tx: Transaction, session_id: str, waiting: Sequence[DeliveryRow], excess: int) -> Sequence[str]:
    """Have a message that waits for its own turn tell of so many that wait before it; the ids of these.

    `InboxFull` if there are no two such messages: what steers, interrupts, answers or controls is told with nothing.
    """
    told = [each for each in waiting if each.kind == "message" and each.mode in _SUMMARIZED][: excess + 1]
    if len(told) < 2:
        raise InboxFull(session_id=session_id)
    *earlier, last = told
    # One after the other: each may have files of many megabytes, and a cap that was lowered leaves many of them.
    summaries = [summary_of(await _body(tx, each)) for each in earlier]
    body = await _body(tx, last)
    place = {"session_id": session_id, "delivery_id": last.delivery_id}
    # As a change of the message: who has read it before would write over what it tells.
    await tx.row(
        "edit_delivery",
        **place,
        body=encode(with_summary_of(body, summaries)),
        ref=encode_some(last.ref),
        mode=last.mode,
        position=last.moved_to,
        edits=last.edits,
    )
    return [each.delivery_id for each in earlier]


async def _body(tx: Transaction, waiting: DeliveryRow) -> JsonObject:
    found = await tx.row("deliveries", session_id=waiting.session_id, delivery_ids=[waiting.delivery_id])
    assert found is not None
    return rows.delivery(found).body or {}


async def is_steered(tx: Transaction, session: SessionRow) -> bool:
    """Whether a message waits that is to enter the running turn."""
    if not session.steered:
        return False
    if await tx.row("steers", session_id=session.session_id) is not None:
        return True
    # It was read, or taken back: from now on there is nothing to look for.
    await tx.run("set_steered", session_id=session.session_id, steered=0)
    return False


async def interrupt(tx: Transaction, session: SessionRow, message: DeliveryRow, now: str) -> Sequence[NewEvent]:
    """Settle the other messages that wait, and request that the running turn stops; the events that tell it.

    A task has one turn and no other: there the message waits, as one without this mode does.
    """
    if session.mode == "task":
        return ()
    found = await tx.rows(
        "supersede",
        session_id=session.session_id,
        lane=message.lane,
        code=SUPERSEDED,
        but=message.delivery_id,
        now=now,
    )
    ids = [row["delivery_id"] for row in sorted(found, key=lambda row: (row["accepted_at"], row["delivery_id"]))]
    events = [delivery_refused(each, SUPERSEDED, "A later message has taken the place of this one.") for each in ids]
    turn = await _running(tx, session)
    if turn is None and found and await _waits_alone(tx, session.session_id):
        # A cancel request for the next turn meant what is settled now, and not the message that came after it.
        await tx.run("set_cancel", session_id=session.session_id, turn=None, meant=None)
    if turn is None or session.cancel_turn == turn:
        return events
    await tx.run("set_cancel", session_id=session.session_id, turn=turn, meant=None)
    return [*events, cancel_requested(turn)]


async def _waits_alone(tx: Transaction, session_id: str) -> bool:
    found = await tx.row("waiting", session_id=session_id)
    return found is not None and found["waiting"] == 1


async def _running(tx: Transaction, session: SessionRow) -> int | None:
    """The turn that runs, or waits for people; None for one that has not begun, as the message may begin it.

    The session counts the turns that have begun: the last of them is the one that is meant.
    """
    match session.status:
        case "running":
            return max(0, session.turns - 1)
        case "waiting" if await tx.row("has_open_input", session_id=session.session_id) is not None:
            return max(0, session.turns - 1)
        case _:
            return None
