"""How many bytes a store holds."""

import sqlite3

_SQLITE = "sqlite:///"


def bytes_used(url: str) -> int:
    return _sqlite(url.removeprefix(_SQLITE)) if url.startswith(_SQLITE) else _postgres(url)


def _sqlite(path: str) -> int:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        pages, free, page = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    finally:
        connection.close()
    return (pages - free) * page


def _postgres(url: str) -> int:
    import psycopg

    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT pg_database_size(current_database())").fetchone()
    assert found is not None
    return int(found[0])
