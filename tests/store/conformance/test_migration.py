import asyncio
from collections.abc import Sequence

import pytest

from perdure.errors import SchemaOutdated, SchemaUnknown
from perdure.store.base import Store
from perdure.store.engine import database as engine
from perdure.store.values import SessionQuery
from tests.store.conformance.conftest import Database, OpenStore
from tests.support import given

pytestmark = pytest.mark.new_schema


async def test_an_empty_database_must_be_migrated_first(open_another: OpenStore) -> None:
    store = await open_another()

    with pytest.raises(SchemaOutdated, match="Run `perdure migrate`"):
        await store.check()

    await store.migrate()
    await store.check()


async def test_a_migrated_database_is_left_alone(open_another: OpenStore, database: Database) -> None:
    store = await open_another()
    await store.migrate()

    await store.migrate()

    assert database.run("SELECT application, version FROM perdure_schema") == [("perdure", given.SCHEMA)]


async def test_two_may_migrate_at_once(open_another: OpenStore, database: Database) -> None:
    stores = [await open_another() for _ in range(4)]

    await asyncio.gather(*(store.migrate() for store in stores))

    for store in stores:
        await store.check()
        await store.sessions(SessionQuery())
    assert database.run("SELECT count(*) FROM perdure_schema") == [(1,)]


@pytest.mark.parametrize("ask", ["check", "migrate"])
async def test_a_newer_schema_that_this_code_can_work_with_is_good_and_left_alone(
    open_another: OpenStore, database: Database, caplog: pytest.LogCaptureFixture, ask: str
) -> None:
    await (await open_another()).migrate()
    database.run("UPDATE perdure_schema SET version = 99")
    store = await open_another()

    with caplog.at_level("INFO"):
        await getattr(store, ask)()

    assert database.run("SELECT version, compatible FROM perdure_schema") == [(99, 3)]
    assert f"schema version 99, newer than the {given.SCHEMA}" in caplog.text
    assert await store.sessions(SessionQuery())


@pytest.mark.parametrize("ask", ["check", "migrate"])
async def test_a_newer_schema_that_needs_newer_code_is_refused_before_anything_is_written(
    open_another: OpenStore, database: Database, ask: str
) -> None:
    await (await open_another()).migrate()
    database.run("UPDATE perdure_schema SET version = 99, compatible = 98")
    database.run("DROP TABLE slots")
    before = database.tables()
    store = await open_another()

    with pytest.raises(
        SchemaUnknown, match=rf"version 99, .* knows 98; this one knows {given.SCHEMA}. Upgrade Perdure."
    ):
        await getattr(store, ask)()

    assert database.tables() == before
    assert database.run("SELECT version FROM perdure_schema") == [(99,)]


async def test_a_later_migration_declares_which_code_can_work_with_it(
    open_another: OpenStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_today = await open_another()
    shipped = engine.migrations

    async def later(*migrations: str) -> Store:
        def known(dialect: str) -> Sequence[str]:
            return [*shipped(dialect), *migrations]

        monkeypatch.setattr(engine, "migrations", known)
        return await open_another()

    adds = "ALTER TABLE slots ADD COLUMN more integer;\n"
    takes = f"ALTER TABLE slots DROP COLUMN more;\nUPDATE perdure_schema SET compatible = {given.SCHEMA + 2};\n"
    of_tomorrow, of_next_week = await later(adds), await later(adds, takes)

    await of_tomorrow.migrate()
    await of_today.check()
    await of_next_week.migrate()

    assert database.run("SELECT version, compatible FROM perdure_schema") == [(given.SCHEMA + 2, given.SCHEMA + 2)]
    for outdated in (of_today, of_tomorrow):
        with pytest.raises(SchemaUnknown):
            await outdated.check()


@pytest.mark.parametrize("ask", ["check", "migrate"])
async def test_a_database_of_something_else_is_refused_before_anything_is_written(
    open_another: OpenStore, database: Database, ask: str
) -> None:
    database.run("CREATE TABLE invoices (id integer)")
    store = await open_another()

    with pytest.raises(SchemaUnknown, match="something else"):
        await getattr(store, ask)()

    assert database.tables() == ["invoices"]


async def test_the_schema_of_another_application_is_refused(open_another: OpenStore, database: Database) -> None:
    await (await open_another()).migrate()
    database.run("UPDATE perdure_schema SET application = 'another'")

    with pytest.raises(SchemaUnknown, match="another application"):
        await (await open_another()).migrate()
