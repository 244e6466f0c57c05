"""What a lane of a session is told about the others: what was said there since its last turn.

It is recorded with the message that begins the turn, so that every attempt and every later prompt has the same.
"""

from collections.abc import Mapping, Sequence

from perdure.bounds import shortened
from perdure.harness.journal import DELIVERY, ConsumedDelivery, read
from perdure.protocol import names
from perdure.protocol.events import Event, EventType
from perdure.store.base import Store
from perdure.store.values import MAIN, EventQuery, Lane, SessionRow

#: Of what was said, in one lane: how many messages are told, and how many characters of each.
_MOST = 20
_LONGEST = 600
#: How many turns back the last one that was told something is looked for.
_LOOKED_AT = 50

_SAID = {EventType.MESSAGE_RECEIVED: "user", EventType.MESSAGE_COMPLETED: "you"}


async def with_news(
    store: Store, row: SessionRow, turn: int, deliveries: Sequence[ConsumedDelivery]
) -> tuple[ConsumedDelivery, ...]:
    """The deliveries of a turn that begins; the first message tells what the other lanes have said."""
    place = next((place for place, each in enumerate(deliveries) if each.message is not None), None)
    if row.lane is None or place is None:
        return tuple(deliveries)
    heard = await _heard(store, row, turn)
    news: list[str] = []
    for lane in await _others(store, row):
        known = heard.get(lane.session_id)
        since = await _begun_at(store, row, lane) if known is None else known
        heard[lane.session_id] = lane.events
        if told := await _told(store, lane, since):
            news.append(told)
    first = deliveries[place]
    told = first.model_copy(update={"client_context": (*news, *first.client_context), "heard": heard})
    return (*deliveries[:place], told, *deliveries[place + 1 :])


async def _others(store: Store, row: SessionRow) -> Sequence[Lane]:
    main_id = row.lane_of or row.session_id
    found = [each for each in await store.lanes(main_id) if each.session_id != row.session_id]
    main = None if row.lane_of is None else await store.session(main_id)
    return found if main is None else [Lane(main_id, MAIN, main.ended, main.events), *found]


async def _heard(store: Store, row: SessionRow, turn: int) -> dict[str, int]:
    """How many events of each other lane were told about, when that was done last."""
    for number in range(turn - 1, max(row.forked_turns - 1, turn - 1 - _LOOKED_AT), -1):
        for index in range(_MOST):
            record = await store.record(row.session_id, number, 0, names.delivery_key(index))
            if record is None or not DELIVERY.includes(record):
                break
            if (heard := read(record, DELIVERY, ConsumedDelivery).heard) is not None:
                return dict(heard)
    return {}


async def _begun_at(store: Store, row: SessionRow, lane: Lane) -> int:
    """Where to begin with a lane that nothing was told of: what this one shares with it is in its history."""
    if row.forked_from != lane.session_id:
        return 0
    index = await store.index_of(lane.session_id, names.turn_key(row.forked_turns - 1, "completed"))
    return 0 if index is None else index + 1


async def _told(store: Store, lane: Lane, since: int) -> str | None:
    query = EventQuery(after=since - 1, before=lane.events, types=tuple(_SAID), back=True, limit=_MOST + 1)
    found = list(await store.find_events(lane.session_id, query))[::-1]
    if not found:
        return None
    lines = [_line(each) for each in found[-_MOST:]]
    if len(found) > _MOST:
        lines.insert(0, "(What was said before is left out.)")
    return "\n".join((f"Meanwhile, in the lane {lane.name} of this session:", *lines))


def _line(event: Event) -> str:
    data: Mapping[str, object] = event.data or {}
    return f"{_SAID[event.type]}: {shortened(str(data.get('message', '')), _LONGEST)}"
