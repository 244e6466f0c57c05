"""From the address of a database to a store."""

from pathlib import Path
from urllib.parse import urlsplit

from perdure.errors import Misconfigured

from .base import Store
from .sqlstore import SqlStore

_SQLITE = "sqlite:///"


async def open_store(url: str) -> Store:
    """Open the store behind `sqlite:///path`, `sqlite:///:memory:` or `postgresql://…`; it must be closed in the end.

    The schema is not looked at: call `migrate()` or `check()` next.
    """
    if url.startswith(_SQLITE):
        return _open_sqlite(url.removeprefix(_SQLITE))
    if url.startswith(("postgresql://", "postgres://")):
        return await _open_postgres(url)
    # Only the scheme: the rest may hold a password.
    raise Misconfigured(f"No store is known for {urlsplit(url).scheme or 'an address without a scheme'}:")


def _open_sqlite(path: str) -> Store:
    from .sqlite.database import SqliteDatabase
    from .sqlite.feed import Alone, ChangePoll

    if path == ":memory:":
        return SqlStore(SqliteDatabase(None), Alone())
    if not path:
        raise Misconfigured("An SQLite address names a file: sqlite:///path, or sqlite:////absolute/path.")
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    database = SqliteDatabase(file)
    return SqlStore(database, ChangePoll(database))


async def _open_postgres(url: str) -> Store:
    try:
        from .postgres.database import PostgresDatabase
        from .postgres.feed import Notifications
    except ImportError as missing:
        raise Misconfigured("PostgreSQL needs an extra: pip install 'perdure[postgres]'.") from missing
    database = PostgresDatabase(url)
    await database.open()
    return SqlStore(database, Notifications(url, database))
