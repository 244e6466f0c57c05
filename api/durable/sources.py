"""The event logs of sessions and runs as sources of reads, in Flue's words."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from api.responses import dumps
from perdure.errors import NotFound, RunNotFound
from perdure.protocol import flue, names
from perdure.protocol.conversation import changes
from perdure.protocol.events import Event, EventType
from perdure.protocol.flue import Known
from perdure.protocol.stream_policy import SHOWS_ALL, StreamPolicy
from perdure.protocol.wire import JsonObject
from perdure.runtime.streams.instances import Instances, Named
from perdure.store.base import Store, Watch
from perdure.store.values import SessionRow

from .joint import Joint
from .offsets import log_and_index, place
from .read import JSON, Head, Page, StreamNotFound

#: The most events of a page, how many are read at a time, and the bytes with which a page ends sooner.
_PAGE = 100
_READ = 50
_PAGE_BYTES = 1_048_576
#: Events that show a message as a whole.
_OF_MESSAGES = (EventType.STEP_SUPERSEDED, EventType.REASONING_COMPLETED, EventType.MESSAGE_COMPLETED)
#: How many turns before it a turn may continue.
_MOST_PARKED = 50


class RunValues(Protocol):
    """What the record of a run knows, and its events do not repeat."""

    @property
    def input(self) -> Any: ...

    @property
    def result(self) -> Any: ...

    @property
    def started_at(self) -> str: ...

    @property
    def duration_ms(self) -> int | None: ...


RunLookup: TypeAlias = Callable[[str], Awaitable[RunValues | None]]


@dataclass(frozen=True)
class Log:
    """Whose events are read: a session, or a run, whose events are kept in the same way."""

    session_id: str
    # As clients know it: `agents/concierge/42` or `runs/run_…`.
    path: str
    known: Known
    # What an event is shown as.
    shown: Callable[[Event, Known], tuple[JsonObject, ...]] = flue.project
    # Whether it is shown with whole messages, which more than one event knows.
    whole: bool = False
    # Of a run: finds its record.
    runs: RunLookup | None = None
    # What readers do not see.
    policy: StreamPolicy = SHOWS_ALL

    @property
    def tag(self) -> str:
        # Another policy shows something else at the same offsets.
        return ":".join(filter(None, (self.path, self.session_id, self.policy.tag)))

    @property
    def is_run(self) -> bool:
        return self.known.run_id is not None


def log_of_agent(session_id: str, agent: str, instance: str, *, number: int = 0, conversation: bool = False) -> Log:
    """The events of one session of an instance, or the changes of its conversation."""
    path, known = f"agents/{agent}/{instance}", Known(instance_id=instance, session=number)
    if conversation:
        return Log(session_id, f"{path}?updates", known, changes, whole=True)
    return Log(session_id, path, known)


def log_of_run(run_id: str, runs: RunLookup) -> Log:
    return Log(run_id, f"runs/{run_id}", Known(run_id=run_id), runs=runs)


class EventLog:
    """A log of events. That of a run is closed when the run has ended; that of an agent never is."""

    content_type = JSON
    headers: Mapping[str, str] = {}

    def __init__(self, store: Store, log: Log, rows: Joint[SessionRow | None] | None = None) -> None:
        """`rows`: what many readers of one log share, so that its head is read once for all of them."""
        self._store = store
        self._log = log
        self._rows = rows or Joint[SessionRow | None]()
        self._projection = Projection(store, log)

    @property
    def name(self) -> str:
        return self._log.session_id

    @property
    def tag(self) -> str:
        return self._log.tag

    async def head(self) -> Head:
        session_id = self._log.session_id
        row = await self._rows(session_id, lambda: self._store.session(session_id))
        if row is None:
            missing: type[NotFound] = RunNotFound if self._log.is_run else StreamNotFound
            raise missing
        return Head(row.events, closed=self._log.is_run and row.ended)

    async def page(self, start: int, head: Head) -> Page:
        items: list[bytes] = []
        size, position, end = 0, start, min(start + _PAGE, head.position)
        while position < end and size < _PAGE_BYTES:
            events = await self._store.events(self._log.session_id, position, min(_READ, end - position))
            if not events:
                # An event that the row counts and the log has not is passed over: waiting for it would never end.
                return Page(items, head.position)
            for event in events:
                shown = [dumps(each) for each in await self._projection.of(event)]
                items += shown
                size += sum(map(len, shown))
                position = event.index + 1
                if size >= _PAGE_BYTES:
                    break
        return Page(items, position)

    async def touch(self) -> None:
        """Nothing to do: it does not expire."""

    def watch(self) -> AbstractAsyncContextManager[Watch]:
        return self._store.watch(self._log.session_id)


class SharedInstances:
    """The instances, for many readers of one: what they look for at the same time is read once."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self._found = Joint[Named | None]()

    async def find(self, name: str) -> Named | None:
        return await self._found(name, lambda: self._instances.find(name))

    async def after(self, name: str, number: int) -> Named | None:
        return await self._instances.after(name, number)


class AgentLog:
    """The logs of all sessions that an instance has had, one after another: a stream that is never closed."""

    content_type = JSON
    headers: Mapping[str, str] = {}

    def __init__(
        self, store: Store, instances: SharedInstances, name: str, newest: Named, log_of: Callable[[Named], Log]
    ) -> None:
        """`name`: as the store knows the instance; `newest`: its newest session when the request came."""
        self._store = store
        self._instances = instances
        self._name = name
        self._newest = newest
        self._log_of = log_of
        self._tag = log_of(newest).tag
        self._read: EventLog | None = None

    @property
    def name(self) -> str:
        return self._newest.row.session_id

    @property
    def tag(self) -> str:
        return self._tag

    @property
    def watched(self) -> str:
        """What has the next events: the newest session, or, once that has ended, the name that gets another one."""
        return self._name if self._newest.row.ended else self._newest.row.session_id

    async def head(self) -> Head:
        newest = await self._instances.find(self._name)
        if newest is None:
            raise StreamNotFound
        self._newest = newest
        return Head(place(newest.number, newest.row.events), first=place(newest.number, 0))

    async def page(self, start: int, head: Head) -> Page:
        number, index = log_and_index(start)
        newest, end = log_and_index(head.position)
        found = self._newest
        if number < newest:
            older = await self._instances.after(self._name, number)
            if older is None or older.number > number or index >= older.row.events:
                # This session has ended, or was deleted: the next one goes on.
                return Page((), place(number + 1 if older is None else max(number + 1, older.number), 0))
            found, end = older, older.row.events
        log = self._log_of(found)
        if self._read is None or self._read.name != log.session_id:
            self._read = EventLog(self._store, log)
        page = await self._read.page(index, Head(end))
        return Page(page.items, place(number, page.end))

    async def touch(self) -> None:
        """Nothing to do: it does not expire."""

    def watch(self) -> AbstractAsyncContextManager[Watch]:
        return self._watching()

    @asynccontextmanager
    async def _watching(self) -> AsyncGenerator[Watch]:
        watch = _WatchOfNewest(self._store, self)
        try:
            yield watch
        finally:
            await watch.close()


class _WatchOfNewest:
    """Watches an instance, whichever session is its newest one."""

    def __init__(self, store: Store, log: AgentLog) -> None:
        self._store = store
        self._log = log
        self._watched = ""
        self._open = AsyncExitStack()
        self._watch: Watch | None = None

    async def changed(self, within: float | None = None) -> bool:
        if self._watch is None or self._watched != self._log.watched:
            await self._open.aclose()
            self._watched = self._log.watched
            self._watch = await self._open.enter_async_context(self._store.watch(self._watched))
            # What has changed before is not reported.
            return True
        return await self._watch.changed(within)

    async def close(self) -> None:
        await self._open.aclose()


class Projection:
    """Events in Flue's words, in order, beginning anywhere. What an event does not say is looked up, once a turn."""

    def __init__(self, store: Store, log: Log) -> None:
        self._store = store
        self._log = log
        self._turn: int | None = None
        self._known = log.known
        self._model: str | None = None

    async def of(self, event: Event) -> tuple[JsonObject, ...]:
        event = self._log.policy.shown(event)
        known = self._log.known if event.turn is None else await self._known_of(event, event.turn)
        if event.type in flue.ENDS and event.turn is not None:
            known = replace(known, settles=await self._settled(event, event.turn), text=await self._text(event))
        if event.type in flue.OF_RUN_RECORD and self._log.runs is not None:
            known = replace(known, run=await self._run(self._log.runs))
        return self._log.shown(event, known)

    async def _run(self, runs: RunLookup) -> JsonObject | None:
        found = await runs(self._log.session_id)
        if found is None:
            return None
        times = {"startedAt": found.started_at, "durationMs": found.duration_ms}
        return {"input": found.input, "result": found.result, **times}

    async def _known_of(self, event: Event, turn: int) -> Known:
        if turn != self._turn:
            started = (
                event if event.type == EventType.TURN_STARTED else await self._find(names.turn_key(turn, "started"))
            )
            if started is None or event.index < started.index:
                # A cancel, or a compaction, may come before the turn begins. Who reads it later must see the same.
                return self._log.known
            about = {"submissions": started.delivery_ids, "started_at": started.at}
            self._turn, self._known = turn, replace(self._log.known, **about)
        if event.type in (EventType.STEP_COMPLETED, EventType.STEP_FAILED):
            return await self._with_step(event, turn)
        if self._log.whole and event.type in _OF_MESSAGES:
            return await self._with_message(event, turn)
        return self._known

    async def _with_message(self, event: Event, turn: int) -> Known:
        known, place = self._known, (turn, event.step or 0)
        started = await self._find(names.step_key(*place, "started"))
        thought = None
        if event.type == EventType.MESSAGE_COMPLETED:
            thought = await self._find(names.step_key(*place, "reasoning"))
        return replace(
            known,
            step_at=None if started is None else started.at,
            reasoning=None if thought is None else (self._log.policy.shown(thought).data or {}).get("reasoning"),
        )

    async def _with_step(self, event: Event, turn: int) -> Known:
        """What is shown of a call of the model at its end."""
        if self._model is None:
            begun = await self._find(names.session_key("started"))
            runtime: JsonObject = {} if begun is None else (begun.data or {}).get("runtime", {})
            self._model = runtime.get("modelId")
        started = await self._find(names.step_key(turn, event.step or 0, "started"))
        return replace(self._known, model=self._model, step_at=None if started is None else started.at)

    async def _settled(self, end: Event, turn: int) -> tuple[str, ...]:
        """The deliveries of the turn, and of those that had parked before it. A turn that parks settles nothing."""
        if end.delivery_ids:
            return end.delivery_ids
        # Older builds did not name them.
        if end.type == EventType.TURN_COMPLETED and await self._parked(end):
            return ()
        settled = list(self._known.submissions)
        for earlier in range(turn - 1, max(-1, turn - 1 - _MOST_PARKED), -1):
            ended = await self._find(names.turn_key(earlier, "completed"))
            if ended is None or not await self._parked(ended):
                break
            if await self._find(names.turn_key(earlier, "cancelled")) is not None:
                # It was cancelled while it waited, which has settled its deliveries, and those before it.
                break
            started = await self._find(names.turn_key(earlier, "started"))
            settled = [*(() if started is None else started.delivery_ids), *settled]
        return tuple(settled)

    async def _text(self, end: Event) -> str | None:
        said = await self._find(names.step_key(end.turn or 0, end.step or 0, "message"))
        return None if said is None else (said.data or {}).get("message")

    async def _parked(self, end: Event) -> bool:
        """Whether this end of a turn has left input requests open: then it comes right after them, in one commit."""
        before = await self._store.events(self._log.session_id, end.index - 1, 1) if end.index else ()
        return bool(before) and before[0].type == EventType.INPUT_REQUESTED and before[0].turn == end.turn

    async def _find(self, key: str) -> Event | None:
        index = await self._store.index_of(self._log.session_id, key)
        if index is None:
            return None
        found = await self._store.events(self._log.session_id, index, 1)
        return found[0] if found else None
