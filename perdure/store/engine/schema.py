"""Creates and upgrades the schema with numbered migrations; refuses an unknown schema.

A shipped migration is never edited; write the next one. Older code works with a newer schema while its version is at
least `compatible`. A migration that breaks older code sets `compatible` to its own number.
"""

import logging
from collections.abc import Sequence

from perdure.errors import SchemaOutdated, SchemaUnknown

from .database import Database, Transaction, statements

APPLICATION = "perdure"

logger = logging.getLogger(__name__)


async def migrate(database: Database) -> None:
    """Upgrade the schema to the newest version that this code knows. Safe in several processes at once."""
    latest = len(database.migrations)
    # Checked before any write, and again under the lock.
    version = await database.read(lambda tx: _version(tx, latest))
    if version > latest:
        logger.warning("%s Nothing was changed.", _newer(version, latest))
    if version >= latest:
        return
    await database.prepare()
    await database.write(lambda tx: _upgrade(tx, database.migrations))


async def check(database: Database) -> None:
    """Refuse a schema that this code cannot work with."""
    latest = len(database.migrations)
    version = await database.read(lambda tx: _version(tx, latest))
    if version < latest:
        raise SchemaOutdated(
            f"The database has schema version {version}; this code needs {latest}. Run `perdure migrate` first."
        )
    if version > latest:
        logger.info("%s", _newer(version, latest))


async def _upgrade(tx: Transaction, migrations: Sequence[str]) -> None:
    await tx.rows("lock_schema")
    version = await _version(tx, len(migrations))
    if version >= len(migrations):
        return
    for migration in migrations[version:]:
        for statement in statements(migration):
            await tx.define(statement)
    await tx.run("set_schema", version=len(migrations))


async def _version(tx: Transaction, latest: int) -> int:
    """The schema's version; 0 in an empty database. A newer one that this code cannot work with is refused."""
    tables = {row["name"] for row in await tx.rows("tables")}
    if not tables:
        return 0
    if "perdure_schema" not in tables:
        raise SchemaUnknown("The database holds tables of something else; Perdure needs one of its own.")
    found = await tx.row("schema")
    if found is None or found["application"] != APPLICATION:
        raise SchemaUnknown("The database belongs to another application.")
    version: int = found["version"]
    if version > latest:
        await _refuse_incompatible(tx, version, latest)
    return version


async def _refuse_incompatible(tx: Transaction, version: int, latest: int) -> None:
    # Only for a newer schema: the oldest schemas have no such column.
    found = await tx.row("schema_compatible")
    needed = version if found is None else found["compatible"]
    if needed > latest:
        raise SchemaUnknown(
            f"The database has schema version {version}, which needs code that knows {needed}; "
            f"this one knows {latest}. Upgrade Perdure."
        )


def _newer(version: int, latest: int) -> str:
    return f"The database has schema version {version}, newer than the {latest} of this code, which can work with it."
