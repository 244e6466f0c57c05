"""Row 4: the event log alone: no Temporal, no HTTP; writers here, readers in a process of their own."""

import asyncio
import sys
from time import perf_counter

import orjson

from bench.plan import Plan
from bench.stats import median, quantile
from bench.table import Line, Target
from perdure.protocol.deliveries import LOCAL
from perdure.protocol.events import NewEvent
from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.store.values import Commit, NewSession

NAME = "event log"

#: What the readers print once all of them wait.
FOLLOWING = b"following"
# Sessions that the readers spread over.
_SESSIONS = 20
# Seconds between two events that are published to readers: a few streams that are talking.
_PACE = 0.02


async def measure(database: str, plan: Plan) -> list[Line]:
    store = await open_store(database)
    try:
        await store.migrate()
        async with asyncio.timeout(2 * plan.patience):
            alone = await _appends(store, plan.appends, 1)
            together = await _appends(store, plan.appends, plan.writers)
            delays = await _publish(store, database, plan)
    finally:
        await store.close()
    what = f"commit → read in another process, {plan.readers} readers,"
    return [
        Line(NAME, "appends per second, one writer", "/s", alone),
        Line(NAME, f"appends per second, {plan.writers} sessions at once", "/s", together),
        Line(NAME, f"{what} p50", "ms", 1e3 * median(delays), target=Target("≤", 20)),
        Line(NAME, f"{what} p95", "ms", 1e3 * quantile(delays, 0.95)),
    ]


async def _sessions(store: Store, prefix: str, count: int) -> list[str]:
    ids = [f"ses_{prefix}_{number}" for number in range(count)]
    for session_id in ids:
        await store.create_session(
            NewSession(session_id, agent="bench", mode="conversation", token_hash=session_id, principal=LOCAL)
        )
    return ids


async def _appends(store: Store, count: int, writers: int) -> float:
    """Commits of one event each, per second."""
    sessions = await _sessions(store, f"append{writers}", writers)

    async def write(session_id: str) -> None:
        for number in range(count // writers):
            await store.commit(_commit(session_id, number))

    begun = perf_counter()
    await asyncio.gather(*map(write, sessions))
    return count // writers * writers / (perf_counter() - begun)


def _commit(session_id: str, number: int) -> Commit:
    # The clock is one for all processes of the machine.
    data = {"messageDelta": "Hello ", "sentAt": perf_counter()}
    event = NewEvent(type="message.appended", key=f"delta/{number}", data=data, turn=0, step=0)
    return Commit(session_id, events=[event])


async def _publish(store: Store, database: str, plan: Plan) -> list[float]:
    """Seconds from before a commit until each reader in the other process has read its event."""
    sessions = await _sessions(store, "read", _SESSIONS)
    expected = [_share(plan.published, place) for place in range(_SESSIONS)]
    program = [sys.executable, "-m", "bench.readers", database, str(plan.readers)]
    readers = await asyncio.create_subprocess_exec(
        *program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert readers.stdin is not None
    assert readers.stdout is not None
    try:
        readers.stdin.write(orjson.dumps(dict(zip(sessions, expected, strict=True))) + b"\n")
        assert (await readers.stdout.readline()).strip() == FOLLOWING
        for number in range(plan.published):
            await store.commit(_commit(sessions[number % _SESSIONS], number))
            await asyncio.sleep(_PACE)
        return orjson.loads(await readers.stdout.read())
    finally:
        if readers.returncode is None:
            readers.kill()
        await readers.wait()


def _share(published: int, place: int) -> int:
    """How many of the events go to the session at this place."""
    return published // _SESSIONS + (place < published % _SESSIONS)
