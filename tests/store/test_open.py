import asyncio
from pathlib import Path

import pytest

from perdure.errors import Misconfigured, SchemaUnknown, Unavailable
from perdure.store.open import open_store
from perdure.store.values import Commit, SessionQuery
from tests.support import given


async def test_the_folder_of_a_new_database_is_made(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "er" / "perdure.db"

    store = await open_store(f"sqlite:///{file}")
    await store.migrate()
    await store.close()

    assert file.exists()


async def test_a_database_in_memory_serves_many_coroutines() -> None:
    store = await open_store("sqlite:///:memory:")
    await store.migrate()
    await store.create_session(given.session())
    async with store.watch("s") as watch:
        await asyncio.gather(*(store.commit(Commit("s", events=[given.event(str(n))])) for n in range(50)))

        assert await watch.changed(1)
    assert [event.index for event in await store.events("s")] == list(range(50))
    await store.close()


@pytest.mark.parametrize("url", ["mysql://user:secret@host/db", "perdure.db", "sqlite:///", ""])
async def test_an_address_that_no_store_knows_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        await open_store(url)

    assert "secret" not in str(refused.value)


async def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a database, but longer than the header of one: " * 10)
    before = file.read_bytes()
    store = await open_store(f"sqlite:///{file}")

    with pytest.raises(SchemaUnknown):
        await store.migrate()

    await store.close()
    assert file.read_bytes() == before


async def test_a_closed_store_is_unavailable(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path / 'perdure.db'}")
    await store.close()

    with pytest.raises(Unavailable):
        await store.sessions(SessionQuery())
