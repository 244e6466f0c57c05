from collections.abc import Sequence
from typing import cast

from perdure.harness.prompt import HistoryCache
from perdure.store.base import Store
from perdure.store.values import Record
from perdure.testing import ScriptedModel
from tests.support.lab import SESSION, Lab, lab


class CountingStore:
    """Counts the records that were read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.read: list[int] = []

    async def records(self, session_id: str, *, from_turn: int = 0, to_turn: int | None = None) -> Sequence[Record]:
        found = await self._store.records(session_id, from_turn=from_turn, to_turn=to_turn)
        self.read.append(len(found))
        return found


async def test_a_finished_turn_is_read_once() -> None:
    async with lab(["reply"] * 6) as it:
        counting = CountingStore(it.store)
        histories = HistoryCache(cast(Store, counting))
        for turn in range(6):
            await histories.load(SESSION, turn)
            await it.model(await it.deliver(f"message {turn}"), turn=turn)

        # The first turn also keeps what notes are marked with.
        assert counting.read == [0, 3, 2, 2, 2, 2]


async def test_turns_that_another_worker_handled_are_not_missed() -> None:
    model = ScriptedModel(["zero", "one", "two", "three"])
    async with lab(model) as it:
        here, there = it.harness, it.worker()
        for turn, worker in enumerate([here, there, there, here]):
            it.harness = worker
            await it.model(await it.deliver(f"m{turn}"), turn=turn)

        texts = [part.content for message in model.prompts[-1].messages for part in message.parts]  # type: ignore
        assert texts == ["m0", "zero", "m1", "one", "m2", "two", "m3"]


async def test_a_small_cache_forgets_and_stays_right() -> None:
    model = ScriptedModel(["zero", "one", "two"])
    async with lab(model) as it:
        it.harness = it.worker(histories=HistoryCache(it.store, capacity=1))
        for turn in range(3):
            await it.model(await it.deliver(f"m{turn}"), turn=turn)

        texts = [part.content for message in model.prompts[-1].messages for part in message.parts]  # type: ignore
        assert texts == ["m0", "zero", "m1", "one", "m2"]


async def test_an_attempt_at_an_older_turn_does_not_see_later_ones() -> None:
    async with lab(["zero", "one", "two"]) as it:
        histories = HistoryCache(it.store)
        for turn in range(3):
            await it.model(await it.deliver(f"m{turn}"), turn=turn)
        await histories.load(SESSION, 3)

        past, turn = await histories.load(SESSION, 1)

        assert past.until == 1
        assert len(past.conversation.messages) == 2
        assert [delivery.message for delivery in turn.deliveries()] == ["m1"]
        assert (await histories.load(SESSION, 3))[0].until == 3


async def test_a_session_that_is_too_large_to_keep_drives_no_other_out() -> None:
    async with lab(["reply", "reply"]) as it:
        large = Lab(it.store, it.agent, it.models.now, "conversation", it.settings, session="large")
        await it.model(await it.deliver("hello"))
        await large.model(await large.deliver("x" * 20_000))
        counting = CountingStore(it.store)
        histories = HistoryCache(cast(Store, counting), capacity=10_000)

        for session in (SESSION, "large", SESSION):
            await histories.load(session, 1)

        assert [count > 0 for count in counting.read] == [True, True, False]
