"""The routes of an API."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from .errors import ClientError
from .events import Event, Json
from .session import AsyncSession, Place, cancel
from .stream import OnOutage
from .transport import ONCE, Key, Transport, list_in, own_key, segment, text_in

_BARE = "/eve/v1"


@dataclass(frozen=True)
class EventPage:
    """A page of events."""

    events: Sequence[Event]
    #: Whether more events fit what was asked for.
    has_more: bool
    #: The index of the last event of the session; None where the API does not say.
    tail: int | None


class AsyncClient:
    """A caller of one API.

    `key` is an API key or a token, sent as a bearer; a function gives that of the moment. Credentials in another form
    are `headers`, as `{"x-api-key": …}`. A request is tried again for `patience` seconds while the API is away, and a
    stream is connected again for `outage` seconds (None: for ever). `silence` is after how many seconds without a sign
    of life a stream counts as lost: an API gives one every ten. `on_outage` is called with the error when a stream is
    lost, and with None when it is back.
    """

    def __init__(
        self,
        host: str = "http://127.0.0.1:8000",
        *,
        key: Key = None,
        headers: Mapping[str, str] | None = None,
        patience: float = 30.0,
        outage: float | None = 600.0,
        silence: float = 35.0,
        verify: Any = True,
        on_outage: OnOutage | None = None,
    ) -> None:
        self._transport = Transport(host, key, headers, patience=patience, silence=silence, verify=verify)
        self._outage = outage
        self._on_outage = on_outage

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._transport.host}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.close()

    def session(self, state: Mapping[str, Any] | None = None, *, agent: str | None = None) -> AsyncSession:
        """A session: a new one of the default agent or of `agent`, or the one of a state.

        A state without a continuation token is that of the caller's own session, by its id.
        """
        return AsyncSession(self._place(agent), state)

    async def health(self) -> Json:
        """Whether the API answers; asked once, and without the key."""
        answer = await self._transport.send("GET", f"{_BARE}/health", tries=ONCE, anonymous=True)
        return answer.object

    async def info(self, agent: str | None = None) -> Json:
        """The agent: its model, instructions and tools."""
        return await self._transport.get(f"{self._place(agent).prefix}/info")

    async def cancel(self, session_id: str, turn_id: str | None = None) -> str:
        """Stop the turn of a session, or withdraw what it waits for: `accepted` or `no_active_turn`."""
        return await cancel(self._place(None), session_id, turn_id)

    # --- sessions -------------------------------------------------------------------------------------------

    async def sessions(self, *, limit: int | None = None, **filters: Any) -> AsyncGenerator[Json]:
        """The caller's sessions, newest first: all of them, or `limit`. Filters: `agent`, `status`, `mode`, `tag`, …"""
        async for each in self._pages("/v1/sessions", "sessions", filters, limit):
            yield each

    async def show(self, session_id: str) -> Json:
        """One session: its counts, what it waits for, its usage."""
        return await self._transport.get(f"/v1/sessions/{segment(session_id)}")

    async def why(self, session_id: str) -> Json:
        """Why a session does not move: `code`, `sentence`, and what belongs to it."""
        return await self._transport.get(f"/v1/sessions/{segment(session_id)}/why")

    async def events(self, session_id: str, **filters: Any) -> EventPage:
        """A page of the events of a session. Filters: `after`, `before`, `limit`, `order`, `types`, `turn`, ….

        A session's `events` has the live ones.
        """
        answer = await self._transport.send("GET", f"/v1/sessions/{segment(session_id)}/events", params=filters)
        tail = answer.headers.get("x-perdure-tail-index", "")
        events = [Event.of(each) for each in list_in(answer.object, "events")]
        return EventPage(events, bool(answer.object.get("hasMore")), int(tail) if tail.isdecimal() else None)

    # --- deliveries -----------------------------------------------------------------------------------------

    async def deliveries(
        self, session_id: str, *, status: str | None = None, limit: int | None = None
    ) -> AsyncGenerator[Json]:
        """What a session has accepted, newest first."""
        path = f"/v1/sessions/{segment(session_id)}/deliveries"
        async for each in self._pages(path, "deliveries", {"status": status}, limit):
            yield each

    async def delivery(self, delivery_id: str, *, wait: int | None = None) -> Json:
        """One delivery, at once or when it has come to its end, or after `wait` seconds."""
        headers = {} if wait is None else {"prefer": f"wait={wait}"}
        return (await self._transport.send("GET", f"/v1/deliveries/{segment(delivery_id)}", headers=headers)).object

    async def withdraw(self, delivery_id: str) -> Json:
        """Take back a message that no turn has read."""
        return (await self._transport.send("DELETE", f"/v1/deliveries/{segment(delivery_id)}")).object

    # --- input requests -------------------------------------------------------------------------------------

    async def inputs(self, *, limit: int | None = None, **filters: Any) -> AsyncGenerator[Json]:
        """The requests that the caller may answer, oldest first.

        Filters: `status` (`open` without it), `agent`, `kind`, `sessionId`.
        """
        async for each in self._pages("/v1/inputs", "inputs", filters, limit):
            yield each

    async def input(self, request_id: str) -> Json:
        """One request and its status."""
        return await self._transport.get(f"/v1/inputs/{segment(request_id)}")

    async def answer(
        self,
        request_id: str,
        option: str | None = None,
        *,
        text: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        reason: str | None = None,
        key: str | None = None,
    ) -> Json:
        """Answer a request as one of its responders, who need not own the session."""
        given = {"optionId": option, "text": text, "arguments": arguments, "reason": reason}
        body = {name: value for name, value in given.items() if value is not None}
        answer = await self._transport.send("POST", f"/v1/inputs/{segment(request_id)}", body=body, key=own_key(key))
        return answer.object

    # --- runs -----------------------------------------------------------------------------------------------

    async def runs(self, *, limit: int | None = None, **filters: Any) -> AsyncGenerator[Json]:
        """The caller's runs, newest first. Filters: `workflowName`, `status`."""
        async for each in self._pages("/runs", "runs", filters, limit):
            yield each

    async def run(self, run_id: str) -> Json:
        """The record of a run: its status, its result."""
        return await self._transport.get(f"/runs/{segment(run_id)}", {"meta": ""})

    async def start_run(self, name: str, input: Any = None, *, wait: bool = False, key: str | None = None) -> Json:
        """Start a run; with `wait`, its result if it comes within a minute."""
        params = {"wait": "result"} if wait else {}
        body: Any = {} if input is None else input
        path = f"/workflows/{segment(name)}"
        return (await self._transport.send("POST", path, params=params, body=body, key=own_key(key))).object

    async def cancel_run(self, run_id: str) -> str:
        """Stop a run: `accepted` or `no_active_run`."""
        answer = await self._transport.send("POST", f"/runs/{segment(run_id)}/cancel", key=own_key(None))
        return text_in(answer.object, "status")

    # --- everything else ------------------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        key: str | None = None,
    ) -> Any:
        """Any other route: the JSON of its response. What is no GET is tried again only with a `key`."""
        if not path.startswith("/"):
            raise ClientError("A path begins with '/'.", code="invalid")
        return (await self._transport.send(method, path, params=params, body=body, key=key)).value

    def _place(self, agent: str | None) -> Place:
        prefix = _BARE if agent is None else f"/agents/{segment(agent)}{_BARE}"
        return Place(self._transport, prefix, agent, self._outage, self._on_outage)

    async def _pages(self, path: str, name: str, filters: Mapping[str, Any], limit: int | None) -> AsyncGenerator[Json]:
        """All entries of a list, page by page."""
        params, left = dict(filters), limit
        while left is None or left > 0:
            page = await self._transport.get(path, {**params, "limit": None if left is None else min(left, 200)})
            entries = list_in(page, name)
            for each in entries:
                yield each
            cursor = page.get("nextCursor")
            if cursor is None or cursor == params.get("cursor"):
                return
            params["cursor"] = cursor
            left = None if left is None else left - len(entries)
