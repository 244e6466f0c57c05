"""Everything that was paid for is counted, once, whatever becomes of the attempt that paid."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from perdure.errors import ModelFailed, Superseded
from perdure.harness.tools.limits import add_usage
from perdure.models.base import Item, Prompt, TextDelta, UsageSoFar
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.events import Usage
from perdure.protocol.requests import Coordinates, ModelOutcome
from perdure.testing import ScriptedModel
from tests.support.given import read_session
from tests.support.lab import SESSION, Lab, lab

TOLD = Usage(input_tokens=7, output_tokens=2)
#: The usage of one reply of a `ScriptedModel`.
REPLIED = Usage(input_tokens=10, output_tokens=5)


class Breaking:
    """Says what it has used so far, and then fails, or goes on for ever."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.told = asyncio.Event()

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Item, None]:
        yield UsageSoFar(Usage(input_tokens=7))
        yield TextDelta("Half ")
        yield UsageSoFar(TOLD)
        self.told.set()
        if self._error:
            raise self._error
        await asyncio.Event().wait()


async def half_told(it: Lab, model: Breaking) -> tuple[DeliveryRef, asyncio.Task[ModelOutcome]]:
    """A delivery, and the attempt at its reply that readers have seen the half of."""
    delivery = await it.deliver("Hi")
    zombie = asyncio.create_task(it.model(delivery, generation=1))
    await model.told.wait()
    while "message.appended" not in await it.types():
        await asyncio.sleep(0.005)
    return delivery, zombie


async def used(it: Lab) -> Usage:
    return (await read_session(it.store, SESSION)).usage


async def test_a_stream_that_broke_off_is_counted_beside_the_reply_of_the_next_attempt() -> None:
    async with lab(Breaking(ModelFailed("Busy.", transient=True))) as it:
        delivery = await it.deliver("Hi")
        with pytest.raises(ModelFailed):
            await it.model(delivery, generation=1)
        it.models.now = ScriptedModel(["Hello"])

        await it.model(delivery, generation=2)

        assert await used(it) == TOLD + REPLIED


async def test_every_failed_attempt_is_counted() -> None:
    async with lab(Breaking(ModelFailed("Busy.", transient=True))) as it:
        delivery = await it.deliver("Hi")
        for generation in (1, 2, 3):
            with pytest.raises(ModelFailed):
                await it.model(delivery, generation=generation)

        assert await used(it) == TOLD + TOLD + TOLD


async def test_the_last_attempt_is_counted_once() -> None:
    async with lab(Breaking(ModelFailed("Busy.", transient=True))) as it:
        await it.model(await it.deliver("Hi"), number=6)

        assert await used(it) == TOLD


async def test_a_reply_that_cannot_be_used_is_counted() -> None:
    async with lab(Breaking(ValueError("not a reply"))) as it:
        await it.model(await it.deliver("Hi"))

        assert await used(it) == TOLD


async def test_an_empty_reply_is_counted_although_the_call_after_it_fails() -> None:
    async with lab(["", ModelFailed("Busy.", transient=True)]) as it:
        with pytest.raises(ModelFailed):
            await it.model(await it.deliver("Hi"))

        assert await used(it) == REPLIED


async def test_a_cancelled_call_is_counted() -> None:
    model = Breaking()
    async with lab(model) as it:
        step = asyncio.create_task(it.model(await it.deliver("Hi")))
        await model.told.wait()

        step.cancel()

        with pytest.raises(asyncio.CancelledError):
            await step
        assert await used(it) == TOLD


async def test_an_attempt_that_was_overtaken_is_counted() -> None:
    model = Breaking()
    async with lab(model) as it:
        delivery, zombie = await half_told(it, model)
        it.models.now = ScriptedModel(["Hello"])
        await it.model(delivery, generation=2)
        assert await used(it) == REPLIED

        zombie.cancel()

        with pytest.raises((asyncio.CancelledError, Superseded)):
            await zombie
        assert await used(it) == REPLIED + TOLD


async def test_usage_is_counted_once_for_each_key_also_after_the_end_of_the_session() -> None:
    async with lab(["Done."], mode="task") as it:
        await it.model(await it.deliver("Hi"))
        assert await it.session_status() == "completed"
        at = Coordinates(session_id=SESSION, turn=0, step=0)

        for _ in range(3):
            await add_usage(it.store, at, "compaction", "compaction", TOLD)
        await add_usage(it.store, at, "another", "attempt", TOLD)

        assert await used(it) == REPLIED + TOLD + TOLD
        assert await it.session_status() == "completed"


async def test_counted_usage_does_not_change_the_next_prompt() -> None:
    model = ScriptedModel([ModelFailed("Busy.", transient=True), "Hello", "Hello again"])
    async with lab(model) as it:
        delivery = await it.deliver("Hi")
        with pytest.raises(ModelFailed):
            await it.model(delivery, generation=1)
        at = Coordinates(session_id=SESSION, turn=0, step=0)
        await add_usage(it.store, at, "1", "attempt", TOLD)
        await it.model(delivery, generation=2)

        await it.model(await it.deliver("And?"), turn=1)

        assert [len(prompt.messages) for prompt in model.prompts] == [1, 1, 3]
