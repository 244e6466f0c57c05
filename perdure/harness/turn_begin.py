"""How a turn and each of its steps begin: what is heard, files that are fetched, and the first events."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace

import httpx2
from pydantic_ai._ssrf import safe_download

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryBody, FilePart, TextPart
from perdure.protocol.events import NewEvent, delivery_refused
from perdure.protocol.requests import Coordinates
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.values import DeliveryRow, NewRecord, SessionChange

from .events import EventFactory
from .journal import DELIVERY, HeardDelivery, TurnJournal, written
from .prompt import bare_type, is_linked, largest_of

#: Seconds for all files of one delivery.
_PATIENCE = 20.0
_REDIRECTS = 3


class Files:
    """Fetches what a delivery names. What cannot be had is replaced by the reason, once and for all."""

    def __init__(self, settings: Settings) -> None:
        self._local = settings.fetch_local_files
        # Of all that one delivery names, as if it had brought it along.
        self._most = settings.max_file_bytes

    async def fetched(self, heard: HeardDelivery) -> HeardDelivery:
        message = heard.message
        if message is None or isinstance(message, str) or not any(is_linked(part) for part in message):
            return heard
        until = asyncio.get_running_loop().time() + _PATIENCE
        left = self._most
        parts: list[TextPart | FilePart] = []
        for part in message:
            largest = largest_of(part.media_type) if isinstance(part, FilePart) and is_linked(part) else None
            if isinstance(part, FilePart) and largest is not None:
                part, size = await self._fetched(part, min(left, largest), until)
                left -= size
            parts.append(part)
        return heard.model_copy(update={"message": tuple(parts)})

    async def _fetched(self, part: FilePart, most: int, until: float) -> tuple[FilePart, int]:
        try:
            async with asyncio.timeout_at(until):
                answer = await safe_download(
                    part.data,
                    allow_local=self._local,
                    max_redirects=_REDIRECTS,
                    timeout=int(_PATIENCE),
                    max_bytes=most,
                )
        except httpx2.HTTPStatusError as error:
            return _missing(part, f"the server answered {error.response.status_code}")
        except TimeoutError:
            return _missing(part, "it took too long")
        except httpx2.HTTPError:
            return _missing(part, "the server could not be reached, or sent too much")
        except Exception:
            # An address that is none, or none that may be asked.
            return _missing(part, "its address is not allowed, or it is too large")
        kind = bare_type(answer.headers.get("content-type", ""))
        if kind.partition("/")[0] != bare_type(part.media_type).partition("/")[0] or largest_of(kind) is None:
            return _missing(part, "the server sent something else")
        data = base64.b64encode(answer.content).decode()
        return part.model_copy(update={"data": data, "media_type": kind}), len(answer.content)


def _missing(part: FilePart, why: str) -> tuple[FilePart, int]:
    return part.model_copy(update={"missing": why}), 0


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
    facts = EventFactory(at, attempt)
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
        events=preamble(EventFactory(at, attempt), heard, agent, model),
        consume=tuple(each.delivery_id for each in heard) if fresh else (),
        change=SessionChange(status="running", turns=at.turn + 1),
    )


def preamble(facts: EventFactory, heard: Sequence[HeardDelivery], agent: str, model: str) -> tuple[NewEvent, ...]:
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
    facts = EventFactory(at.model_copy(update={"step": at.step - 1}), attempt)
    return (facts.step_completed("tool-calls", before.usage),)
