"""A client that does not give up: it sends again what was not answered, and reads on where its stream broke."""

import asyncio

import httpx2

from tests.support.talk import text

from .evidence import Json
from .world import Voice, World, unique

# What tells a client to try again.
_AGAIN = (500, 502, 503, 504)


class Stubborn:
    """One caller and one session, over whichever APIs live at the moment."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._voice: Voice | None = None
        self._cursor = 0
        self.session_id = ""
        self._token = ""

    async def say(self, message: str, within: float = 90.0) -> str:
        """Say it once, however often it has to be sent; the answer."""
        async with asyncio.timeout(within):
            await self._send(message)
            return text(await self._until_boundary())

    async def _send(self, message: str) -> None:
        key = unique("key")
        path, body = "/eve/v1/session", {"message": message}
        if self.session_id:
            path, body = f"{path}/{self.session_id}", {**body, "continuationToken": self._token}
        while True:
            async with self._world.voice() as voice:
                try:
                    answer = await voice.http.post(path, json=body, headers={"idempotency-key": key})
                except httpx2.HTTPError:
                    await asyncio.sleep(0.1)
                    continue
            if answer.status_code not in _AGAIN:
                break
            await asyncio.sleep(0.1)
        assert answer.is_success, f"{answer.status_code}: {answer.text}"
        receipt = answer.json()
        self._world.receipts.append((receipt["sessionId"], receipt["deliveryId"]))
        self.session_id = receipt["sessionId"]
        self._token = receipt.get("continuationToken") or self._token

    async def _until_boundary(self) -> list[Json]:
        heard: list[Json] = []
        while True:
            try:
                async with self._world.voice() as voice:
                    voice.session_id, voice.cursor = self.session_id, self._cursor
                    async for event in voice.reading():
                        assert event["meta"]["id"] == f"{self.session_id}:{self._cursor}"
                        self._cursor += 1
                        heard.append(event)
                    if heard and heard[-1]["type"].startswith("session.") and heard[-1]["type"] != "session.started":
                        return heard
            except httpx2.HTTPError:
                await asyncio.sleep(0.1)
