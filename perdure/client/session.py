"""A session of the caller, and its turns."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from .errors import NO_BOUNDARY, UNREADABLE, ClientError
from .events import BOUNDARIES, TERMINAL, Draft, Event, Json, Result
from .stream import OnOutage, Outages, read_events
from .transport import Answer, Transport, Tries, list_in, own_key, segment, text_in

#: Text, or parts: `{"type": "text", "text"}` and `{"type": "file", "mediaType", "data", "filename"?}`.
Message: TypeAlias = str | Sequence[Mapping[str, Any]]

#: Answers close requests for which people have decided: an API that is away for a moment must not lose them.
_ANSWERS = Tries(least=10, pause=0.2)
#: Events that are looked through for the place of an answer that was given before.
_PAGE = 1000


@dataclass(frozen=True)
class Receipt:
    """What the API has accepted."""

    session_id: str
    delivery_id: str | None
    #: The status of each request that was answered.
    inputs: Sequence[Json]
    #: The requests whose closing is waited for: answers without a delivery of which we know.
    request_ids: frozenset[str] = frozenset()

    @property
    def leads_to_a_turn(self) -> bool:
        """Answers that do not count yet, because others must agree, begin no turn."""
        return self.delivery_id is not None or bool(self.request_ids) or not self.inputs


@dataclass(frozen=True)
class Place:
    """Where sessions are: their API, the prefix of their routes, and what is done when a stream is lost."""

    transport: Transport
    prefix: str
    agent: str | None
    outage: float | None
    on_outage: OnOutage | None

    def outages(self) -> Outages:
        return Outages(self.on_outage, self.outage)


class AsyncSession:
    """One session: what is needed to continue it, and how far its events were read.

    Read each turn to its end before the next message is sent. Otherwise the next turn begins with the rest of it.
    """

    def __init__(self, place: Place, state: Mapping[str, Any] | None = None) -> None:
        self._place = place
        self._token, self._id, self._cursor = _state(state or {})
        #: Of the last session, also after its end.
        self._last_id = self._id
        # Of the lanes, whose events are streams of their own.
        self._lanes: dict[str, int] = {}

    @property
    def id(self) -> str | None:
        """Of the last session; None before its first message."""
        return self._last_id

    @property
    def state(self) -> Json:
        """What continues the session, in this process, another one, or the official client. It has a secret."""
        known = {"continuationToken": self._token, "sessionId": self._id}
        return {**{name: value for name, value in known.items() if value}, "streamIndex": self._cursor}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._last_id or 'new'} at {self._cursor}>"

    async def send(
        self,
        message: Message | None = None,
        *,
        input_responses: Sequence[Mapping[str, Any]] = (),
        key: str | None = None,
        client_context: str | Sequence[str] | Mapping[str, Any] | None = None,
        output_schema: Mapping[str, Any] | None = None,
        mode: str | None = None,
        lane: str | None = None,
        **fields: Any,
    ) -> "AsyncTurn":
        """Deliver a message, or answers, or both; the turn is that which reads them.

        The first message starts the session. `key` is the `Idempotency-Key`: the same content under the same key is
        accepted once, however often it is sent. Without it each call has its own. `fields` are the other fields of the
        routes, as `tags` or `deadline`, with the names of the wire.
        """
        if message is None and not input_responses:
            raise ClientError("Give a message, input responses, or both.", code="invalid")
        given = {
            "message": message,
            "inputResponses": list(input_responses) or None,
            "clientContext": client_context,
            "outputSchema": output_schema,
            "mode": mode,
            "lane": lane,
            **fields,
        }
        body = {name: value for name, value in given.items() if value is not None}
        key = own_key(key)
        if self._id is None:
            return await self._start(body, key)
        if self._token is None:
            return await self._send_as_owner(body, key)
        return await self._continue(body, key)

    def events(self, start: int | None = None) -> AsyncGenerator[Event]:
        """The events from an index on, or from where the last turn was read to, then live, until the session ends."""
        return self._place.transport.ending(self._events(start))

    async def _events(self, start: int | None) -> AsyncGenerator[Event]:
        if self._last_id is None:
            raise ClientError("The session has not begun.", code="invalid")
        begin = self._cursor if start is None else start
        found = read_events(self._place.transport, self._place.prefix, self._last_id, begin, self._place.outages())
        async with aclosing(found) as events:
            async for event in events:
                self.advance(self._last_id, event)
                yield event

    async def cancel(self, turn_id: str | None = None) -> str:
        """Stop the turn, or withdraw what it waits for: `accepted` or `no_active_turn`."""
        if self._last_id is None:
            raise ClientError("The session has not begun.", code="invalid")
        return await cancel(self._place, self._last_id, turn_id)

    def advance(self, session_id: str, event: Event) -> None:
        """Count an event as read."""
        if event.index is None:
            return
        if session_id != self._id:
            if session_id in self._lanes:
                self._lanes[session_id] = max(self._lanes[session_id], event.index + 1)
            return
        self._cursor = max(self._cursor, event.index + 1)
        if event.type in TERMINAL:
            # As the official client does: nothing continues this session, and the next message starts another one.
            self._token, self._id, self._cursor = None, None, 0

    # --- ways to deliver ------------------------------------------------------------------------------------

    async def _start(self, body: Json, key: str) -> "AsyncTurn":
        if "message" not in body:
            raise ClientError("A session begins with a message.", code="invalid")
        answer = await self._post(f"{self._place.prefix}/session", body, key)
        receipt = _receipt(answer, None)
        self._token, self._id, self._cursor = answer.value.get("continuationToken"), receipt.session_id, 0
        self._last_id = self._id
        return AsyncTurn(self, self._place, receipt, 0)

    async def _continue(self, body: Json, key: str) -> "AsyncTurn":
        path = f"{self._place.prefix}/session/{segment(cast('str', self._id))}"
        answer = await self._post(path, {"continuationToken": self._token, **body}, key)
        receipt = _receipt(answer, self._id)
        self._token = answer.value.get("continuationToken") or self._token
        return await self._turn(receipt, key, replayed=answer.replayed)

    async def _send_as_owner(self, body: Json, key: str) -> "AsyncTurn":
        """The owner needs no token: a message is handed over as a dispatch, and an answer as any responder gives it."""
        transport, session_id = self._place.transport, cast("str", self._id)
        if body.keys() <= {"message", "mode", "lane"} and isinstance(body.get("message"), str):
            shown = await transport.get(f"/v1/sessions/{segment(session_id)}")
            how = {name: body[name] for name in ("mode", "lane") if name in body}
            work = {"agent": text_in(shown, "agent"), "id": session_id, "input": body["message"], **how}
            answer = await self._post("/v1/dispatches", work, key)
            receipt = _receipt(answer, session_id)
        elif body.keys() == {"inputResponses"} and len(body["inputResponses"]) == 1:
            response = dict(body["inputResponses"][0])
            request_id = str(response.pop("requestId", ""))
            answer = await self._post(f"/v1/inputs/{segment(request_id)}", response, key, _ANSWERS)
            closed = {request_id} if answer.value.get("status") != "open" else set[str]()
            receipt = Receipt(session_id, None, [answer.value], frozenset(closed))
        else:
            raise ClientError("Without its continuation token a session takes a text, or one answer.", code="invalid")
        return await self._turn(receipt, key, replayed=answer.replayed)

    async def _turn(self, receipt: Receipt, key: str, *, replayed: bool) -> "AsyncTurn":
        try:
            return AsyncTurn(self, self._place, receipt, await self._begin(receipt, replayed=replayed))
        except ClientError as error:
            # It is accepted: who sends it again needs the key.
            error.key = key
            raise

    async def _post(self, path: str, body: Json, key: str, tries: Tries | None = None) -> Answer:
        tries = tries or (_ANSWERS if "inputResponses" in body else None)
        answer = await self._place.transport.send("POST", path, body=body, key=key, tries=tries)
        if not isinstance(answer.value, dict):
            raise ClientError("The response to a delivery is no object.", code=UNREADABLE, key=key)
        return answer

    async def _begin(self, receipt: Receipt, *, replayed: bool) -> int:
        """The index from which the turn is read: what is not read yet of the session, or of its lane.

        What was accepted under the same key before may be behind us.
        """
        is_lane = receipt.session_id != self._id
        start = self._lanes.setdefault(receipt.session_id, 0) if is_lane else self._cursor
        if not replayed:
            return start
        path = f"/v1/sessions/{segment(receipt.session_id)}/events"
        if receipt.delivery_id is not None:
            page = await self._place.transport.get(path, {"deliveryId": receipt.delivery_id, "limit": 1})
            found = [Event.of(each).index for each in list_in(page, "events")]
        else:
            params = {"types": "input.resolved", "order": "desc", "limit": _PAGE}
            page = await self._place.transport.get(path, params)
            events = [Event.of(each) for each in list_in(page, "events")]
            found = [each.index for each in events if each.data.get("requestId") in receipt.request_ids]
        return min([start, *(index for index in found if index is not None)])


class AsyncTurn:
    """The turn that reads a delivery: an iterator of its events, up to the boundary that ends it.

    It is read once. When it is left in the middle, by an exception or a timeout, it can be read on.
    """

    def __init__(self, session: AsyncSession, place: Place, receipt: Receipt, start: int) -> None:
        self._session = session
        self._place = place
        self._receipt = receipt
        self._next = start
        self._draft = Draft()
        self._seen: set[str] = set()
        self._ours = receipt.delivery_id is None and not receipt.request_ids
        self._result: Result | None = None
        if not receipt.leads_to_a_turn:
            # Others must agree first: no turn begins, and there is nothing to wait for.
            self._result = Result("waiting", None, None, [], {}, None, receipt.session_id, None, None)
        self._closed = False
        # The last event, until a reader has it.
        self._last: Event | None = None
        self._reading: AsyncGenerator[Event] | None = None
        self._lock = asyncio.Lock()

    @property
    def session_id(self) -> str:
        """Of the session that runs it: of a lane, that of the lane."""
        return self._receipt.session_id

    @property
    def delivery_id(self) -> str | None:
        """None for an answer that was given as a responder, and for one that does not count yet."""
        return self._receipt.delivery_id

    @property
    def inputs(self) -> Sequence[Json]:
        """The status of each request that was answered with it."""
        return self._receipt.inputs

    @property
    def draft(self) -> Draft:
        """What it has said so far."""
        return self._draft

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.session_id}, delivery {self.delivery_id}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        async with self._lock:
            if self._closed and self._result is None:
                raise ClientError("The turn was closed before its end.", code="closed")
            while self._result is None:
                if self._reading is None:
                    self._reading = self._place.transport.ending(self._read())
                try:
                    event = await anext(self._reading)
                    if self._result is None:
                        return event
                    self._last = event
                    # Who has the last event may never ask for another one. Who is interrupted here asks for it again.
                    await self._reading.aclose()
                    self._reading = None
                except StopAsyncIteration:
                    # Of a turn that was left in the middle it is the end of this reader only.
                    self._reading = None
                except BaseException:
                    self._reading = None
                    raise
            if self._last is None:
                raise StopAsyncIteration
            event, self._last = self._last, None
            return event

    async def result(self) -> Result:
        """Read it to its end; what became of it."""
        async for _ in self:
            pass
        assert self._result is not None, "a turn ends with its result"
        return self._result

    async def cancel(self) -> str:
        """Stop it: `accepted` or `no_active_turn`."""
        return await cancel(self._place, self.session_id, self._draft.turn_id)

    async def aclose(self) -> None:
        """Read no further. The turn itself goes on."""
        self._closed = True
        if self._reading is not None:
            await self._reading.aclose()
            self._reading = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _read(self) -> AsyncGenerator[Event]:
        place = self._place
        found = read_events(place.transport, place.prefix, self.session_id, self._next, place.outages())
        async with aclosing(found) as events:
            async for event in events:
                await self._take(event)
                yield event
                if self._result is not None:
                    return
        raise ClientError("The session has ended, and the turn has no boundary.", code=NO_BOUNDARY)

    async def _take(self, event: Event) -> None:
        """Count the event as read, and see whether it ends the turn."""
        self._draft.add(event)
        self._ours = self._ours or self._is_about_ours(event)
        if isinstance(turn := event.data.get("turnId"), str):
            self._seen.add(turn)
        if self._is_refusal(event):
            error = {"code": event.data.get("code"), "message": event.data.get("message")}
            self._result = Result("refused", None, None, [], {}, error, self.session_id, None, event.type)
        elif event.type in BOUNDARIES:
            if event.type in TERMINAL or self._ours or await self._was_read():
                self._result = self._draft.result(self.session_id, event.type)
            else:
                # It ends a turn before ours.
                self._draft = Draft()
        # At the end: a reader that is interrupted above gets the event again.
        if event.index is not None:
            self._next = event.index + 1
        self._session.advance(self.session_id, event)

    def _is_about_ours(self, event: Event) -> bool:
        """Whether the event says that a turn has read the delivery, or the answers."""
        if event.type == "input.resolved":
            return event.data.get("requestId") in self._receipt.request_ids
        return self.delivery_id is not None and self.delivery_id in event.delivery_ids

    def _is_refusal(self, event: Event) -> bool:
        return event.type == "delivery.refused" and event.data.get("deliveryId") == self.delivery_id is not None

    async def _was_read(self) -> bool:
        """Whether a turn that we have seen has read the delivery: not all events name what they are about."""
        if self.delivery_id is None:
            return False
        outages = self._place.outages()
        while True:
            try:
                found = await self._place.transport.get(f"/v1/deliveries/{segment(self.delivery_id)}")
                break
            except ClientError as error:
                if not error.passing:
                    # An API that does not know the route, or the delivery any more: then this boundary is the one.
                    return True
                await outages.wait(error)
        if found.get("status") == "queued":
            return False
        turns = {found.get("turnId"), found.get("answeredByTurn")} - {None}
        return not turns or not turns.isdisjoint(self._seen)


async def cancel(place: Place, session_id: str, turn_id: str | None) -> str:
    """Stop a turn. Repeated only when it is named: another one may have begun meanwhile."""
    body, key = ({}, None) if turn_id is None else ({"turnId": turn_id}, own_key(None))
    answer = await place.transport.send(
        "POST", f"{place.prefix}/session/{segment(session_id)}/cancel", body=body, key=key
    )
    return text_in(answer.object, "status")


def _state(state: Mapping[str, Any]) -> tuple[str | None, str | None, int]:
    token, known, index = (state.get(name) for name in ("continuationToken", "sessionId", "streamIndex"))
    texts = all(each is None or isinstance(each, str) for each in (token, known))
    if not texts or not isinstance(index or 0, int) or (index or 0) < 0:
        raise ClientError("Expected the state of a session: sessionId, continuationToken, streamIndex.", code="invalid")
    # Without a session there is nothing that a token continues.
    return (token, known, index or 0) if known else (None, None, 0)


def _receipt(answer: Answer, session_id: str | None) -> Receipt:
    value = answer.object
    found = value.get("sessionId") or answer.headers.get("x-eve-session-id") or session_id
    if not isinstance(found, str):
        raise ClientError("The response to a delivery names no session.", code=UNREADABLE)
    inputs = cast("list[Json]", value.get("inputs") or [])
    return Receipt(found, value.get("deliveryId"), inputs)
