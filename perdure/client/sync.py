"""The client for programs without an event loop: the same, in a thread of its own."""

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Self, TypeVar

from .client import AsyncClient, EventPage
from .errors import ClientError
from .events import Draft, Event, Json, Result
from .session import AsyncSession, AsyncTurn, Message
from .stream import OnOutage
from .transport import Key

_T = TypeVar("_T")


class _Loop:
    """An event loop in a thread, for callers in any other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name="perdure-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Have it done, and wait for it. An interrupt of the caller cancels it."""
        if os.getpid() != self._pid or self._loop.is_closed():
            work.close()
            # A thread does not survive a fork: its work would never be done.
            raise ClientError("This client was closed, or was made before a fork.", code="closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ClientError("The client was closed.", code="closed") from None
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[_T]) -> Generator[_T]:
        """The items one by one; what is left of them is dropped with the iterator."""

        async def next_item() -> tuple[_T] | None:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return None

        try:
            while (item := self.run(next_item())) is not None:
                yield item[0]
        finally:
            # Not waited for: the garbage collector may end this in any thread, also in that of the loop.
            if not self._loop.is_closed():
                asyncio.run_coroutine_threadsafe(_aclose(items), self._loop)

    def close(self) -> None:
        if self._loop.is_closed() or os.getpid() != self._pid:
            return
        self.run(self._rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _rest(self) -> None:
        """End what others still wait for: nobody would do it any more."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


async def _aclose(items: AsyncGenerator[Any]) -> None:
    await items.aclose()


class Client:
    """A caller of one API, for programs without an event loop. Threads may share it.

    The arguments are those of `AsyncClient`. Close it, or use it in a `with` statement.
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
        self._client = AsyncClient(
            host,
            key=key,
            headers=headers,
            patience=patience,
            outage=outage,
            silence=silence,
            verify=verify,
            on_outage=on_outage,
        )
        self._loop = _Loop()

    def __repr__(self) -> str:
        return repr(self._client).replace("AsyncClient", type(self).__name__)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. What other threads still wait for is cancelled."""
        try:
            self._loop.run(self._client.aclose())
        except ClientError:
            return
        self._loop.close()

    def session(self, state: Mapping[str, Any] | None = None, *, agent: str | None = None) -> "Session":
        """A session: a new one of the default agent or of `agent`, or the one of a state."""
        return Session(self._loop, self._client.session(state, agent=agent))

    def health(self) -> Json:
        """Whether the API answers; asked once, and without the key."""
        return self._loop.run(self._client.health())

    def info(self, agent: str | None = None) -> Json:
        """The agent: its model, instructions and tools."""
        return self._loop.run(self._client.info(agent))

    def cancel(self, session_id: str, turn_id: str | None = None) -> str:
        """Stop the turn of a session, or withdraw what it waits for: `accepted` or `no_active_turn`."""
        return self._loop.run(self._client.cancel(session_id, turn_id))

    def sessions(self, *, limit: int | None = None, **filters: Any) -> Iterator[Json]:
        """The caller's sessions, newest first."""
        return self._loop.iterate(self._client.sessions(limit=limit, **filters))

    def show(self, session_id: str) -> Json:
        """One session: its counts, what it waits for, its usage."""
        return self._loop.run(self._client.show(session_id))

    def why(self, session_id: str) -> Json:
        """Why a session does not move: `code`, `sentence`, and what belongs to it."""
        return self._loop.run(self._client.why(session_id))

    def events(self, session_id: str, **filters: Any) -> EventPage:
        """A page of the events of a session."""
        return self._loop.run(self._client.events(session_id, **filters))

    def deliveries(self, session_id: str, *, status: str | None = None, limit: int | None = None) -> Iterator[Json]:
        """What a session has accepted, newest first."""
        return self._loop.iterate(self._client.deliveries(session_id, status=status, limit=limit))

    def delivery(self, delivery_id: str, *, wait: int | None = None) -> Json:
        """One delivery, at once or when it has come to its end, or after `wait` seconds."""
        return self._loop.run(self._client.delivery(delivery_id, wait=wait))

    def withdraw(self, delivery_id: str) -> Json:
        """Take back a message that no turn has read."""
        return self._loop.run(self._client.withdraw(delivery_id))

    def inputs(self, *, limit: int | None = None, **filters: Any) -> Iterator[Json]:
        """The requests that the caller may answer, oldest first."""
        return self._loop.iterate(self._client.inputs(limit=limit, **filters))

    def input(self, request_id: str) -> Json:
        """One request and its status."""
        return self._loop.run(self._client.input(request_id))

    def answer(
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
        given = self._client.answer(request_id, option, text=text, arguments=arguments, reason=reason, key=key)
        return self._loop.run(given)

    def runs(self, *, limit: int | None = None, **filters: Any) -> Iterator[Json]:
        """The caller's runs, newest first."""
        return self._loop.iterate(self._client.runs(limit=limit, **filters))

    def run(self, run_id: str) -> Json:
        """The record of a run: its status, its result."""
        return self._loop.run(self._client.run(run_id))

    def start_run(self, name: str, input: Any = None, *, wait: bool = False, key: str | None = None) -> Json:
        """Start a run; with `wait`, its result if it comes within a minute."""
        return self._loop.run(self._client.start_run(name, input, wait=wait, key=key))

    def cancel_run(self, run_id: str) -> str:
        """Stop a run: `accepted` or `no_active_run`."""
        return self._loop.run(self._client.cancel_run(run_id))

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        key: str | None = None,
    ) -> Any:
        """Any other route: the JSON of its response."""
        return self._loop.run(self._client.request(method, path, params=params, body=body, key=key))


class Session:
    """One session, as `AsyncSession`."""

    def __init__(self, loop: _Loop, session: AsyncSession) -> None:
        self._loop = loop
        self._session = session

    @property
    def id(self) -> str | None:
        """Of the last session; None before its first message."""
        return self._session.id

    @property
    def state(self) -> Json:
        """What continues the session, in this process, another one, or the official client. It has a secret."""
        return self._session.state

    def __repr__(self) -> str:
        return repr(self._session).replace("AsyncSession", type(self).__name__)

    def send(
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
    ) -> "Turn":
        """Deliver a message, or answers, or both; the turn is that which reads them."""
        turn = self._session.send(
            message,
            input_responses=input_responses,
            key=key,
            client_context=client_context,
            output_schema=output_schema,
            mode=mode,
            lane=lane,
            **fields,
        )
        return Turn(self._loop, self._loop.run(turn))

    def events(self, start: int | None = None) -> Generator[Event]:
        """The events from an index on, or from where the last turn was read to, then live, until the session ends."""
        return self._loop.iterate(self._session.events(start))

    def cancel(self, turn_id: str | None = None) -> str:
        """Stop the turn, or withdraw what it waits for: `accepted` or `no_active_turn`."""
        return self._loop.run(self._session.cancel(turn_id))


class Turn:
    """The turn that reads a delivery: an iterator of its events, up to the boundary that ends it."""

    def __init__(self, loop: _Loop, turn: AsyncTurn) -> None:
        self._loop = loop
        self._turn = turn
        # An event that has come when its reader was interrupted is for the next one.
        self._arrived: deque[Event | None] = deque()

    @property
    def session_id(self) -> str:
        """Of the session that runs it: of a lane, that of the lane."""
        return self._turn.session_id

    @property
    def delivery_id(self) -> str | None:
        """None for an answer that was given as a responder, and for one that does not count yet."""
        return self._turn.delivery_id

    @property
    def inputs(self) -> Sequence[Json]:
        """The status of each request that was answered with it."""
        return self._turn.inputs

    @property
    def draft(self) -> Draft:
        """What it has said so far."""
        return self._turn.draft

    def __repr__(self) -> str:
        return repr(self._turn).replace("AsyncTurn", type(self).__name__)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        async def fetch() -> None:
            self._arrived.append(await anext(self._turn, None))

        while True:
            try:
                event = self._arrived.popleft()
            except IndexError:
                self._loop.run(fetch())
                continue
            if event is None:
                raise StopIteration
            return event

    def result(self) -> Result:
        """Read it to its end; what became of it."""
        return self._loop.run(self._turn.result())

    def cancel(self) -> str:
        """Stop it: `accepted` or `no_active_turn`."""
        return self._loop.run(self._turn.cancel())

    def close(self) -> None:
        """Read no further. The turn itself goes on."""
        self._loop.run(self._turn.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
