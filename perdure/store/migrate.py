"""Creates and upgrades the schema, one numbered migration after another; refuses what it does not know.

A shipped migration is never edited; write the next one.
"""

from collections.abc import Sequence

from perdure.errors import SchemaOutdated, SchemaUnknown

from .port import Database, Transaction
from .sql import statements

APPLICATION = "perdure"


async def migrate(database: Database) -> None:
    """Bring the schema to the newest version; two processes may do it at once."""
    latest = len(database.migrations)
    # Looked at before anything is written, and once more under the lock.
    if await database.read(lambda tx: _version(tx, latest)) == latest:
        return
    await database.prepare()
    await database.write(lambda tx: _upgrade(tx, database.migrations))


async def check(database: Database) -> None:
    """Refuse any schema but the newest one this code knows."""
    latest = len(database.migrations)
    version = await database.read(lambda tx: _version(tx, latest))
    if version != latest:
        raise SchemaOutdated(f"The database has schema version {version}; this code needs {latest}. Run the migration.")


async def _upgrade(tx: Transaction, migrations: Sequence[str]) -> None:
    await tx.rows("lock_schema")
    version = await _version(tx, len(migrations))
    if version == len(migrations):
        return
    for migration in migrations[version:]:
        for statement in statements(migration):
            await tx.define(statement)
    await tx.run("set_schema", version=len(migrations))


async def _version(tx: Transaction, latest: int) -> int:
    """The schema's version; 0 in an empty database."""
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
        raise SchemaUnknown(
            f"The database has schema version {version}; this code knows versions up to {latest}. Upgrade Perdure."
        )
    return version
