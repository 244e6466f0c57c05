"""A process of its own that appends events to a session: `python -m tests.store.writer URL SESSION NAME COUNT`."""

import asyncio
import sys

from perdure.store.open import open_store
from perdure.store.values import Commit
from tests.support import given


async def write(url: str, session_id: str, name: str, count: int) -> None:
    store = await open_store(url)
    try:
        for n in range(count):
            await store.commit(Commit(session_id, events=[given.event(f"{name}/{n}")]))
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(write(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
