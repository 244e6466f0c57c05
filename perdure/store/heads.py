"""How far the events of some sessions go: one query for all of them."""

from collections.abc import Sequence

from .port import Database


async def heads(database: Database, session_ids: Sequence[str]) -> dict[str, int]:
    if not session_ids:
        return {}
    found = await database.read(lambda tx: tx.rows("heads", session_ids=session_ids))
    return {row["session_id"]: row["next_index"] for row in found}
