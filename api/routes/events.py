"""Reading a session's events: live as NDJSON or as server-sent events, or a page of them."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.requests import Scopes, between, known_id, one_of, turn
from api.responses import NO_STORE
from api.stream.broadcast import Broadcasts
from api.stream.faces import Face, Filter, Ndjson, ServerSentEvents
from api.stream.ndjson import NdjsonLines
from api.stream.response import EventStream, LiveResponse, WholeStream
from perdure.errors import Invalid
from perdure.protocol.events import TERMINAL, Event
from perdure.protocol.stream_policy import StreamPolicy
from perdure.runtime.sessions import Sessions
from perdure.store.base import Store
from perdure.store.values import EventQuery, SessionRow

_INTEGER_PREFIX = re.compile(r"\s*([+-]?[0-9]{1,16})(?![0-9])")
_LARGEST = 2**53 - 1

#: Events of a page: at most, and without a limit of the caller. A page of large events ends sooner, by its bytes.
_MOST = 1000
_FEW = 100
_MOST_BYTES = 4_194_304
#: Events that are read at a time.
_READ = 50
#: Events on each side of the one that `around` names, without and with the caller's `window`.
_WINDOW = 20
_WIDEST = 500
#: The most types that a filter names.
_MOST_TYPES = 50


class EventRoutes:
    """Reading a session's events."""

    def __init__(self, gate: Gate, scopes: Scopes, sessions: Sessions, store: Store, broadcasts: Broadcasts) -> None:
        self._gate = gate
        self._scopes = scopes
        self._sessions = sessions
        self._store = store
        self._broadcasts = broadcasts

    @property
    def policy(self) -> StreamPolicy:
        """What readers of events do not see."""
        return self._broadcasts.policy

    async def ndjson(self, request: Request) -> Response:
        """Every event from `startIndex` on as a line of JSON, then live ones, until the session ends."""
        self._scopes.agent(request)
        principal = await self._gate.admit(request)
        given, follow = request.query_params.getlist("startIndex"), request.query_params.get("follow")
        if follow is None:
            start = start_index(given)
            return await self._stream(request, await self._scopes.member(request, principal), start, Ndjson())
        one_of("follow", ("true", "false"), follow)
        row = await self._scopes.member(request, principal)
        start = from_tail(given, row)
        return await self._stream(request, row, start, Ndjson(), None if follow == "true" else row.events)

    async def _stream(
        self, request: Request, row: SessionRow, start: int, face: Face, until: int | None = None
    ) -> LiveResponse:
        """The events; with `events=all`, also what happens beside them."""
        if one_of("events", ("log", "all"), request.query_params.get("events")) == "all":
            # It reads the log, which may have more events after the one that ends the session.
            end = await self._end(row) if row.ended else until
            until = end if until is None or end is None else min(until, end)
            return WholeStream(self._broadcasts, self._store, row, start, face, until)
        return EventStream(self._broadcasts, row, start, face, until)

    async def sse(self, request: Request) -> Response:
        """The events as server-sent events, for `EventSource`."""
        principal = await self._gate.admit(request)
        params = request.query_params
        wanted = Filter(types=frozenset(types(params, "types")), exclude=frozenset(types(params, "exclude")))
        # A browser repeats the URL when it connects again: how far it has read is in the header then.
        after = whole_number("Last-Event-ID", request.headers.get("last-event-id"))
        if after is None:
            after = whole_number("after", params.get("after"))
        row = await self._sessions.get(known_id(request.path_params["session_id"]), principal)
        if after is not None and row.ended and await self._has_ended_by(row, after):
            # Anything else would make `EventSource` connect again, for ever.
            return Response(status_code=204, headers=NO_STORE)
        pace = self._broadcasts.pace
        face = ServerSentEvents(wanted, every=pace.comment, lifetime=random.uniform(*pace.lifetime))
        return await self._stream(request, row, 0 if after is None else after + 1, face)

    async def list(self, request: Request) -> Response:
        """One page of events."""
        principal = await self._gate.admit(request)
        query = event_query(request.query_params)
        row = await self._sessions.get(known_id(request.path_params["session_id"]), principal)
        # Readers of a stream do not see what follows its end, either.
        query = replace(query, before=min(query.before, await self._end(row)))
        excluded = {*query.exclude, *self._broadcasts.policy.exclude}
        lines, more = await self._page(row, replace(query, exclude=sorted(excluded)))
        body = b'{"events":[%s],"hasMore":%s}' % (b",".join(lines), b"true" if more else b"false")
        headers = {**NO_STORE, "x-perdure-tail-index": str(row.events - 1)}
        return Response(body, headers=headers, media_type="application/json; charset=utf-8")

    async def _end(self, row: SessionRow) -> int:
        """The index after the last event that readers see."""
        if not row.ended:
            return row.events
        query = EventQuery(types=sorted(TERMINAL), back=True, limit=1)
        found = await self._store.find_events(row.session_id, query)
        return found[0].index + 1 if found else row.events

    async def _has_ended_by(self, row: SessionRow, index: int) -> bool:
        return index + 1 >= await self._end(row)

    async def _page(self, row: SessionRow, query: EventQuery) -> tuple[Sequence[bytes], bool]:
        """The events as JSON, and whether there are more."""
        lines: list[bytes] = []
        size, wanted = 0, replace(query, limit=_READ)
        while True:
            found = await self._store.find_events(row.session_id, wanted)
            for line in await self._encode(row.session_id, found, back=query.back):
                if len(lines) == query.limit or size > _MOST_BYTES:
                    return lines, True
                lines.append(line)
                size += len(line)
            if len(found) < _READ:
                return lines, False
            last = found[-1].index
            wanted = replace(wanted, before=last) if query.back else replace(wanted, after=last)

    async def _encode(self, session_id: str, events: Sequence[Event], *, back: bool) -> Sequence[bytes]:
        # A delta gets the text so far, so it is encoded after those before it.
        encoder = NdjsonLines(self._store, session_id, self._broadcasts.policy)
        lines = [(await encoder.line(event)).rstrip(b"\n") for event in (reversed(events) if back else events)]
        return lines[::-1] if back else lines


def event_query(params: QueryParams) -> EventQuery:
    query = EventQuery(
        types=types(params, "types"),
        exclude=types(params, "exclude"),
        turn=turn(params.get("turn")),
        attempt=whole_number("attempt", params.get("attempt")),
        delivery_id=_delivery_id(params.get("deliveryId")),
        back=one_of("order", ("asc", "desc"), params.get("order")) == "desc",
        limit=between("limit", params.get("limit"), 1, _MOST, _FEW),
    )
    after, before = whole_number("after", params.get("after")), whole_number("before", params.get("before"))
    around = whole_number("around", params.get("around"))
    if around is None:
        if "window" in params:
            raise Invalid("Expected 'window' together with 'around'.")
        return replace(query, after=-1 if after is None else after, before=_LARGEST if before is None else before)
    if after is not None or before is not None or "limit" in params:
        raise Invalid("Expected 'around' without 'after', 'before' and 'limit'.")
    window = between("window", params.get("window"), 0, _WIDEST, _WINDOW)
    return replace(query, after=around - window - 1, before=around + window + 1, limit=2 * window + 1)


def types(params: QueryParams, name: str) -> Sequence[str]:
    """The types of a filter: the parameter may be repeated, and each may name several, separated by commas."""
    found = [type for given in params.getlist(name) for type in given.split(",")]
    if len(found) > _MOST_TYPES or not all(0 < len(type) <= 100 and type.isprintable() for type in found):
        raise Invalid(f"Expected '{name}' to be 1 to {_MOST_TYPES} types of events.")
    return found


def start_index(given: list[str]) -> int:
    """The leading integer of the first value: `3.7` is 3 and `2x` is 2."""
    number = _leading_integer(given)
    if not 0 <= number <= _LARGEST:
        raise Invalid("Expected startIndex to be a non-negative integer.")
    return number


def from_tail(given: list[str], row: SessionRow) -> int:
    """The same, where a negative number counts from the tail: -1 is the last event that there is now."""
    number = _leading_integer(given)
    if not -_LARGEST <= number <= _LARGEST or (given and _INTEGER_PREFIX.match(given[0]) is None):
        raise Invalid("Expected startIndex to be an integer.")
    return number if number >= 0 else max(0, row.events + number)


def _leading_integer(given: list[str]) -> int:
    if not given:
        return 0
    found = _INTEGER_PREFIX.match(given[0])
    return int(found[1]) if found else -1


def whole_number(name: str, given: str | None) -> int | None:
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) <= 16 and int(given) < _LARGEST):
        raise Invalid(f"Expected '{name}' to be a non-negative integer.")
    return int(given)


def _delivery_id(given: str | None) -> str | None:
    if given is not None and not (given.isascii() and given.isprintable() and len(given) <= 200):
        raise Invalid("Expected 'deliveryId' to be the id of a delivery.")
    return given
