"""How a step begins: what it hears, and what readers are told before the model is asked."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryBody
from perdure.protocol.events import NewEvent, delivery_refused
from perdure.protocol.requests import Coordinates
from perdure.store.base import Store
from perdure.store.values import DeliveryRow, NewRecord, SessionChange

from .facts import Facts
from .files import Files
from .journal import DELIVERY, HeardDelivery, written
from .turn_journal import TurnJournal


@dataclass(frozen=True)
class Opening:
    """What the first commit of a step writes. Writing it twice is writing it once."""

    records: tuple[NewRecord, ...]
    events: tuple[NewEvent, ...]
    #: Deliveries that this turn takes now.
    consume: tuple[str, ...]
    change: SessionChange


async def hear(
    store: Store, at: Coordinates, delivery_ids: Sequence[str], turn: TurnJournal, files: Files | None = None
) -> tuple[tuple[HeardDelivery, ...], TurnJournal]:
    """What this turn hears: what it has heard already, or else what is still there to be heard.

    With `files`, what it names by URL is fetched before it is kept.
    """
    if heard := turn.heard():
        return heard, turn
    rows = await store.deliveries(at.session_id, list(dict.fromkeys(delivery_ids)))
    if any(row.turn == at.turn for row in rows):
        # An older attempt has begun since the records were read; what it heard stands there now.
        turn = TurnJournal(await store.records(at.session_id, from_turn=at.turn, to_turn=at.turn))
        return turn.heard(), turn
    await _report_lost(store, at.session_id, set(delivery_ids) - {row.delivery_id for row in rows})
    left = [row for row in rows if row.body is not None and row.refused is None and row.turn is None]
    heard = tuple(_heard(row) for row in left)
    if files:
        # All at the same time: each delivery may take its time, and the activity that waits here has little more.
        heard = tuple(await asyncio.gather(*(files.fetched(each) for each in heard)))
    return heard, turn


async def _report_lost(store: Store, session_id: str, delivery_ids: set[str]) -> None:
    """What was accepted is never deleted: a delivery that is not there was lost with an older copy of the store."""
    for each in sorted(delivery_ids):
        message = "The store holds this delivery no longer; it may have been restored from a copy."
        await store.refuse(session_id, each, "delivery_lost", delivery_refused(each, "delivery_lost", message))


def _heard(row: DeliveryRow) -> HeardDelivery:
    return HeardDelivery(**DeliveryBody.model_validate(row.body).model_dump(), delivery_id=row.delivery_id)


def open_step(
    at: Coordinates, attempt: int | None, heard: Sequence[HeardDelivery], turn: TurnJournal, agent: str, model: str
) -> Opening:
    facts = Facts(at, attempt)
    if at.step > 0:
        change = SessionChange(status="running", turns=at.turn + 1)
        return Opening((), (*previous_step(at, attempt, turn), facts.step_started()), (), change)
    begun = begin_turn(at, attempt, heard, turn, agent, model)
    return replace(begun, events=(*begun.events, facts.step_started()))


def begin_turn(
    at: Coordinates, attempt: int | None, heard: Sequence[HeardDelivery], turn: TurnJournal, agent: str, model: str
) -> Opening:
    """What a turn begins with, whether it then asks the model or looks at answers first."""
    fresh = not turn.heard()
    return Opening(
        records=_records(at, heard) if fresh else (),
        events=preamble(Facts(at, attempt), heard, agent, model),
        consume=tuple(each.delivery_id for each in heard) if fresh else (),
        change=SessionChange(status="running", turns=at.turn + 1),
    )


def preamble(facts: Facts, heard: Sequence[HeardDelivery], agent: str, model: str) -> tuple[NewEvent, ...]:
    """What every turn begins with; the keys see to it that a session starts once."""
    received = [facts.message_received(index, each) for index, each in enumerate(heard) if each.message is not None]
    ids = tuple(each.delivery_id for each in heard)
    return (facts.session_started(agent, model), facts.turn_started(ids), *received)


def _records(at: Coordinates, heard: Sequence[HeardDelivery]) -> tuple[NewRecord, ...]:
    return tuple(written(at.turn, 0, names.delivery_slot(index), DELIVERY, each) for index, each in enumerate(heard))


def previous_step(at: Coordinates, attempt: int | None, turn: TurnJournal) -> tuple[NewEvent, ...]:
    """The step before is complete now that its calls are."""
    before = turn.reply(at.step - 1)
    if before is None:
        return ()
    facts = Facts(at.model_copy(update={"step": at.step - 1}), attempt)
    return (facts.step_completed("tool-calls", before.usage),)
