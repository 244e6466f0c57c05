"""A small HTTP caller of sessions."""

import asyncio
import json
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

import httpx2

from perdure.protocol.events import BOUNDARIES

Json = dict[str, Any]


class Talk:
    """One caller and one session. Remembers how much of the stream it has read, as the official client does."""

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, timeout: float = 120.0) -> None:
        # Nobody speaks TLS in the tests: to read the certificates of all authorities takes as long as several turns.
        self.http = httpx2.AsyncClient(base_url=url, headers=headers, timeout=httpx2.Timeout(timeout), verify=False)
        self.session_id = ""
        self.token = ""
        self.cursor = 0
        self._timeout = timeout

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def create(self, message: Any, **body: Any) -> Json:
        """Start a session."""
        answer = await self._post("/eve/v1/session", {"message": message, **body})
        self.session_id, self.token, self.cursor = answer["sessionId"], answer["continuationToken"], 0
        return answer

    async def send(self, message: Any = None, **body: Any) -> Json:
        """Deliver to the session."""
        content = {"continuationToken": self.token, **body, **({} if message is None else {"message": message})}
        return await self._post(f"/eve/v1/session/{self.session_id}", content)

    async def events(self, start: int = 0) -> AsyncGenerator[Json]:
        """The stream from an index on; it ends when the session does."""
        path = f"/eve/v1/session/{self.session_id}/stream"
        async with self.http.stream("GET", path, params={"startIndex": start}) as response:
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if line.strip():
                    yield json.loads(line)

    async def until_boundary(self, within: float | None = None) -> list[Json]:
        """The events from where we stopped reading to the next boundary."""
        events: list[Json] = []
        async with asyncio.timeout(within or self._timeout):
            stream = self.events(self.cursor)
            async for event in stream:
                events.append(event)
                self.cursor += 1
                if event["type"] in BOUNDARIES:
                    break
            await stream.aclose()
        return events

    async def until(self, type: str, start: int = 0, within: float | None = None) -> list[Json]:
        """The events from an index on to the first one of this type."""
        events: list[Json] = []
        async with asyncio.timeout(within or self._timeout):
            stream = self.events(start)
            async for event in stream:
                events.append(event)
                if event["type"] == type:
                    break
            await stream.aclose()
        return events

    async def say(self, message: Any, **body: Any) -> str:
        """Say something and return the answer, whether the session is new or not."""
        if self.session_id:
            await self.send(message, **body)
        else:
            await self.create(message, **body)
        return text(await self.until_boundary())

    async def _post(self, path: str, body: Json) -> Json:
        response = await self.http.post(path, json=body)
        assert response.is_success, f"{response.status_code}: {response.text}"
        return response.json()


def text(events: list[Json]) -> str:
    """What the model said last."""
    said = [event["data"].get("message") for event in events if event["type"] == "message.completed"]
    return said[-1] or "" if said else ""


def types(events: list[Json]) -> list[str]:
    return [event["type"] for event in events]
