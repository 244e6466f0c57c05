"""The agents of a build before queue modes: its turns see no message that steers, its drivers none of the modes."""

from collections.abc import Sequence

from temporalio import workflow

from perdure.store.engine import queue
from perdure.store.engine.database import Transaction
from perdure.store.engine.store import SqlStore
from perdure.store.values import SessionRow
from tests.runtime.steered import child as child
from tests.runtime.steered import inline as inline

#: The patches that came with the modes.
NEWER = {"changed-references", "wait-to-collect", "drop-superseded", "supersede-as-stored", "forget-what-joined"}

patched = workflow.patched


async def sees_none(tx: Transaction, session: SessionRow) -> bool:
    return False


async def knows_none(self: SqlStore, session_id: str) -> Sequence[str]:
    return ()


def patched_as_before(id: str) -> bool:
    return id not in NEWER and patched(id)


workflow.patched = patched_as_before
queue.is_steered = sees_none
SqlStore.steers = knows_none
