"""Several attempts at one model call: only the newest one may write."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import pytest

from perdure.errors import ModelFailed, Superseded
from perdure.models.base import Delta, Prompt, Reply, TextDelta
from perdure.protocol.requests import Coordinates, Finished, ModelCall
from perdure.store.base import RawRecord, Store
from perdure.store.values import Attempt
from perdure.testing import ScriptedModel
from tests.support.lab import SESSION, TEXT_TURN, lab


class Talking:
    """Streams a word, then waits until the test lets it continue."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.closed = asyncio.Event()

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        try:
            yield TextDelta("Half ")
            self.started.set()
            await self.release.wait()
            yield TextDelta("a thought")
            await asyncio.Event().wait()
        finally:
            self.closed.set()


async def test_a_zombie_is_stopped_and_its_text_is_retracted() -> None:
    model = Talking()
    async with lab(model) as it:
        delivery = await it.deliver("Hi")
        zombie = asyncio.create_task(it.model(delivery))
        await model.started.wait()
        while "message.appended" not in await it.types():
            await asyncio.sleep(0.005)

        it.models.now = ScriptedModel(["Hello"])
        await it.model(delivery, generation=2)
        model.release.set()

        with pytest.raises(Superseded):
            await zombie
        assert model.closed.is_set()
        assert await it.types() == [*TEXT_TURN[:5], "step.superseded", *TEXT_TURN[4:]]
        assert (await it.emitted("message.appended"))[0]["messageDelta"] == "Half "


async def test_a_cancelled_step_closes_the_providers_stream() -> None:
    model = Talking()
    async with lab(model) as it:
        step = asyncio.create_task(it.model(await it.deliver("Hi")))
        await model.started.wait()

        step.cancel()

        with pytest.raises(asyncio.CancelledError):
            await step
        assert model.closed.is_set()


async def test_an_attempt_that_began_unseen_is_not_taken_for_an_empty_turn() -> None:
    class Late:
        """Reads the records, and only then lets the other attempt begin."""

        def __init__(self, store: Store) -> None:
            self._store = store
            self._reads = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        async def raw_records(self, session_id: str, **turns: Any) -> Sequence[RawRecord]:
            found = await self._store.raw_records(session_id, **turns)
            self._reads += 1
            if self._reads == 1:
                with pytest.raises(ModelFailed):
                    await zombie.call_model(made, Attempt(1, 1))
            return found

    async with lab([ModelFailed("Busy.", transient=True), "Hello"]) as it:
        delivery = await it.deliver("Hi")
        made = ModelCall(at=Coordinates(session_id=SESSION, turn=0), agent="tester", deliveries=(delivery,))
        zombie = it.worker()

        outcome = await it.worker(cast(Store, Late(it.store))).call_model(made, Attempt(2, 2))

        assert isinstance(outcome, Finished)
        assert outcome.failure is None


async def test_an_older_attempt_cannot_begin() -> None:
    async with lab([ModelFailed("Busy.", transient=True), "Hello"]) as it:
        delivery = await it.deliver("Hi")
        with pytest.raises(ModelFailed):
            await it.model(delivery, generation=2)

        with pytest.raises(Superseded):
            await it.model(delivery, generation=1)


async def test_a_provider_that_stays_away_fails_the_turn_and_not_the_session() -> None:
    async with lab([ModelFailed("Busy.", transient=True), "Hello"]) as it:
        outcome = await it.model(await it.deliver("Hi"), number=6)

        assert isinstance(outcome, Finished)
        assert outcome.failure is not None
        assert outcome.failure.message == "Busy."
        assert (await it.types())[-3:] == ["step.failed", "turn.failed", "session.waiting"]
