"""Deliveries: looking one up, waiting for its end, taking it back, changing it while it waits."""

import re
from typing import Any, TypedDict, get_args

from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.bodies import BodyReader, Fields, check_lane, parse_lane, parse_message, parse_queue_mode
from api.controls import parse_lane_change
from api.requests import RequestLimits, idempotency_key, known_id, limit, one_of
from api.responses import flags, reply
from perdure.errors import Invalid
from perdure.protocol.deliveries import DeliveryBody, Message, Principal, QueueMode
from perdure.protocol.wire import JsonObject
from perdure.runtime.inbox import Delivery, DeliveryNotFound, ShownLane
from perdure.runtime.sessions import Sessions
from perdure.store.deliveries import DeliveryQuery, DeliveryStatus

#: The longest that a request waits for the end of a delivery, in seconds.
_LONGEST = 30
_WAIT = re.compile(r"(?:.*,)?\s*wait\s*=\s*\"?([0-9]{1,6})\"?\s*(?:[;,].*)?", re.IGNORECASE)
_VERSION = re.compile(r'"([0-9]{1,9})"')


class _Edit(TypedDict):
    """What a request changes; None: it stays as it is."""

    message: Message | None
    mode: QueueMode | None
    position: int | None


def _position(fields: Fields) -> int | None:
    position = fields.get("position")
    if position is not None and not (isinstance(position, int) and not isinstance(position, bool) and position >= 1):
        raise Invalid("Expected 'position' to be a place in the queue, from 1.")
    return position


class DeliveryRoutes:
    def __init__(
        self, gate: Gate, sessions: Sessions, bodies: BodyReader, limits: RequestLimits, max_inbox: int
    ) -> None:
        """`max_inbox`: how many deliveries may wait in a lane in any case."""
        self._max_inbox = max_inbox
        self._gate = gate
        self._sessions = sessions
        self._bodies = bodies
        self._limits = limits

    async def list(self, request: Request) -> Response:
        """One page of the deliveries of a session, newest first."""
        principal = await self._gate.admit(request)
        params = request.query_params
        session_id = known_id(request.path_params["session_id"])
        query = DeliveryQuery(
            session_id=(await self._sessions.get(session_id, principal)).session_id,
            status=one_of("status", get_args(DeliveryStatus), params.get("status")),
            limit=limit(params.get("limit")),
            cursor=params.get("cursor"),
        )
        deliveries, page = await self._sessions.inbox.list(query)
        listed: JsonObject = {"deliveries": [each.shown() for each in deliveries]}
        if page.next_cursor is not None:
            listed["nextCursor"] = page.next_cursor
        return reply(listed)

    async def lanes(self, request: Request) -> Response:
        """The lanes of a session, the main one first."""
        principal = await self._gate.admit(request)
        row = await self._sessions.get(known_id(request.path_params["session_id"]), principal)
        return reply({"lanes": [self._shown_lane(lane) for lane in await self._sessions.lanes.shown(row)]})

    async def configure_lane(self, request: Request) -> Response:
        """Set what holds for a lane of this session, in place of what its agent declares."""
        principal = await self._gate.admit(request)
        session_id, lane = known_id(request.path_params["session_id"]), request.path_params["lane"]
        # Whose session it is comes before what is asked of it.
        await self._sessions.get(session_id, principal)
        changes = await self._bodies.read(request, parse_lane_change)
        configured = await self._sessions.configure_lane(session_id, lane, principal=principal, **changes)
        return reply(self._shown_lane(configured))

    def _shown_lane(self, lane: ShownLane) -> JsonObject:
        place = {} if lane.row is None else {"sessionId": lane.row.session_id, "status": lane.row.shown_status}
        settings = {
            "mode": lane.settings.mode,
            "cap": lane.settings.room(self._max_inbox),
            "overflow": lane.settings.overflow,
        }
        return {"lane": lane.name, **place, "queued": lane.queued, **settings, "overrides": lane.overrides}

    async def show(self, request: Request) -> Response:
        """One delivery, at once or when it has come to its end."""
        delivery_id, principal = await self._named(request)
        seconds = waits(request.headers.get("prefer"))
        if not seconds:
            return _answer(await self._sessions.inbox.get(delivery_id, principal))
        delivery = await self._sessions.inbox.wait(delivery_id, principal, seconds)
        return _answer(delivery, {"preference-applied": f"wait={seconds}"})

    async def withdraw(self, request: Request) -> Response:
        """Take back a delivery that no turn has read."""
        return _answer(await self._sessions.inbox.withdraw(*await self._named(request)))

    async def edit(self, request: Request) -> Response:
        """Change a message that no turn has read: its content, its mode, its place in the queue."""
        delivery_id, principal = await self._named(request)
        version = _VERSION.fullmatch(request.headers.get("if-match", "").strip())

        def parse(fields: Fields) -> _Edit:
            edit = _Edit(message=parse_message(fields), mode=parse_queue_mode(fields), position=_position(fields))
            if not any(edit.values()):
                raise Invalid("Expected 'message', 'mode' or 'position'.")
            check_lane(fields)
            self._limits.check(DeliveryBody(message=edit["message"]))
            return edit

        edit = await self._bodies.read(request, parse)
        edits = None if version is None else int(version[1])
        return _answer(await self._sessions.inbox.edit(delivery_id, principal, edits, **edit))

    async def dispatch(self, request: Request) -> Response:
        """Hand work to a session of the caller, which is started if there is none."""
        principal = await self._gate.admit(request)
        key = idempotency_key(request)

        def parse(fields: Fields) -> tuple[str, str, Any, str | None, str, QueueMode | None]:
            agent, to, given = (fields.get(name) for name in ("agent", "id", "dispatchId"))
            if not isinstance(agent, str) or not isinstance(to, str):
                raise Invalid("Expected 'agent' and 'id' to be texts.")
            if "input" not in fields:
                raise Invalid("Expected 'input'; it may be null.")
            if given is not None and not isinstance(given, str):
                raise Invalid("Expected 'dispatchId' to be a text.")
            if None not in (given, key) and given != key:
                raise Invalid("'dispatchId' and Idempotency-Key differ: one of them is enough.")
            return agent, to, fields["input"], given or key, parse_lane(fields), parse_queue_mode(fields)

        agent, to, given, dispatch_id, lane, mode = await self._bodies.read(request, parse)
        target = self._sessions.instances.target(agent, to, principal)
        receipt = await self._sessions.dispatch(
            agent, target, given, dispatch_id=dispatch_id, principal=principal, lane=lane, queue_mode=mode
        )
        return reply(receipt.model_dump(mode="json"), 202, flags(deduplicated=receipt.deduplicated))

    async def _named(self, request: Request) -> tuple[str, Principal]:
        principal = await self._gate.admit(request)
        return known_id(request.path_params["delivery_id"], DeliveryNotFound), principal


def waits(preferences: str | None) -> int:
    """How many seconds the caller would wait. What is not understood is ignored, as preferences are."""
    found = None if preferences is None else _WAIT.fullmatch(preferences[:1_000])
    return 0 if found is None else min(_LONGEST, int(found[1]))


def _answer(delivery: Delivery, headers: dict[str, str] | None = None) -> Response:
    return reply(delivery.shown(), headers={"etag": f'"{delivery.row.edits}"', **(headers or {})})
