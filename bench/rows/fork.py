"""A fork of an old session against a fork of a young one: the store alone."""

import asyncio
from time import perf_counter

from bench.plan import Plan
from bench.stats import median
from bench.storage import bytes_used
from bench.table import Line, Target
from perdure.protocol.deliveries import LOCAL
from perdure.protocol.events import NewEvent
from perdure.store.base import Store
from perdure.store.lifecycle import NewFork
from perdure.store.open import open_store
from perdure.store.values import Commit, NewRecord, NewSession, SessionChange, SlotWrite

NAME = "fork"

_YOUNG = 10
#: What a turn leaves in the store: records of some size, and a slot.
_TEXT = "Hello " * 50


async def measure(database: str, plan: Plan) -> list[Line]:
    store = await open_store(database)
    try:
        await store.migrate()
        async with asyncio.timeout(4 * plan.patience):
            young = await _session(store, "young", min(_YOUNG, plan.forked_turns))
            old = await _session(store, "old", plan.forked_turns)
            of_young, of_old = await _forks(store, young, old, plan.forks)
            used = {each: await _bytes(store, database, each, plan.forks) for each in (young, old)}
    finally:
        await store.close()
    what = f"of a session of {plan.forked_turns} turns / of {_YOUNG}"
    return [
        Line(NAME, f"fork {what} p50", "ms", 1e3 * median(of_old), 1e3 * median(of_young), Target("≤", 1.2)),
        Line(NAME, f"bytes of a fork {what}", "B", used[old], used[young], Target("≤", 1.2)),
    ]


async def _session(store: Store, name: str, turns: int) -> str:
    session_id = f"ses_fork_{name}"
    session = NewSession(session_id, agent="bench", mode="conversation", token_hash=session_id, principal=LOCAL)
    await store.create_session(session)
    for turn in range(turns):
        await store.commit(
            Commit(
                session_id,
                records=[NewRecord(turn, 0, key, "bench/1", {"text": _TEXT}) for key in ("delivery/0", "reply")],
                events=[NewEvent(type="turn.completed", key=f"t{turn}/completed", turn=turn)],
                slots=[SlotWrite("cart", {"turn": turn})],
                change=SessionChange(status="waiting", turns=turn + 1),
            )
        )
    return session_id


async def _forks(store: Store, young: str, old: str, count: int) -> tuple[list[float], list[float]]:
    """Seconds of forks in the middle of both sessions; they alternate, so that noise hits both."""
    measured: dict[str, list[float]] = {young: [], old: []}
    for number in range(count):
        for parent in (young, old):
            begun = perf_counter()
            await _fork(store, parent, f"{parent}_{number}")
            measured[parent].append(perf_counter() - begun)
    return measured[young], measured[old]


async def _bytes(store: Store, database: str, parent: str, count: int) -> float:
    before = bytes_used(database)
    # A database grows by whole pages.
    for number in range(10 * count):
        await _fork(store, parent, f"{parent}_b{number}")
    return (bytes_used(database) - before) / (10 * count)


async def _fork(store: Store, parent: str, to: str) -> None:
    row = await store.session(parent)
    assert row is not None
    await store.fork(NewFork(to, f"token of {to}", parent, row.turns // 2))
