"""From the address of a database to a store, whose files are readable by their owner only."""

import contextlib
import os
import stat
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

from perdure.errors import Misconfigured

from .base import Store
from .engine.store import SqlStore

_OTHERS = stat.S_IRWXO


def make_private(file: Path) -> None:
    """Create the file if it is missing, and make it and its journals unreadable for other users."""
    # SQLite gives its journals the permissions of the file. Errors are ignored: the first query reports them better.
    with contextlib.suppress(OSError):
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    for each in (file, file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")):
        _close(each, _OTHERS)


def close_folder(folder: Path, ours: Iterable[str]) -> None:
    """Remove other users' access to our files in a folder, and to the folder if it holds nothing else.

    `ours`: patterns of the names of our files.
    """
    found = list(folder.iterdir())
    mine = [each for each in found if any(fnmatch(each.name, pattern) for pattern in ours)]
    for each in mine:
        if each.is_file():
            _close(each, _OTHERS)
    # A folder with other content is the user's own; its permissions are not changed.
    if len(mine) == len(found):
        _close(folder, stat.S_IRWXG | _OTHERS)


def _close(path: Path, rights: int) -> None:
    """Remove these permissions if other users have any. A group alone may have access on purpose."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _OTHERS:
            path.chmod(mode & ~rights)


_SQLITE = "sqlite:///"
_SYNCED = "?synchronous=full"


class NoStore(Misconfigured):
    """There is no store at this address."""


async def open_store(url: str, *, create: bool = True) -> Store:
    """Open the store at `sqlite:///path`, `sqlite:///:memory:` or `postgresql://…`. The caller closes it.

    With `?synchronous=full` after the path, each commit to SQLite waits for the disk.
    The schema is not checked: call `migrate()` or `check()` next. Without `create`, an SQLite file must exist.
    """
    if url.startswith(_SQLITE):
        return _open_sqlite(url.removeprefix(_SQLITE), create)
    if url.startswith(("postgresql://", "postgres://")):
        return await _open_postgres(url)
    # Quote only the scheme: the rest may contain a password.
    scheme = urlsplit(url).scheme or "an address without a scheme"
    raise Misconfigured(f"No store is known for {scheme}: write sqlite:///path, or postgresql://user@host/database.")


@asynccontextmanager
async def checked_store(url: str) -> AsyncGenerator[Store]:
    """The store that is there already, with a schema that this code can work with; it is closed in the end."""
    store = await open_store(url, create=False)
    try:
        await store.check()
        yield store
    finally:
        await store.close()


def _open_sqlite(path: str, create: bool) -> Store:
    from .sqlite.database import ChangePoll, NoFeed, SqliteDatabase

    synced, path = path.endswith(_SYNCED), path.removesuffix(_SYNCED)
    if path == ":memory:":
        return SqlStore(SqliteDatabase(None), NoFeed())
    if not path:
        raise Misconfigured("An SQLite address names a file: sqlite:///path, or sqlite:////absolute/path.")
    file = Path(path)
    if create:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif not file.exists():
        raise NoStore(
            f"There is no store at {file.absolute()}: name its folder with --data-dir or PERDURE_DATA_DIR, "
            "or create it with `perdure migrate`."
        )
    make_private(file)
    database = SqliteDatabase(file, synced=synced)
    return SqlStore(database, ChangePoll(database))


async def _open_postgres(url: str) -> Store:
    try:
        from .postgres.database import PostgresDatabase, address
        from .postgres.feed import Notifications
    except ImportError as missing:
        raise Misconfigured("PostgreSQL needs an extra: pip install 'perdure[postgres]'.") from missing
    # Before the pool, which would log what libpq says of an address: it may quote the password.
    address(url)
    database = PostgresDatabase(url)
    await database.open()
    return SqlStore(database, Notifications(url, database))
