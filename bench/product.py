"""The product's client: posts over HTTP and reads the session's stream, as any user would."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any

from .http import Connection, Refused

_SESSIONS = "/eve/v1/session"


@dataclass(frozen=True)
class Turn:
    """Seconds from before the POST."""

    first_delta: float
    waiting: float


@dataclass(frozen=True)
class Asking:
    """A session that waits for an approval."""

    session_id: str
    token: str
    request_id: str


class ProductClient:
    """Starts sessions of the product and takes turns with them."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def session(self, message: str = "hello") -> "ProductSession":
        """A session whose first turn has ended, and its stream open."""
        posts, stream = await Connection.open(self._port), await Connection.open(self._port)
        started = await posts.post(_SESSIONS, {"message": message})
        session = ProductSession(posts, stream, started["sessionId"], started["continuationToken"])
        await session.waiting()
        return session

    async def grown(self, turns: int) -> tuple[str, str]:
        """The id and the token of a session that has had so many turns, without a reader."""
        session = await self.session()
        for _ in range(turns - 1):
            await session.turn()
        await session.close()
        return session.id, session.token

    async def again(self, session_id: str, token: str, *, turns: int) -> "ProductSession":
        """A session that has had so many turns, with connections of its own again: the API closes those that idle."""
        posts, stream = await Connection.open(self._port), await Connection.open(self._port)
        session = ProductSession(posts, stream, session_id, token)
        for _ in range(turns):
            await session.waiting()
        return session

    async def parked(self) -> str:
        """The id of a session that waits without a reader."""
        session = await self.session()
        await session.close()
        return session.id

    async def asking(self) -> Asking:
        """A session that waits for an approval, without a reader."""
        session = await self.session("ask")
        await session.close()
        (request_id,) = session.requests
        return Asking(session.id, session.token, request_id)

    async def approve(self, asking: Asking) -> float:
        """Seconds from before the answer until the turn that it caused ended."""
        session = await self.again(asking.session_id, asking.token, turns=1)
        begun = perf_counter()
        await session.post({"inputResponses": [{"requestId": asking.request_id, "optionId": "approve"}]})
        await session.waiting()
        ended = perf_counter()
        await session.close()
        return ended - begun


class ProductSession:
    """One session of the product; `turn` returns when its `session.waiting` was read from the stream."""

    def __init__(self, posts: Connection, stream: Connection, session_id: str, token: str) -> None:
        self.id = session_id
        self.token = token
        #: The ids of all that was asked.
        self.requests: list[str] = []
        #: How many events of each type there were.
        self.counts: Counter[str] = Counter()
        self._posts = posts
        self._stream = stream
        #: The text of each delta, and when it came, in seconds since the epoch.
        self.texts: list[tuple[float, str]] = []
        self._first_delta: float | None = None
        self._boundaries: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._following = asyncio.create_task(self._follow())

    async def turn(self, message: str = "hello") -> Turn:
        self._first_delta = None
        begun = perf_counter()
        await self.post({"message": message})
        await self.waiting()
        ended = perf_counter()
        return Turn(first_delta=(self._first_delta or ended) - begun, waiting=ended - begun)

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Deliver to it; the receipt."""
        return await self._posts.post(f"{_SESSIONS}/{self.id}", {"continuationToken": self.token, **body})

    async def waiting(self) -> None:
        """Wait for the end of a turn."""
        boundary = asyncio.ensure_future(self._boundaries.get())
        await asyncio.wait({boundary, self._following}, return_when=asyncio.FIRST_COMPLETED)
        if not boundary.done():
            boundary.cancel()
            raise Refused("the stream ended") from self._following.exception()
        if boundary.result()["type"] != "session.waiting":
            raise Refused(f"the session ended: {boundary.result()}")

    async def close(self) -> None:
        self._following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._following
        self._posts.close()
        self._stream.close()

    async def _follow(self) -> None:
        async for event in self._stream.events(f"{_SESSIONS}/{self.id}/stream?startIndex=0"):
            self.counts[event["type"]] += 1
            match event["type"]:
                case "message.appended":
                    self.texts.append((time(), event["data"]["messageDelta"]))
                    self._first_delta = self._first_delta or perf_counter()
                case "input.requested":
                    self.requests += [request["requestId"] for request in event["data"]["requests"]]
                case "turn.failed" | "step.failed":
                    raise Refused(f"a turn failed: {event}")
                case "session.waiting" | "session.failed" | "session.completed":
                    self._boundaries.put_nowait(event)
                case _:
                    pass
