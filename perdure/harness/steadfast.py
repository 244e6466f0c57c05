"""A commit that does not give up at once."""

import asyncio

from perdure.errors import Unavailable
from perdure.store.base import Store
from perdure.store.values import Commit, Committed

#: Half a minute in all: longer than a failover, shorter than anybody's patience.
_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)


async def commit_steadfastly(store: Store, commit: Commit) -> Committed:
    """Commit what is paid for or has happened already: to lose it would be to pay or to do it twice."""
    for pause in _PAUSES:
        try:
            return await store.commit(commit)
        except Unavailable:
            await asyncio.sleep(pause)
    return await store.commit(commit)
