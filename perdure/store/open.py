"""From the address of a database to a store."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from perdure.errors import Misconfigured

from .base import Store
from .engine.store import SqlStore

_SQLITE = "sqlite:///"


class NoStore(Misconfigured):
    """There is no store where one should be."""


async def open_store(url: str, *, create: bool = True) -> Store:
    """Open the store behind `sqlite:///path`, `sqlite:///:memory:` or `postgresql://…`; it must be closed in the end.

    The schema is not looked at: call `migrate()` or `check()` next. Without `create` a file must be there already.
    """
    if url.startswith(_SQLITE):
        return _open_sqlite(url.removeprefix(_SQLITE), create)
    if url.startswith(("postgresql://", "postgres://")):
        return await _open_postgres(url)
    # Only the scheme: the rest may hold a password.
    scheme = urlsplit(url).scheme or "an address without a scheme"
    raise Misconfigured(f"No store is known for {scheme}: write sqlite:///path, or postgresql://user@host/database.")


def _open_sqlite(path: str, create: bool) -> Store:
    from .sqlite.database import SqliteDatabase
    from .sqlite.feed import Alone, ChangePoll

    if path == ":memory:":
        return SqlStore(SqliteDatabase(None), Alone())
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
    _make_private(file)
    database = SqliteDatabase(file)
    return SqlStore(database, ChangePoll(database))


def _make_private(file: Path) -> None:
    """Create the file, if need be, for its owner alone; SQLite gives its journals the same rights."""
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
        for each in (file, file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")):
            # Older builds have let everybody read them. A group may have been given its rights on purpose.
            if each.exists() and (mode := each.stat().st_mode) & 0o007:
                each.chmod(mode & ~0o007)
    except OSError:
        # SQLite says better what is wrong, with the first query.
        return


async def _open_postgres(url: str) -> Store:
    try:
        from .postgres.database import PostgresDatabase
        from .postgres.feed import Notifications
    except ImportError as missing:
        raise Misconfigured("PostgreSQL needs an extra: pip install 'perdure[postgres]'.") from missing
    database = PostgresDatabase(url)
    await database.open()
    return SqlStore(database, Notifications(url, database))
