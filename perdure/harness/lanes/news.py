"""What a lane of a session is told about the others: what was said there since its last turn.

It is recorded with the message that begins the turn, so that every attempt and every later prompt has the same.
"""

from collections.abc import Mapping, Sequence

from perdure.bounds import shortened
from perdure.harness.journal import DELIVERY, ConsumedDelivery, read
from perdure.protocol import names
from perdure.protocol.deliveries import MAIN
from perdure.protocol.events import Event, EventType
from perdure.store.base import Store
from perdure.store.lifecycle import leaves_out
from perdure.store.values import EventQuery, Lane, SessionRow

#: Of what was said in one lane: how many messages are told, and how many characters of each.
_MOST = 20
_LONGEST = 600
#: How many turns back the last one that was told something is looked for.
_LOOKED_AT = 50

_SAID = {EventType.MESSAGE_RECEIVED: "user", EventType.MESSAGE_COMPLETED: "you"}


def with_notes(row: SessionRow, deliveries: tuple[ConsumedDelivery, ...]) -> tuple[ConsumedDelivery, ...]:
    """The deliveries with which a turn begins; the first one carries the notes that wait in the session."""
    if not (row.notes and deliveries):
        return deliveries
    return (deliveries[0].model_copy(update={"notes": tuple(row.notes)}), *deliveries[1:])


async def with_news(
    store: Store, row: SessionRow, turn: int, deliveries: Sequence[ConsumedDelivery]
) -> tuple[ConsumedDelivery, ...]:
    """The deliveries of a turn that begins; the first message tells what the other lanes have said."""
    place = next((place for place, each in enumerate(deliveries) if each.message is not None), None)
    if row.lane is None or place is None:
        return tuple(deliveries)
    others = await _others(store, row)
    heard = await _heard(store, row, turn, others)
    # A lane that has ended and begun again is one to those who are told of it.
    named = {name: [lane for lane in others if lane.name == name] for name in (lane.name for lane in others)}
    news = [told for name in named if (told := await _told(store, row, name, named[name], heard)) is not None]
    first = deliveries[place]
    now = {lane.session_id: lane.events for lane in others}
    told = first.model_copy(update={"client_context": (*news, *first.client_context), "heard": now})
    return (*deliveries[:place], told, *deliveries[place + 1 :])


async def _others(store: Store, row: SessionRow) -> Sequence[Lane]:
    main_id = row.lane_of or row.session_id
    found = [each for each in await store.lanes(main_id) if each.session_id != row.session_id]
    main = None if row.lane_of is None else await store.session(main_id)
    return found if main is None else [Lane(main_id, MAIN, main.ended, main.events), *found]


async def _heard(store: Store, row: SessionRow, turn: int, others: Sequence[Lane]) -> Mapping[str, int]:
    """How many events of each other lane were told about, when that was done last in what the model still sees."""
    # Of the session that a lane shares turns with, the place in its log says what was told.
    shares = any(lane.session_id != row.forked_from for lane in others)
    first = 0 if shares else row.forked_turns
    owner = row
    for number in range(turn - 1, max(first - 1, turn - 1 - _LOOKED_AT), -1):
        while number < owner.forked_turns:
            parent = None if owner.forked_from is None else await store.session(owner.forked_from)
            if parent is None:
                return {}
            owner = parent
        if leaves_out(row.left_out, number):
            continue
        if (heard := await _heard_in(store, owner.session_id, number)) is not None:
            return heard
    return {}


async def _heard_in(store: Store, session_id: str, turn: int) -> Mapping[str, int] | None:
    for index in range(_MOST):
        record = await store.record(session_id, turn, 0, names.delivery_key(index))
        if record is None or not DELIVERY.includes(record):
            return None
        if (heard := read(record, DELIVERY, ConsumedDelivery).heard) is not None:
            return heard
    return None


async def _told(
    store: Store, row: SessionRow, name: str, lanes: Sequence[Lane], heard: Mapping[str, int]
) -> str | None:
    """What was said in the lanes of this name, newest first until it is enough, and told in its order."""
    found: list[Event] = []
    for lane in reversed(lanes):
        known = heard.get(lane.session_id)
        since = await _begun_at(store, row, lane) if known is None else known
        left = _MOST + 1 - len(found)
        if left > 0 and since < lane.events:
            query = EventQuery(after=since - 1, before=lane.events, types=tuple(_SAID), back=True, limit=left)
            found += await store.find_events(lane.session_id, query)
    if not found:
        return None
    lines = [_line(each) for each in found[:_MOST][::-1]]
    if len(found) > _MOST:
        lines.insert(0, "(What was said before is left out.)")
    return "\n".join((f"Meanwhile, in the lane {name} of this session:", *lines))


async def _begun_at(store: Store, row: SessionRow, lane: Lane) -> int:
    """Where to begin with a lane that nothing was told of: what this one shares with it is in its history."""
    if row.forked_from != lane.session_id:
        return 0
    for end in ("completed", "cancelled", "failed"):
        index = await store.index_of(lane.session_id, names.turn_key(row.forked_turns - 1, end))
        if index is not None:
            return index + 1
    return 0


def _line(event: Event) -> str:
    """What was said, in one line and those that are indented under it: text forges no line of somebody else."""
    data: Mapping[str, object] = event.data or {}
    text = shortened(str(data.get("message", "")), _LONGEST)
    return f"{_SAID[event.type]}: " + "\n  ".join(text.splitlines())
