"""The implementation of `Store` over any SQL database."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic

from perdure.errors import OutcomeUnknown, Unavailable
from perdure.protocol import names
from perdure.protocol.deliveries import MAIN
from perdure.protocol.events import Event, NewEvent
from perdure.protocol.requests import Attention
from perdure.protocol.wire import JsonObject
from perdure.store.base import RawRecord, Watch
from perdure.store.deliveries import (
    Accepted,
    CancelRequest,
    Change,
    DeliveryPage,
    DeliveryQuery,
    DeliveryRow,
    NewDelivery,
    Unsignalled,
)
from perdure.store.inputs import Answered, Answering, InputPage, InputQuery, InputRow, Waits
from perdure.store.lifecycle import (
    CallbackStatus,
    DeadLetter,
    DeadLetterPage,
    DeadLetterQuery,
    Deletion,
    DueCallback,
    Forked,
    Keep,
    NewFork,
    NewImport,
    NewRemoteCall,
    RemoteCall,
    Restoration,
)
from perdure.store.runs import RunPage, RunQuery, RunRecord
from perdure.store.values import (
    Commit,
    Committed,
    EventQuery,
    Instance,
    Lane,
    LaneSettings,
    NewSession,
    Record,
    SessionPage,
    SessionQuery,
    SessionRow,
    Slot,
)
from perdure.store.watchers import Feed, Watchers

from . import deliveries, lifecycle, queue, rows, runs
from .attempts import SqlAttempts
from .commit import apply, cancelling, record_at
from .cursors import OLDEST, Place, newest_first, oldest_first, sessions_query, write_cursor
from .database import Database, Row, T, Transaction, Value, Work, Written, check, migrate
from .history import checkpoints, forks
from .rows import before, encode, stamp_after, utc_now
from .streams import SqlStreams

#: Greater than the number of any turn.
_LAST_TURN = 2**53

#: After a commit with an unknown outcome: for how many seconds it is retried, and the pause between two tries.
_RETRY_SECONDS = 5.0
_RETRY_PAUSE = 0.1

#: How many unread deliveries one query returns.
_PAGE = 1000


class SqlStore:
    """`Store` over one `Database` and its `Feed`. An instance belongs to one event loop."""

    def __init__(self, database: Database, feed: Feed, clock: Callable[[], str] = utc_now) -> None:
        self._database = database
        self._watchers = Watchers(feed)
        self._feed = feed
        self._now = clock
        self.attempts = SqlAttempts(database, clock)
        self.checkpoints = checkpoints.SqlCheckpoints(database, clock, self._write_and_notify)
        self.streams = SqlStreams(database, self._watchers, feed, clock)

    async def migrate(self) -> None:
        await migrate(self._database)

    async def check(self) -> int:
        return await check(self._database)

    async def close(self) -> None:
        await self._watchers.close()
        await self._database.close()

    async def create_session(self, session: NewSession, delivery: NewDelivery | None = None) -> Accepted | None:
        accepted = await self._write_once(lambda tx: deliveries.create_session(tx, session, delivery, self._now()))
        if session.named:
            # Those who have read all of the session before it wait for this one.
            self._watchers.wake(session.token_hash)
            self._feed.announce(session.token_hash, 1)
        return accepted

    async def fork(self, fork: NewFork) -> Forked:
        return await self._write_once(lambda tx: forks.fork(tx, fork, self._now()))

    async def begin_deletion(self, session_id: str) -> Deletion | None:
        return await self._write_once(lambda tx: lifecycle.begin_deletion(tx, session_id, self._now()))

    async def deletion(self, session_id: str) -> Deletion | None:
        return await self._database.read(lambda tx: lifecycle.find_deletion(tx, session_id))

    async def unfinished_deletions(self, limit: int) -> Sequence[str]:
        return [row["session_id"] for row in await self._rows("unfinished_deletions", limit=limit)]

    async def delete_children(self, session_id: str, limit: int) -> bool:
        found = await self._database.read(lambda tx: lifecycle.parts_to_begin(tx, session_id, limit))
        for each in found:
            await self._write_once(lambda tx, child=each: lifecycle.begin_part(tx, session_id, child, self._now()))
        return len(found) < limit

    async def unfinished_parts(self, session_id: str, limit: int) -> Sequence[str]:
        found = await self._rows("unfinished_parts", session_id=session_id, limit=limit)
        return [row["session_id"] for row in found]

    async def purge(self, session_id: str, limit: int) -> bool:
        # First: nobody would find the children of a session that is gone.
        if not await self.delete_children(session_id, limit):
            return False
        return await self._database.write(lambda tx: lifecycle.purge(tx, session_id, limit, self._now()))

    async def count_executions(self, session_id: str, executions: int) -> None:
        await self._write_once(lambda tx: lifecycle.count_executions(tx, session_id, executions))

    async def finish_deletion(self, session_id: str, executions: int) -> Deletion | None:
        return await self._write_once(lambda tx: lifecycle.finish_deletion(tx, session_id, executions, self._now()))

    async def forget_deletions(self, older_than: float, limit: int) -> int:
        then = before(self._now(), older_than)
        return await self._database.write(lambda tx: lifecycle.forget_deletions(tx, then, limit))

    async def expire(self, keep: Keep, cursor: str | None, limit: int) -> str | None:
        if (shortest := keep.shortest) is None:
            return None
        after = oldest_first(cursor)
        oldest = before(self._now(), shortest)
        page, following = await self._page("expirable", {"before": oldest}, ("created_at", "session_id"), after, limit)
        for row in page:
            # A few turns or rows in each transaction.
            for work in lifecycle.expiring(row, keep, self._now()):
                while await self._database.write(work):
                    pass
        return following

    async def slots_at(self, session_id: str, turn: int) -> Sequence[Slot]:
        return await self._database.read(lambda tx: lifecycle.exported_slots(tx, session_id, turn))

    async def import_session(self, new: NewImport) -> None:
        await self._database.write(lambda tx: lifecycle.import_session(tx, new, self._now()))

    async def restore(self, restoration: Restoration) -> SessionRow:
        to = restoration
        return await self._write_and_notify(to.session_id, lambda tx: forks.restore(tx, to, self._now()))

    async def session(self, session_id: str) -> SessionRow | None:
        found = await self._row("session", session_id=session_id)
        return None if found is None else rows.session(found)

    async def sessions(self, query: SessionQuery) -> SessionPage:
        name, values = sessions_query(query)
        values |= {"agent": query.agent, "mode": query.mode, "tag": rows.tag_text(query.tag)}
        after, order = newest_first(query.cursor), ("created_at", "session_id")
        found, next_cursor = await self._page(name, values, order, after, query.limit)
        return SessionPage([rows.session(row) for row in found], next_cursor)

    async def set_tags(self, session_id: str, changes: Mapping[str, str | None]) -> SessionRow:
        return await self._write_once(lambda tx: queue.set_tags(tx, session_id, changes))

    async def lanes(self, session_id: str) -> Sequence[Lane]:
        return await self._database.read(lambda tx: deliveries.lanes(tx, session_id))

    async def lane_settings(self, session_id: str) -> LaneSettings | None:
        return await self._database.read(lambda tx: queue.lane_settings(tx, session_id))

    async def set_lane(self, session_id: str, lane: str, changes: JsonObject) -> LaneSettings:
        return await self._write_once(lambda tx: queue.set_lane(tx, session_id, lane, changes))

    async def family(self, root_id: str, cursor: str | None = None, limit: int = 200) -> SessionPage:
        after = oldest_first(cursor)
        found, following = await self._page("family", {"root": root_id}, ("created_at", "session_id"), after, limit)
        return SessionPage([rows.session(row) for row in found], following)

    async def run(self, run_id: str) -> RunRecord | None:
        found = await self._row("run", session_id=run_id)
        return None if found is None else runs.record(found)

    async def runs(self, query: RunQuery) -> RunPage:
        name, values = runs.query_of(query)
        return runs.page_of([*await self._rows(name, **values)], query.limit)

    async def route(self, token_hash: str) -> str | None:
        found = await self._row("route", token_hash=token_hash)
        return None if found is None else found["session_id"]

    async def open_sessions(self, after: str, limit: int) -> Sequence[str]:
        return [row["session_id"] for row in await self._rows("open_sessions", after=after, limit=limit)]

    async def cancel(
        self, session_id: str, turn_id: str | None, to_event: Callable[[int], NewEvent]
    ) -> CancelRequest | None:
        return await self._write_and_notify(session_id, cancelling(session_id, turn_id, to_event, self._now))

    async def set_attention(self, session_id: str, attention: Attention, turn: int | None = None) -> bool:
        return await self._write_and_notify(
            session_id, lambda tx: deliveries.set_attention(tx, session_id, attention, turn, self._now())
        )

    async def instance(self, token_hash: str, number: int | None = None) -> Instance | None:
        if number is None:
            found = await self._row("newest_instance", token_hash=token_hash)
        else:
            found = await self._row("instance_from", token_hash=token_hash, number=number)
        return None if found is None else Instance(found["number"], found["session_id"])

    async def number_of(self, session_id: str) -> int | None:
        found = await self._row("instance_of", session_id=session_id)
        return None if found is None else found["number"]

    async def name_session(self, token_hash: str, session_id: str) -> None:
        await self._write_once(lambda tx: deliveries.name_session(tx, token_hash, session_id))

    async def token_of(self, session_id: str) -> str | None:
        found = await self._row("route_of", session_id=session_id)
        return None if found is None else found["token_hash"]

    async def accept(self, delivery: NewDelivery) -> Accepted:
        async def accept(tx: Transaction) -> Written[Accepted]:
            return await deliveries.accept(tx, delivery, self._now())

        if delivery.mode == "interrupt" or delivery.overflow != "reject":
            return await self._write_and_notify(delivery.session_id, accept)
        # No reader is told of it.
        return (await self._write_once(accept)).value

    async def first(self, delivery: NewDelivery) -> Accepted | None:
        async def work(tx: Transaction) -> Accepted | None:
            found = await deliveries.find_first(tx, delivery)
            if found is None:
                await deliveries.refuse_deleted_key(tx, delivery)
            return found

        return await self._database.read(work)

    async def refuse(self, session_id: str, delivery_id: str, code: str, event: NewEvent) -> bool:
        return await self._write_and_notify(
            session_id, lambda tx: deliveries.refuse(tx, session_id, delivery_id, code, event, self._now())
        )

    async def deliveries(self, session_id: str, delivery_ids: Sequence[str]) -> Sequence[DeliveryRow]:
        found = await self._rows("deliveries", session_id=session_id, delivery_ids=list(delivery_ids))
        by_id = {row["delivery_id"]: row for row in found}
        return [rows.delivery(by_id[each]) for each in delivery_ids if each in by_id]

    async def find_delivery(self, delivery_id: str) -> Sequence[DeliveryRow]:
        return list(map(rows.delivery, await self._rows("deliveries_by_id", delivery_id=delivery_id)))

    async def list_deliveries(self, query: DeliveryQuery) -> DeliveryPage:
        after = newest_first(query.cursor)
        values: dict[str, Value] = {"session_id": query.session_id, "status": query.status}
        place = ("accepted_at", "delivery_id")
        found, next_cursor = await self._page("deliveries_of_session", values, place, after, query.limit)
        return DeliveryPage([rows.delivery(row) for row in found], next_cursor)

    async def queue(self, session_id: str, lane: str = MAIN) -> Sequence[DeliveryRow]:
        return list(map(rows.delivery, await self._rows("queue", session_id=session_id, lane=lane)))

    async def steers(self, session_id: str) -> Sequence[str]:
        return [row["delivery_id"] for row in await self._rows("steers", session_id=session_id)]

    async def place_in_queue(self, delivery: DeliveryRow) -> int:
        place, delivery_id = delivery.place
        values = {"session_id": delivery.session_id, "place": place, "delivery_id": delivery_id}
        found = await self._row("place_in_queue", **values, lane=delivery.lane)
        return 0 if found is None else found["place"]

    async def edit_delivery(self, delivery: DeliveryRow, change: Change) -> DeliveryRow | None:
        # If the outcome of the commit is unknown, the caller reads it again: the number of edits says it.
        return await self._write_and_notify(
            delivery.session_id, lambda tx: queue.edit(tx, delivery, change, self._now()), once=False
        )

    async def unread(self, session_id: str) -> Sequence[DeliveryRow]:
        found: list[DeliveryRow] = []
        while True:
            last = Place(found[-1].accepted_at, found[-1].delivery_id) if found else OLDEST
            page = await self._rows("unheard", session_id=session_id, after_at=last.at, after_id=last.id, limit=_PAGE)
            found.extend(rows.delivery(row) for row in page)
            if len(page) < _PAGE:
                return found

    async def count_unread(self, session_id: str) -> int:
        return (await self._rows("waiting", session_id=session_id))[0]["waiting"]

    async def waits(self, session_ids: Sequence[str]) -> Mapping[str, Waits]:
        return await self._database.read(lambda tx: deliveries.waits(tx, session_ids))

    async def unsignalled(self, *, older_than: float, after: str, limit: int) -> Sequence[Unsignalled]:
        then = before(self._now(), older_than)
        found = await self._rows("untold", before=then, after=after, limit=limit)
        return [Unsignalled(row["session_id"], row["newest"], row["cancel_turn"], bool(row["untold"])) for row in found]

    async def begin_waiting(self, session_id: str) -> None:
        await self._database.write(lambda tx: deliveries.begin_waiting(tx, session_id))

    async def mark_unsignalled(self, session_id: str) -> None:
        await self._database.write(lambda tx: tx.run("mark_untold", session_id=session_id))

    async def clear_unsignalled(self, session_id: str, marks: int) -> None:
        await self._database.write(lambda tx: tx.run("clear_untold", session_id=session_id, marks=marks))

    async def due_callbacks(self, limit: int) -> Sequence[str]:
        return [row["session_id"] for row in await self._rows("due_callbacks", now=self._now(), limit=limit)]

    async def claim_callback(self, session_id: str, lease: float) -> DueCallback | None:
        # If the outcome of the commit is unknown, it may be claimed: the lease ends by itself.
        return await self._database.write(lambda tx: lifecycle.claim_callback(tx, session_id, lease, self._now()))

    async def delay_callback(self, due: DueCallback, seconds: float) -> None:
        place = {"session_id": due.session_id, "tries": due.tries}
        due_at = stamp_after(self._now(), seconds)
        await self._write_once(lambda tx: tx.run("delay_callback", **place, due_at=due_at))

    async def settle_callback(self, session_id: str, outcome: str) -> None:
        await self._write_once(lambda tx: lifecycle.settle_callback(tx, session_id, outcome))

    async def callback(self, session_id: str) -> CallbackStatus | None:
        found = await self._row("callback", session_id=session_id)
        return None if found is None else CallbackStatus(found["tries"], found["ended_at"], found["settled"])

    async def begin_remote_call(self, call: NewRemoteCall) -> RemoteCall:
        return await self._write_once(lambda tx: lifecycle.begin_remote_call(tx, call, self._now()))

    async def remote_call(self, session_id: str, action: str) -> RemoteCall | None:
        return await self._database.read(lambda tx: lifecycle.find_remote_call(tx, session_id, action))

    async def remote_call_by_token(self, token_hash: str) -> RemoteCall | None:
        return await self._database.read(lambda tx: lifecycle.find_by_token(tx, token_hash))

    async def advance_remote_call(self, call: RemoteCall, state: JsonObject) -> None:
        place = {"session_id": call.session_id, "action": call.action}
        await self._write_once(lambda tx: tx.run("advance_remote_call", **place, state=encode(state)))

    async def end_remote_call(self, call: RemoteCall, result: JsonObject, state: JsonObject) -> Accepted | None:
        # A retry after an unknown outcome may find the result of this call: then the sweeper signals its delivery.
        return await self._write_once(lambda tx: lifecycle.end_remote_call(tx, call, result, state, self._now()))

    async def report_end(self, session_id: str) -> None:
        await self._write_once(lambda tx: deliveries.report_ended(tx, session_id, self._now()))

    async def answer(self, answering: Answering, to_event: Callable[[InputRow], NewEvent]) -> Answered:
        return await self._write_and_notify(
            answering.session_id, lambda tx: deliveries.answer(tx, answering, to_event, self._now())
        )

    async def input(self, request_id: str) -> InputRow | None:
        found = await self._row("input", request_id=request_id)
        return None if found is None else rows.input_row(found)

    async def inputs(self, query: InputQuery) -> InputPage:
        after = oldest_first(query.cursor)
        name, values = deliveries.inputs_query(query)
        values |= {"agent": query.agent, "kind": query.kind}
        found, next_cursor = await self._page(name, values, ("opened_at", "request_id"), after, query.limit)
        return InputPage([rows.input_row(row) for row in found], next_cursor)

    async def dead_letter(self, session_id: str, turn: int) -> DeadLetter | None:
        found = await self._row("dead_letter", dead_letter_id=names.turn_workflow(session_id, turn))
        return None if found is None else rows.dead_letter(found)

    async def dead_letters(self, query: DeadLetterQuery) -> DeadLetterPage:
        after = newest_first(query.cursor)
        values: dict[str, Value] = {"agent": query.agent, "status": query.status}
        name = "dead_letters"
        if query.owner is not None:
            name, values["owner"] = "dead_letters_of_owner", query.owner
        found, next_cursor = await self._page(name, values, ("failed_at", "dead_letter_id"), after, query.limit)
        return DeadLetterPage([rows.dead_letter(row) for row in found], next_cursor)

    async def mark_requeued(self, session_id: str, turn: int) -> None:
        values = {"dead_letter_id": names.turn_workflow(session_id, turn), "now": self._now()}
        await self._write_once(lambda tx: tx.run("requeue_dead_letter", **values))

    async def commit(self, commit: Commit) -> Committed:
        return await self._write_and_notify(commit.session_id, lambda tx: apply(tx, commit, self._now()), once=False)

    async def records(self, session_id: str, *, from_turn: int = 0, to_turn: int | None = None) -> Sequence[Record]:
        return list(map(rows.decoded, await self.raw_records(session_id, from_turn=from_turn, to_turn=to_turn)))

    async def raw_records(
        self, session_id: str, *, from_turn: int = 0, to_turn: int | None = None
    ) -> Sequence[RawRecord]:
        last = _LAST_TURN if to_turn is None else to_turn
        found = await self._rows("records", session_id=session_id, from_turn=from_turn, to_turn=last)
        return list(map(rows.raw_record, found))

    async def outline(self, session_id: str, turn: int, step: int | None = None) -> Sequence[Record]:
        found = await self._rows("outline", session_id=session_id, turn=turn, step=-1 if step is None else step)
        return [rows.record(row) for row in found]

    async def record(self, session_id: str, turn: int, step: int, key: str) -> Record | None:
        return await self._database.read(lambda tx: record_at(tx, session_id, turn, step, key))

    async def slots(self, session_id: str, names: Sequence[str] | None = None) -> dict[str, Slot]:
        which: dict[str, Value] = {} if names is None else {"names": list(names)}
        found = await self._rows("all_slots" if names is None else "slots", session_id=session_id, **which)
        return {row["name"]: rows.slot(row) for row in found}

    async def events(self, session_id: str, start: int = 0, limit: int = 500) -> Sequence[Event]:
        found = await self._rows("events", session_id=session_id, start=start, limit=limit)
        events = [rows.event(row) for row in found]
        is_dense = not events or events[-1].index - start + 1 == len(events)
        return events if is_dense else rows.with_expired(events, start, limit)

    async def find_events(self, session_id: str, query: EventQuery) -> Sequence[Event]:
        found = await self._rows(
            "find_events_back" if query.back else "find_events",
            session_id=session_id,
            after=query.after,
            before=query.before,
            types=query.types,
            exclude=query.exclude,
            turn=query.turn,
            attempt=query.attempt,
            delivery_id=query.delivery_id,
            limit=query.limit,
        )
        return [rows.event(row) for row in found]

    async def index_of(self, session_id: str, key: str) -> int | None:
        found = await self._row("index_of", session_id=session_id, key=key)
        return None if found is None else found["idx"]

    def watch(self, session_id: str) -> AbstractAsyncContextManager[Watch]:
        return self._watchers.watching(session_id)

    async def _row(self, query: str, **values: Value) -> Row | None:
        return await self._database.read(lambda tx: tx.row(query, **values))

    async def _rows(self, query: str, **values: Value) -> Sequence[Row]:
        return await self._database.read(lambda tx: tx.rows(query, **values))

    async def _page(
        self, query: str, values: dict[str, Value], order: tuple[str, str], after: Place, limit: int
    ) -> tuple[Sequence[Row], str | None]:
        """The rows after this place, and the cursor of the next page. `order`: the columns of the time and the id."""
        at, id = order
        # One more row shows whether there is another page.
        found = await self._rows(query, **values, **{at: after.at, id: after.id}, limit=limit + 1)
        if len(found) <= limit:
            return found, None
        last = found[limit - 1]
        return found[:limit], write_cursor(Place(last[at], last[id]))

    async def _write_once(self, work: Work[T]) -> T:
        """Write; when the outcome of the commit is unknown, retry until it is known. The work must be idempotent.

        Not for `commit`: a retry cannot report whose fence was replaced, so who commits has to know that it is one.
        """
        try:
            return await self._database.write(work)
        except OutcomeUnknown:
            until = monotonic() + _RETRY_SECONDS
        while True:
            await asyncio.sleep(_RETRY_PAUSE)
            try:
                return await self._database.write(work)
            except Unavailable as error:
                if monotonic() > until:
                    raise OutcomeUnknown from error

    async def _write_and_notify(self, session_id: str, work: Work[Written[T]], *, once: bool = True) -> T:
        """Write, then wake the readers of the session if events were appended."""
        try:
            written = await (self._write_once(work) if once else self._database.write(work))
        except (asyncio.CancelledError, Unavailable):
            # The transaction may have committed all the same. A needless wake costs one read.
            self._watchers.wake(session_id)
            raise
        if written.head is not None:
            self._watchers.advanced(session_id, written.head)
            self._feed.announce(session_id, written.head)
        elif once:
            # A retry appends nothing; the try before it may have.
            self._watchers.wake(session_id)
        return written.value
