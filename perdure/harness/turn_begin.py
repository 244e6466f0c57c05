"""The beginning of a turn and of each step.

The history is read and kept, deliveries are consumed, files are fetched, first events are emitted.
"""

import asyncio
import base64
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import httpx2
from pydantic import ValidationError
from pydantic_ai._ssrf import safe_download
from pydantic_ai.messages import BinaryContent, UserPromptPart

from perdure.agents.agent import DEMO, Agent
from perdure.agents.registry import AgentRegistry
from perdure.errors import RestoreRefused, Unavailable, UnreadableState
from perdure.models.base import ModelSource, Prompt, prepare
from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryBody, FilePart, TextPart
from perdure.protocol.events import NewEvent, delivery_refused
from perdure.protocol.requests import Coordinates, ModelCall, ModelOutcome, NothingToRead
from perdure.session.state import KINDS
from perdure.settings import Settings
from perdure.store.base import RawRecord, Store
from perdure.store.deliveries import DeliveryRow
from perdure.store.engine.rows import decoded
from perdure.store.lifecycle import Restoration, leaves_out
from perdure.store.values import Attempt, Consumption, NewRecord, Partial, SessionChange, SessionRow

from .events import EventFactory
from .journal import BODY, DELIVERY, ConsumedDelivery, TurnJournal, model_outcome, read_journal, written
from .prompt import Conversation, Placed, PlainTurn, bare_type, call_ids_of, is_linked, largest_of, plain_turn, size_of
from .tools.builtin import FinalOutput, required_output, tools_expected
from .tools.records import Result

if TYPE_CHECKING:
    from .compaction import Plan

log = logging.getLogger("perdure.model")

#: Seconds to fetch all files of one delivery.
_PATIENCE = 20.0
_REDIRECTS = 3


@dataclass(frozen=True)
class History:
    """The history before the current turn."""

    #: The first turn that is not part of it.
    until: int = 0
    conversation: Conversation = field(default_factory=Conversation)
    call_ids: frozenset[str] = frozenset()
    weight: int = 0
    #: The mark of notes to the model; None in old sessions.
    mark: str | None = None
    #: The turns that it leaves out, as in `SessionRow`.
    left_out: tuple[tuple[int, int], ...] = ()


#: The turns that are read at once: a few milliseconds, in which nothing else runs.
_PAGE = 200
#: The histories that are read ahead at the same time. A worker that has just started finds many sessions waiting.
_LOADING = 4


class HistoryCache:
    """A cache of the histories of recently served sessions, limited in bytes."""

    def __init__(self, store: Store, *, capacity: int = 64 * 1024 * 1024) -> None:
        self._store = store
        self._capacity = capacity
        self._weight = 0
        self._histories: OrderedDict[str, History] = OrderedDict()
        #: The sessions whose histories are being read ahead.
        self._loading: dict[str, asyncio.Task[tuple[SessionRow, History] | None]] = {}

    async def load_for(self, agent: Agent, row: SessionRow, turn: int) -> tuple[SessionRow, History, TurnJournal]:
        """As `load`. If the agent prefers a fresh start, a history that cannot be read is left out from now on."""
        try:
            return row, *await self.load(row, turn)
        except UnreadableState as unreadable:
            if agent.on_unreadable != "fresh":
                raise
            try:
                row = await self._store.restore(Restoration(row.session_id, unreadable.code))
            except RestoreRefused:
                raise unreadable from None
            log.warning("session %s continues without its history: %s", row.session_id, unreadable.message)
            return row, *await self.load(row, turn)

    async def load(self, row: SessionRow, turn: int) -> tuple[History, TurnJournal]:
        """The history before a turn and the turn's own records; reads only the records that are not cached."""
        if (loading := self._loading.get(row.session_id)) is not None:
            await asyncio.wait([loading])
        return await self._load(row, turn)

    async def _load(self, row: SessionRow, turn: int) -> tuple[History, TurnJournal]:
        left_out = tuple(row.left_out)
        history = self._histories.get(row.session_id, History(left_out=left_out))
        if history.until > turn or history.left_out != left_out:
            # An attempt at an older turn: it must not see later turns. Or the session was restored to an earlier one.
            history = History(left_out=left_out)
        known = history.until
        # Later turns change none that is before this: what a turn waits for ends in another one.
        settled = history
        # In pages, so that a long session does not hold up all others of this worker while it is read.
        while history.until + _PAGE < turn:
            until = history.until + _PAGE
            records = await self._store.raw_records(row.session_id, from_turn=history.until, to_turn=until - 1)
            history, settled = _extended(history, records, until, settled)
        records = await self._store.raw_records(row.session_id, from_turn=history.until, to_turn=turn)
        if history.until < turn:
            before = [record for record in records if record.turn < turn]
            history, settled = _extended(history, before, turn, settled)
        if known < settled.until:
            self._keep(row.session_id, settled)
        return history, TurnJournal([decoded(record) for record in records if record.turn == turn])

    def read_ahead(self, session_id: str) -> "asyncio.Task[tuple[SessionRow, History] | None] | None":
        """Begin to cache the history of a session before it is needed; None if that is needless, or too much at once.

        The task returns None when there is nothing to read.
        """
        if session_id in self._histories or session_id in self._loading or len(self._loading) >= _LOADING:
            return None
        # Known from here on: a driver and its turn may begin in the same moment.
        loading = self._loading[session_id] = asyncio.get_running_loop().create_task(self._read_ahead(session_id))
        loading.add_done_callback(lambda _: self._loading.pop(session_id))
        return loading

    async def _read_ahead(self, session_id: str) -> tuple[SessionRow, History] | None:
        row = await self._store.session(session_id)
        # The last turn that has begun may still be running.
        return None if row is None or row.turns < 2 else (row, (await self._load(row, row.turns - 1))[0])

    def _keep(self, session_id: str, history: History) -> None:
        known = self._histories.pop(session_id, None)
        self._weight -= known.weight if known else 0
        if history.weight > self._capacity:
            # It is larger than the whole cache.
            return
        self._histories[session_id] = history
        self._weight += history.weight
        while self._weight > self._capacity:
            self._weight -= self._histories.popitem(last=False)[1].weight


def _extended(history: History, records: Sequence[RawRecord], until: int, settled: History) -> tuple[History, History]:
    """The history with these records of the turns before `until`, and as much of it as no later turn will change.

    `settled` is that of the history before: the whole, or what comes before a turn that may change.
    """
    whole = settled.until == history.until
    mark, weight = history.mark, history.weight
    if left_out := history.left_out:
        # Turns that are left out may be unreadable.
        records = [record for record in records if not leaves_out(left_out, record.turn)]
    call_ids = set(history.call_ids)
    turns: list[tuple[int, TurnJournal | PlainTurn, str | None]] = []
    for number, group in groupby(records, key=attrgetter("turn")):
        raw = list(group)
        turn = plain_turn(raw) or TurnJournal(list(map(decoded, raw)))
        if isinstance(turn, TurnJournal):
            # Turns before the first mark stay as they were sent to the model.
            mark = mark or turn.mark
            call_ids.update(call_ids_of(turn))
        if whole and isinstance(turn, TurnJournal) and not turn.is_settled:
            earlier = [record for record in records if record.turn < number]
            whole, settled = False, _extended(history, earlier, number, history)[0]
        turns.append((number, turn, mark))
    weight += sum(len(record.text) for record in records)
    conversation = history.conversation.extended(turns, history.left_out)
    if conversation.compacted != history.conversation.compacted:
        # What was left out is kept no longer.
        weight = sum(map(_weight, conversation.messages))
    extended = History(until, conversation, frozenset(call_ids), weight, mark, history.left_out)
    return extended, extended if whole else settled


def _weight(placed: Placed) -> int:
    prompts = [part.content for part in placed.message.parts if isinstance(part, UserPromptPart)]
    files = [each for content in prompts for each in content if isinstance(each, BinaryContent)]
    return size_of(placed.message) + sum(len(file.data) for file in files)


class ReadAhead:
    """Reads what a model call will need before it is asked for, and encodes what it will send again."""

    def __init__(self, histories: HistoryCache, agents: AgentRegistry, models: ModelSource, settings: Settings) -> None:
        self._histories = histories
        self._agents = agents
        self._models = models
        self._settings = settings
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, session_id: str) -> None:
        if (reading := self._histories.read_ahead(session_id)) is not None:
            running = asyncio.get_running_loop().create_task(self._run(session_id, reading))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def _run(self, session_id: str, reading: "asyncio.Task[tuple[SessionRow, History] | None]") -> None:
        try:
            found = await reading
            agent = self._agents.get(found[0].agent) if found else None
            if found and agent:
                row, conversation = found[0], found[1].conversation
                tools = tools_expected(agent, can_ask=row.capabilities.request_input)
                prompt = Prompt(conversation.merged, tools, agent.settings, conversation.sent)
                await prepare(self._models, agent.model or self._settings.model or DEMO, prompt)
        except Exception as error:
            # The model call does the same, and reports what fails. An error of a library may quote the conversation.
            log.debug("%s was not read ahead: %s", session_id, type(error).__name__)


class FileFetcher:
    """Fetches the files that a delivery links to. A file that cannot be fetched is recorded with the reason."""

    def __init__(self, settings: Settings) -> None:
        self._local = settings.fetch_local_files
        # The limit for all linked files of one delivery; the same as for attached ones.
        self._most = settings.max_file_bytes

    async def fetched(self, delivery: ConsumedDelivery) -> ConsumedDelivery:
        message = delivery.message
        if message is None or isinstance(message, str) or not any(is_linked(part) for part in message):
            return delivery
        until = asyncio.get_running_loop().time() + _PATIENCE
        left = self._most
        parts: list[TextPart | FilePart] = []
        for part in message:
            largest = largest_of(part.media_type) if isinstance(part, FilePart) and is_linked(part) else None
            if isinstance(part, FilePart) and largest is not None:
                part, size = await self._fetched(part, min(left, largest), until)
                left -= size
            parts.append(part)
        return delivery.model_copy(update={"message": tuple(parts)})

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
            # Not an address, or one that is not allowed.
            return _missing(part, "its address is not allowed, or it is too large")
        kind = bare_type(answer.headers.get("content-type", ""))
        if kind.partition("/")[0] != bare_type(part.media_type).partition("/")[0] or largest_of(kind) is None:
            return _missing(part, "the server sent something else")
        data = base64.b64encode(answer.content).decode()
        return part.model_copy(update={"data": data, "media_type": kind}), len(answer.content)


def _missing(part: FilePart, why: str) -> tuple[FilePart, int]:
    return part.model_copy(update={"missing": why}), 0


@dataclass(frozen=True)
class ModelContext:
    """What an attempt has read before it calls the model."""

    call: ModelCall
    attempt: Attempt
    row: SessionRow
    agent: Agent
    history: History
    turn: TurnJournal
    #: When this attempt began, in seconds since the epoch.
    now: float
    #: What must be left out of the prompt first. It is not looked for again in the same attempt.
    plan: "Plan | None" = None
    #: The agent's instructions, as they are rendered for this step.
    instructions: str = ""
    #: With what the reply begins: older attempts have streamed it.
    partial: Partial | None = None

    @property
    def deadline(self) -> float | None:
        """When the turn fails, in seconds since the epoch."""
        before = self.turn.reply(self.call.at.step - 1)
        if before and before.deadline is not None:
            return before.deadline
        seconds, began_at = self.agent.limits.turn_seconds, self.turn.began_at
        return None if seconds is None else (self.now if began_at is None else began_at) + seconds

    @cached_property
    def conversation(self) -> Conversation:
        turn = (self.call.at.turn, self.turn, self.mark)
        return self.history.conversation.extended([turn], self.history.left_out)

    @property
    def factory(self) -> EventFactory:
        return EventFactory(self.call.at, self.attempt.number)

    @property
    def recorded(self) -> ModelOutcome | None:
        """The recorded outcome of this step or of its turn, if there is one."""
        record = self.turn.at(self.call.at.step, names.REPLY) or self.turn.end_record
        return model_outcome(record) if record else None

    @property
    def pending_result(self) -> Result | None:
        """The structured result of the previous step. Its other calls have ended, so the turn can end with it."""
        before = self.turn.reply(self.call.at.step - 1)
        return before.result if before else None

    @property
    def mark(self) -> str | None:
        """The mark of notes to the model. Old sessions have none before their next step."""
        return self.history.mark or self.turn.mark

    @property
    def joined(self) -> tuple[str, ...]:
        """The deliveries that have entered the turn at this step. Its driver has them in its inbox still."""
        return tuple(each.delivery_id for each in self.turn.deliveries() if each.step == self.call.at.step)

    @property
    def has_answered(self) -> bool:
        """Whether the turn is complete, unless a message enters it at this step."""
        before = self.turn.reply(self.call.at.step - 1)
        return before is not None and before.continues and not self.joined

    @property
    def output(self) -> FinalOutput | None:
        return required_output(self.agent, self.call.mode, self.turn)


@dataclass(frozen=True)
class Opening:
    """The first commit of a step. It is idempotent."""

    records: tuple[NewRecord, ...]
    events: tuple[NewEvent, ...]
    #: The deliveries that this commit consumes.
    consume: Consumption | None
    change: SessionChange


async def read_deliveries(
    store: Store, at: Coordinates, delivery_ids: Sequence[str], turn: TurnJournal, files: FileFetcher | None = None
) -> tuple[tuple[ConsumedDelivery, ...], TurnJournal]:
    """The deliveries of this turn: those that it has consumed already, else those that can still be consumed.

    With `files` they are read for the model: linked files are fetched, so that the journal holds their content, and
    deliveries of kinds that this build does not know raise `UnreadableState`.
    """
    if deliveries := turn.deliveries():
        return deliveries, turn
    rows = await store.deliveries(at.session_id, list(dict.fromkeys(delivery_ids)))
    if any(row.turn == at.turn for row in rows):
        # An older attempt has consumed them since the records were read.
        turn = await read_journal(store, at.session_id, at.turn)
        return turn.deliveries(), turn
    await _report_lost(store, at.session_id, set(delivery_ids) - {row.delivery_id for row in rows})
    left = [row for row in rows if row.body is not None and row.refused is None and row.turn is None]
    if files and any(row.kind not in KINDS for row in left):
        raise UnreadableState("This build cannot read a delivery of this kind.")
    deliveries = tuple(
        ConsumedDelivery(
            **_read_body(row, strict=files is not None).model_dump(), delivery_id=row.delivery_id, edits=row.edits
        )
        for row in left
    )
    if files:
        # Concurrently: each delivery may use its whole time, and the time-out of the activity is hardly longer.
        deliveries = tuple(await asyncio.gather(*(files.fetched(each) for each in deliveries)))
    return deliveries, turn


async def read_steers(store: Store, at: Coordinates, files: FileFetcher) -> tuple[ConsumedDelivery, ...]:
    """The messages that wait to enter the turn at this step, in order.

    One that only a newer build can read makes the turn wait for that, as one with which a turn begins.
    """
    rows = [row for row in await store.deliveries(at.session_id, await store.steers(at.session_id)) if row.unread]
    steers = [
        ConsumedDelivery(
            **_read_body(row, strict=True).model_dump(), delivery_id=row.delivery_id, edits=row.edits, step=at.step
        )
        for row in rows
    ]
    return tuple(await asyncio.gather(*(files.fetched(each) for each in steers)))


def with_joined(outcome: ModelOutcome, ctx: "ModelContext") -> ModelOutcome:
    """The outcome of a step, with the messages that have entered the turn at it."""
    if not ctx.joined or isinstance(outcome, NothingToRead):
        return outcome
    return outcome.model_copy(update={"joined": ctx.joined})


def with_steers(
    opening: "Opening", factory: EventFactory, turn: TurnJournal, steers: Sequence[ConsumedDelivery]
) -> "Opening":
    """The opening of a step at which these messages enter the turn: its commit records and consumes them."""
    if not steers:
        return opening
    number = factory.at.turn
    before = opening.consume or Consumption(number, (), {})
    numbered = list(enumerate(steers, len(turn.deliveries()) or len(before.delivery_ids)))
    ids = tuple(each.delivery_id for each in steers)
    *events, started = opening.events
    received = [factory.message_received(index, each) for index, each in numbered if each.message is not None]
    entered = [written(number, 0, names.delivery_key(index), DELIVERY, each) for index, each in numbered]
    edits = {**before.edits, **{each.delivery_id: each.edits for each in steers}}
    return replace(
        opening,
        records=(*opening.records, *entered),
        events=(*events, *received, factory.steer_applied(numbered[0][0], ids), started),
        consume=Consumption(number, (*before.delivery_ids, *ids), edits, before.notes),
    )


def _read_body(row: DeliveryRow, *, strict: bool) -> DeliveryBody:
    """The body in today's version. Without `strict`, one that only a newer build can read is read as far as it goes."""
    body = row.body or {}
    version = body.get("version", 1)
    newer = isinstance(version, int) and version > BODY.version
    try:
        return DeliveryBody.model_validate(body if newer and not strict else BODY.lift(version, body))
    except ValidationError as invalid:
        raise UnreadableState("A delivery cannot be read.", problems=invalid.error_count()) from None


async def _report_lost(store: Store, session_id: str, delivery_ids: set[str]) -> None:
    """Refuse deliveries that are missing. They are never deleted, so the store was restored from an older copy."""
    for each in sorted(delivery_ids):
        message = "The store holds this delivery no longer; it may have been restored from a copy."
        await store.refuse(session_id, each, "delivery_lost", delivery_refused(each, "delivery_lost", message))


def open_step(
    factory: EventFactory, deliveries: Sequence[ConsumedDelivery], turn: TurnJournal, agent: str, model: str
) -> Opening:
    at = factory.at
    if at.step > 0:
        change = SessionChange(status="running", turns=at.turn + 1)
        previous = completed_step(factory.of_another_step(at.step - 1), turn)
        return Opening((), (*previous, factory.step_started()), None, change)
    begun = begin_turn(factory, deliveries, turn, agent, model)
    return replace(begun, events=(*begun.events, factory.step_started()))


def begin_turn(
    factory: EventFactory, deliveries: Sequence[ConsumedDelivery], turn: TurnJournal, agent: str, model: str
) -> Opening:
    """The beginning of a turn, whether its first work is a model call or the processing of answers."""
    number, ids = factory.at.turn, tuple(each.delivery_id for each in deliveries)
    received = [
        factory.message_received(index, each) for index, each in enumerate(deliveries) if each.message is not None
    ]
    # Those that the turn has recorded already are neither written nor consumed again.
    fresh = () if turn.deliveries() else deliveries
    edits, notes = {each.delivery_id: each.edits for each in fresh}, sum(len(each.notes) for each in fresh)
    return Opening(
        records=tuple(
            written(number, 0, names.delivery_key(index), DELIVERY, each) for index, each in enumerate(fresh)
        ),
        # The key of `session.started` makes it unique in its session.
        events=(factory.session_started(agent, model), factory.turn_started(ids), *received),
        consume=Consumption(number, ids, edits, notes) if fresh else None,
        change=SessionChange(status="running", turns=number + 1),
    )


def completed_step(factory: EventFactory, turn: TurnJournal) -> tuple[NewEvent, ...]:
    """The `step.completed` event of this step, if it has a reply with calls: they have ended by now."""
    reply = turn.reply(factory.at.step)
    return (factory.step_completed("tool-calls", reply.usage),) if reply else ()


async def is_stopped(store: Store, at: Coordinates) -> bool:
    """Whether a cancel request for the turn is known."""
    try:
        row = await store.session(at.session_id)
    except Unavailable:
        # Not known. A retry of the whole step would pay for the first reply again.
        return False
    return row is not None and row.cancel_turn is not None and row.cancel_turn <= at.turn
