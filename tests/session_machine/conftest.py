"""The machine over each kind of store; `state` is one session that a test plays by hand."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import psycopg
import pytest

from perdure.store.base import Store
from perdure.store.engine.store import SqlStore
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.sqlite.database import NoFeed, SqliteDatabase
from tests.support.postgres import DELETE_ALL

from .machine import Machine
from .processes import Died


@pytest.fixture
def runner() -> Generator[asyncio.Runner]:
    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # No task awaits what died.
        if not isinstance(context.get("exception"), Died):
            loop.default_exception_handler(context)

    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(report)
        yield runner


@pytest.fixture
def on_sqlite(runner: asyncio.Runner) -> Generator[type[Machine]]:
    opened: list[Store] = []

    async def open_empty(now: Callable[[], str]) -> Store:
        await close()
        store = SqlStore(SqliteDatabase(None), NoFeed(), now)
        await store.migrate()
        opened.append(store)
        return store

    async def close() -> None:
        while opened:
            await opened.pop().close()

    yield _machine(runner, open_empty)
    runner.run(close())


@pytest.fixture
def on_postgres(runner: asyncio.Runner, postgres_url: str) -> Generator[type[Machine]]:
    database = PostgresDatabase(postgres_url)

    async def prepare() -> None:
        await database.open()
        await SqlStore(database, NoFeed()).migrate()

    async def open_empty(now: Callable[[], str]) -> Store:
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
            # No example meets what another one has left.
            await connection.execute(DELETE_ALL)
        return SqlStore(database, NoFeed(), now)

    runner.run(prepare())
    yield _machine(runner, open_empty)
    runner.run(database.close())


@pytest.fixture
def state(on_sqlite: type[Machine]) -> Generator[Machine]:
    machine = on_sqlite()
    yield machine
    machine.close()


def _machine(runner: asyncio.Runner, open_empty: Callable[[Callable[[], str]], Awaitable[Store]]) -> type[Machine]:
    class Here(Machine):
        run = staticmethod(runner.run)
        open = staticmethod(open_empty)

    return Here
