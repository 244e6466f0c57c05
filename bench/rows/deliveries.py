"""Row 13: what callers meet who deliver: many posts at once, a dispatch, and waiting for the end of a delivery."""

import asyncio
from time import perf_counter

from bench.http import Connection
from bench.plan import Plan
from bench.product import ProductSession
from bench.stack import Product
from bench.stats import median, quantile
from bench.table import Line, Target

NAME = "deliveries"

#: Milliseconds.
_ANSWERED = 1_000
_LATER = 10


async def measure(product: Product, plan: Plan) -> list[Line]:
    async with asyncio.timeout(plan.patience * plan.rounds):
        posts = [each for _ in range(plan.rounds) for each in await _posts_at_once(product, plan.posts)]
        dispatches = await _dispatches(product, plan.rounds * plan.turns)
        later = await _waits(product, plan.rounds * plan.turns)
    return [
        Line(
            *(NAME, f"{plan.posts} posts at once to a session that is busy, answered, p95", "ms"),
            *(1e3 * quantile(posts, 0.95), None),
            Target("≤", _ANSWERED),
        ),
        Line(NAME, "dispatch, accepted, p50", "ms", 1e3 * median(dispatches)),
        # Below 0: before the reader of the stream.
        Line(
            *(NAME, "answer to `Prefer: wait` after the end on the stream, p50", "ms later", 1e3 * median(later), None),
            Target("≤", _LATER),
        ),
    ]


async def _posts_at_once(product: Product, count: int) -> list[float]:
    """Seconds until each post to one session was answered, whose turn takes longer than that."""
    session = await product.client.session()
    connections = [await Connection.open(product.port) for _ in range(count)]
    await session.post({"message": "tokens 400 200"})

    async def post(api: Connection) -> float:
        begun = perf_counter()
        await api.post(f"/eve/v1/session/{session.id}", {"continuationToken": session.token, "message": "hello"})
        return perf_counter() - begun

    took = await asyncio.gather(*map(post, connections))
    for _ in range(count + 1):
        await session.waiting()
    for each in (session, *connections):
        await _closed(each)
    return took


async def _dispatches(product: Product, count: int) -> list[float]:
    api, took = await Connection.open(product.port), list[float]()
    for number in range(count):
        body = {"agent": "bench", "id": "desk", "input": "hello", "dispatchId": f"bench-{number}"}
        begun = perf_counter()
        receipt = await api.post("/v1/dispatches", body)
        took.append(perf_counter() - begun)
        await api.get(f"/v1/deliveries/{receipt['deliveryId']}", prefer="wait=30")
    api.close()
    return took


async def _waits(product: Product, count: int) -> list[float]:
    """Seconds from the end of a turn on the stream until the request that waits for its delivery is answered."""
    session, api, later = await product.client.session(), await Connection.open(product.port), list[float]()
    for _ in range(count):
        receipt = await session.post({"message": "hello"})

        async def waited(delivery_id: str) -> float:
            await api.get(f"/v1/deliveries/{delivery_id}", prefer="wait=30")
            return perf_counter()

        asking = asyncio.create_task(waited(receipt["deliveryId"]))
        await session.waiting()
        told = perf_counter()
        later.append(await asking - told)
    await _closed(session)
    api.close()
    return later


async def _closed(each: ProductSession | Connection) -> None:
    if isinstance(each, ProductSession):
        await each.close()
    else:
        each.close()
