"""What an operator does from the command line, straight on the store."""

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from perdure.errors import Invalid, SessionNotFound
from perdure.protocol.events import TERMINAL, Event
from perdure.settings import Settings
from perdure.store.base import SessionQuery, SessionRow, Store

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def migrate(settings: Settings) -> None:
    """Create or upgrade the schema."""

    async def work() -> None:
        async with _opened(settings) as store:
            await store.migrate()

    _run(work())


def sessions(settings: Settings, limit: int) -> Sequence[str]:
    """The newest sessions, a line for each."""

    async def work() -> Sequence[SessionRow]:
        async with _opened(settings) as store:
            await store.check()
            return (await store.sessions(SessionQuery(limit=limit))).sessions

    return [_line(row) for row in _run(work())]


def tail(settings: Settings, session_id: str, start: int, say: Callable[[str], None], *, follow: bool) -> None:
    """Say each event of the session from `start` on; with `follow`, until the session is over."""

    async def work() -> None:
        async with _opened(settings) as store:
            await store.check()
            async for event in _events(store, session_id, start, follow=follow):
                say(json.dumps(event.model_dump(mode="json", exclude_none=True), ensure_ascii=False))

    _run(work())


def cancel(settings: Settings, session_id: str, turn_id: str | None) -> str:
    """Ask the session to stop what it does; what came of it, in a sentence."""

    async def work() -> str:
        from .cancelling import Cancellation
        from .connect import connect
        from .driver import Driver

        async with _opened(settings) as store:
            await store.check()
            row = await _known(store, session_id)
            cancellation = Cancellation(store, Driver(await connect(settings, lazy=True)))
            return _CANCELLED[await cancellation.cancel(row, turn_id)]

    return _run(work())


_CANCELLED = {
    "accepted": "Its turn will be stopped; `perdure tail` shows turn.cancelled once it is.",
    "no_active_turn": "There is nothing to stop: no such turn runs or waits for anybody.",
}


def new_api_key(name: str) -> tuple[str, str]:
    """A fresh key, and the entry of PERDURE_API_KEYS that admits it."""
    if not _NAME.fullmatch(name):
        raise Invalid("A key's name is made of letters, digits, dots, dashes and underscores.")
    key = f"pdk_{secrets.token_urlsafe(32)}"
    return key, f"{name}={hashlib.sha256(key.encode()).hexdigest()}"


async def _events(store: Store, session_id: str, start: int, *, follow: bool) -> AsyncIterator[Event]:
    await _known(store, session_id)
    async with store.watch(session_id) as watch:
        while True:
            while page := await store.events(session_id, start):
                for event in page:
                    yield event
                    if event.type in TERMINAL:
                        return
                start = page[-1].index + 1
            if not follow:
                return
            await watch.changed()


async def _known(store: Store, session_id: str) -> SessionRow:
    row = await store.session(session_id)
    if row is None:
        raise SessionNotFound(f"The store knows no session {session_id}.")
    return row


def _line(row: SessionRow) -> str:
    return f"{row.session_id}  {row.status:<9}  {row.updated_at}  {row.agent}  {row.title or ''}".rstrip()


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncGenerator[Store]:
    from perdure.store.open import open_store

    store = await open_store(settings.database)
    try:
        yield store
    finally:
        await store.close()


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)
