import asyncio
import random
import statistics
import sys

import pytest

from perdure.errors import Unavailable
from perdure.store.base import Store, Watch
from perdure.store.values import Commit
from tests.support import given

pytestmark = pytest.mark.usefixtures("no_look")

#: Seconds in which news must come; only a failure takes as long.
SOON = 30.0


async def begun(*watches: Watch) -> None:
    """A first wake without news is made for what was written before."""
    for watch in watches:
        assert await watch.changed(SOON)


async def read_on(store: Store, until: int) -> list[int]:
    """Read as a stream does: whatever is there, then wait for news; stop when no news came in time."""
    seen: list[int] = []
    async with store.watch("s") as watch:
        while True:
            while page := await store.events("s", len(seen)):
                seen += [event.index for event in page]
            if len(seen) >= until or not await watch.changed(SOON):
                return seen


async def test_without_news_a_watcher_waits_in_vain(store: Store) -> None:
    async with store.watch("s") as watch:
        await begun(watch)

        assert not await watch.changed(0.1)


async def test_a_watcher_learns_that_its_store_was_closed(store: Store) -> None:
    async with store.watch("s") as watch:
        await begun(watch)

        await store.close()

        with pytest.raises(Unavailable):
            await watch.changed(SOON)


async def test_a_commit_wakes_the_watchers_of_its_session_only(store: Store) -> None:
    await store.create_session(given.session("t"))
    async with store.watch("s") as ours, store.watch("t") as theirs:
        await begun(ours, theirs)

        await store.commit(Commit("s", events=[given.event("a")]))

        assert await ours.changed(SOON)
        assert not await theirs.changed(0.1)


async def test_news_from_before_the_question_are_not_missed(store: Store) -> None:
    async with store.watch("s") as watch:
        await begun(watch)

        await store.commit(Commit("s", events=[given.event("a")]))
        await store.events("s", 1)

        assert await watch.changed(0)


async def test_a_refusal_wakes_too(store: Store) -> None:
    await store.accept(given.delivery())
    async with store.watch("s") as watch:
        await begun(watch)

        await store.refuse("s", "d", "X", given.event("refused"))

        assert await watch.changed(SOON)


@pytest.mark.alone
async def test_another_store_wakes_within_a_tenth_of_a_second(store: Store, other: Store) -> None:
    loop = asyncio.get_running_loop()
    delays: list[float] = []
    async with store.watch("s") as watch:
        await begun(watch)
        for n in range(15):
            await other.commit(Commit("s", events=[given.event(str(n))]))
            committed_at = loop.time()
            assert await watch.changed(SOON)
            delays.append(loop.time() - committed_at)

    assert statistics.median(delays) < 0.1


async def test_another_process_wakes(store: Store, url: str) -> None:
    reading = asyncio.create_task(read_on(store, 20))

    writer = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.store.writer", url, "s", "w", "20")

    assert await writer.wait() == 0
    assert await reading == list(range(20))


async def test_no_wake_is_missed(store: Store, other: Store) -> None:
    dice = random.Random(7)
    readers = [asyncio.create_task(read_on(each, 120)) for each in (store, other) * 4]

    for n in range(120):
        await (store if dice.random() < 0.5 else other).commit(Commit("s", events=[given.event(str(n))]))
        if dice.random() < 0.3:
            await asyncio.sleep(dice.random() * 0.02)

    for seen in await asyncio.gather(*readers):
        assert seen == list(range(120))


async def test_a_cancelled_commit_that_went_through_is_seen(store: Store) -> None:
    async with store.watch("s") as watch:
        await begun(watch)
        for n in range(40):
            committing = asyncio.create_task(store.commit(Commit("s", events=[given.event(str(n))])))
            for _ in range(n % 8):
                await asyncio.sleep(0)
            committing.cancel()
            await asyncio.wait([committing])

            if await store.index_of("s", str(n)) is not None:
                assert await watch.changed(SOON)

    await store.commit(Commit("s", events=[given.event("after")]))
    indexes = [event.index for event in await given.everything(store)]
    assert indexes == list(range(len(indexes)))


async def test_a_watcher_that_left_is_not_notified(store: Store) -> None:
    async with store.watch("s"):
        pass

    await store.commit(Commit("s", events=[given.event("a")]))

    assert await given.keys(store) == ["a"]
