"""The deliveries of a session, from the moment they are accepted until each has come to its one end."""

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.errors import Conflict, NotFound, PerdureError
from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryBody, Message, Principal, QueueMode
from perdure.protocol.events import WITHDRAWN, delivery_refused
from perdure.protocol.wire import JsonObject
from perdure.runtime.signals import Signals
from perdure.store.base import Store
from perdure.store.deliveries import Change, DeliveryOutcome, DeliveryPage, DeliveryQuery, DeliveryRow, DeliveryStatus
from perdure.store.follow import looked_at_until
from perdure.store.values import SessionRow

#: How the ids of deliveries begin that callers have made. Perdure derives ids for what it delivers itself.
PREFIX = "dlv_"


class DeliveryNotFound(NotFound):
    """No such delivery."""

    code = "delivery_not_found"


class DeliveryIsTaken(Conflict):
    """This delivery waits no more: a turn has read it, or none ever will. Its status says which."""

    code = "delivery_taken"


class DeliveryChanged(PerdureError):
    """The delivery was changed since it was read: read it again, and send its new ETag."""

    status = 412
    code = "delivery_changed"


@dataclass(frozen=True)
class Delivery:
    """A delivery, and how far it has come."""

    row: DeliveryRow
    status: DeliveryStatus
    outcome: DeliveryOutcome | None = None
    # In the queue, from 1, while it waits.
    position: int | None = None

    def shown(self) -> JsonObject:
        """As its owner sees it. Its content is not shown: until a turn reads it, only the sender knows it."""
        row = self.row
        error = row.error or (None if row.refused is None else {"code": row.refused})
        known: JsonObject = {
            "deliveryId": row.delivery_id,
            "sessionId": row.session_id,
            "kind": row.kind,
            "lane": row.lane,
            # Rows of older builds have none, and were followed up.
            "mode": row.mode or ("followup" if row.kind == "message" else None),
            "status": self.status,
            "outcome": self.outcome,
            "position": self.position,
            "turnId": None if row.turn is None else names.turn_id(row.turn),
            "answeredByTurn": None if row.answered_by is None else names.turn_id(row.answered_by),
            "acceptedAt": row.accepted_at,
            "startedAt": row.started_at,
            "settledAt": row.settled_at,
            "error": error,
        }
        return {name: value for name, value in known.items() if value is not None}


class Inbox:
    """Looks deliveries up for those who own their sessions; without a principal, for operators."""

    def __init__(self, store: Store, signals: Signals | None = None) -> None:
        """`signals`: needed to move a delivery, or to change its mode."""
        self._store = store
        self._signals = signals

    async def get(self, delivery_id: str, principal: Principal | None) -> Delivery:
        return await self._shown(await self._find(delivery_id, principal))

    async def list(self, query: DeliveryQuery) -> tuple[Sequence[Delivery], DeliveryPage]:
        """A page of deliveries. Who may see the session is decided before."""
        page = await self._store.list_deliveries(query)
        waiting = await self._store.queue(query.session_id) if any(row.unread for row in page.deliveries) else ()
        places = {row.delivery_id: place for place, row in enumerate(waiting, 1)}
        return [await self._shown(row, places.get(row.delivery_id)) for row in page.deliveries], page

    async def wait(self, delivery_id: str, principal: Principal | None, within: float) -> Delivery:
        """The delivery when it has come to its end, or after so many seconds."""
        row = await self._find(delivery_id, principal)
        return await looked_at_until(
            self._store,
            row.session_id,
            lambda: self.get(delivery_id, principal),
            lambda found: found.status == "settled",
            within,
        )

    async def withdraw(self, delivery_id: str, principal: Principal | None) -> Delivery:
        """Take back a delivery that no turn has read."""
        row = await self._find(delivery_id, principal)
        if row.refused != WITHDRAWN:
            event = delivery_refused(delivery_id, WITHDRAWN, "Its sender has withdrawn this delivery.")
            if row.kind != "message" or not await self._store.refuse(row.session_id, delivery_id, WITHDRAWN, event):
                raise DeliveryIsTaken
            row = await self._find(delivery_id, principal)
        if row.refused != WITHDRAWN:
            # Refused meanwhile for another reason, which is told already.
            raise DeliveryIsTaken
        return await self._shown(row)

    async def edit(
        self,
        delivery_id: str,
        principal: Principal | None,
        edits: int | None,
        *,
        message: Message | None = None,
        mode: QueueMode | None = None,
        position: int | None = None,
    ) -> Delivery:
        """Change a message that waits: its content, its mode, its place in the queue from 1.

        `edits`: how often it was changed when the caller read it; None: the caller does not say, which is refused.
        """
        row = await self._find(delivery_id, principal)
        if row.kind != "message" or not row.unread or row.body is None:
            raise DeliveryIsTaken
        if edits is None:
            raise DeliveryChanged("Send If-Match with the ETag of this delivery, as a GET of it shows it.")
        if edits != row.edits:
            raise DeliveryChanged
        written = None if message is None else DeliveryBody(message=message).model_dump(mode="json")["message"]
        body = row.body if written is None else {**row.body, "message": written}
        edited = await self._store.edit_delivery(row, Change(body, mode, position))
        if edited is None:
            raise DeliveryIsTaken if not (await self._find(delivery_id, principal)).unread else DeliveryChanged
        if self._signals is not None and (mode is not None or position is not None):
            # The driver knows the delivery, and has to hear of the change. The sweeper repeats a signal that fails.
            await self._signals.deliver(edited, unsignalled=mode == "interrupt")
        return await self._shown(edited)

    async def _find(self, delivery_id: str, principal: Principal | None) -> DeliveryRow:
        if delivery_id.startswith(PREFIX):
            for row in await self._store.find_delivery(delivery_id):
                session = await self._store.session(row.session_id)
                if session is not None and (principal is None or session.principal.owner == principal.owner):
                    return row
        raise DeliveryNotFound

    async def _shown(self, row: DeliveryRow, place: int | None = None) -> Delivery:
        """`place`: in the queue, if that is known."""
        if row.outcome is not None:
            return Delivery(row, "settled", row.outcome)
        if row.refused is not None:
            # By an older build.
            return Delivery(row, "settled", "refused")
        if row.turn is None:
            return Delivery(row, "queued", position=place or await self._store.place_in_queue(row))
        if row.started_at is None:
            return await self._of_older_build(row, row.turn)
        return Delivery(row, "running")

    async def _of_older_build(self, row: DeliveryRow, turn: int) -> Delivery:
        """A delivery whose turn was begun by a build that did not note its end: only the events know it."""
        for what in ("failed", "cancelled", "completed"):
            if await self._store.index_of(row.session_id, names.turn_key(turn, what)) is not None:
                return Delivery(row, "settled", what)
        session: SessionRow | None = await self._store.session(row.session_id)
        over = session is not None and (session.ended or session.turns > turn + 1)
        return Delivery(row, "settled", "completed") if over else Delivery(row, "running")
