"""A client that retries: it sends again what was not answered, and reads again where its stream broke."""

import asyncio
import random

import httpx2

from tests.support.chaos.evidence import Json
from tests.support.chaos.world import Caller, World, unique
from tests.support.talk import text

# What makes a client try again.
_AGAIN = (502, 503, 504)


class RetryingCaller:
    """One caller and one session, over whichever APIs live at the moment."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._world = world
        self._chance = chance
        self._session = world.caller()

    async def say(self, message: str, within: float = 180.0) -> str:
        """Say it once, however often it has to be sent; the answer."""
        async with asyncio.timeout(within):
            await self._send(message)
            return text(await self._until_boundary())

    async def _send(self, message: str) -> None:
        key = unique("key")
        while True:
            async with self._caller() as caller:
                caller.http.headers["idempotency-key"] = key
                try:
                    await (caller.send if caller.session_id else caller.create)(message)
                except (httpx2.HTTPError, TryAgain):
                    await asyncio.sleep(0.1)
                    continue
            self._session = caller
            return

    async def _until_boundary(self) -> list[Json]:
        while True:
            async with self._caller() as caller:
                try:
                    events = await caller.until_boundary()
                except (httpx2.HTTPError, TryAgain):
                    await asyncio.sleep(0.1)
                    continue
            self._session = caller
            return events

    def _caller(self) -> "_Caller":
        caller = _Caller(self._chance.choice(self._world.living_apis), self._world.receipts)
        known = self._session
        caller.session_id, caller.token, caller.cursor = known.session_id, known.token, known.cursor
        return caller


class TryAgain(Exception):
    """The server asks for it."""


class _Caller(Caller):
    """Distinguishes "try again" from what is wrong."""

    def __init__(self, url: str, receipts: list[tuple[str, str]]) -> None:
        super().__init__(url, receipts)
        self.http.event_hooks["response"].append(_raise_if_transient)


async def _raise_if_transient(response: httpx2.Response) -> None:
    if response.status_code in _AGAIN:
        raise TryAgain
