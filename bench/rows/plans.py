"""What planning costs: a turn that marks a step as done, and a commit with a checkpoint."""

import asyncio
from time import perf_counter

from bench.http import Refused
from bench.plan import Plan
from bench.stack import Product
from bench.stats import median
from bench.table import Line
from perdure.protocol.deliveries import LOCAL
from perdure.protocol.events import NewEvent
from perdure.protocol.names import SLICE_PREFIX
from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.store.values import Commit, NewCheckpoint, NewSession, SlotWrite

NAME = "plans"
CHECKPOINTS = "checkpoints"

#: A snapshot has at most 1 MiB, with some bytes that are not of slices.
_ITEMS, _ITEM = 1_020, "x" * 1_020


async def measure(product: Product, plan: Plan) -> list[Line]:
    """Turns of one tool call, which does nothing or marks a step as done, with the checkpoint of that."""
    # One turn of each kind is not measured.
    count = plan.turns + 1
    session = await product.client.session(f"plan {count}")
    plain, planning = list[float](), list[float]()
    async with asyncio.timeout(plan.patience * 3):
        for step in range(1, count + 1):
            plain.append(1e3 * (await session.turn("rounds 1")).waiting)
            planning.append(1e3 * (await session.turn(f"done {step}")).waiting)
    counts = session.counts
    await session.close()
    if counts["checkpoint.created"] != count:
        raise Refused(f"{counts['checkpoint.created']} checkpoints were taken, and not {count}")
    what = "turn with a planning call and its checkpoint / with a call of a plain tool, p50"
    return [Line(NAME, what, "ms", median(planning[1:]), median(plain[1:]))]


async def of_store(database: str, plan: Plan) -> list[Line]:
    """Commits of one event, with a checkpoint of slices of 1 MiB and without one, on the store alone."""
    store = await open_store(database)
    try:
        await store.migrate()
        async with asyncio.timeout(plan.patience):
            plain, kept = await _commits(store, plan.checkpoints)
    finally:
        await store.close()
    what = "commit with a checkpoint of 1 MiB of slices / without one, p50"
    return [Line(CHECKPOINTS, what, "ms", 1e3 * median(kept), 1e3 * median(plain))]


async def _commits(store: Store, count: int) -> tuple[list[float], list[float]]:
    session_id = "ses_checkpoints"
    session = NewSession(session_id, agent="bench", mode="conversation", token_hash=session_id, principal=LOCAL)
    await store.create_session(session)
    items = {"value": [_ITEM] * _ITEMS, "slice": {"itemType": "str", "policy": "state"}}
    await store.commit(Commit(session_id, slots=[SlotWrite(f"{SLICE_PREFIX}items", items)]))
    plain, kept = list[float](), list[float]()
    for step in range(count):
        plain.append(await _commit(store, Commit(session_id, events=[_event("plain", step)])))
        wanted = NewCheckpoint(f"chk_{step:026}", 0, step)
        kept.append(await _commit(store, Commit(session_id, events=[_event("kept", step)], checkpoint=wanted)))
    taken = len(await store.checkpoints.list(session_id, count))
    if not taken:
        raise Refused("no checkpoint was taken")
    return plain, kept


def _event(kind: str, step: int) -> NewEvent:
    return NewEvent(type="step.completed", key=f"t0/s{step}/{kind}", turn=0, step=step)


async def _commit(store: Store, commit: Commit) -> float:
    begun = perf_counter()
    await store.commit(commit)
    return perf_counter() - begun
