"""Attempts at a reply that end after readers have seen a part of it, and what becomes of that."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from pydantic_ai.messages import ModelMessage, TextPart, UserPromptPart

from perdure import tool
from perdure.errors import ModelFailed
from perdure.harness.prompt import CUT_OFF
from perdure.models.base import Delta, Item, Prompt, TextDelta, UsageSoFar
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import ModelOutcome
from perdure.testing import ScriptedModel
from tests.harness.test_usage import TOLD
from tests.support.lab import Lab
from tests.support.waiting import until

CONTINUES: dict[str, Any] = {"on_interrupted_reply": "continue"}
BROKEN = ModelFailed("The connection is gone.", transient=True)


@tool(effects="pure")
def look() -> str:
    return "seen"


class Interrupted:
    """Streams these pieces, and breaks off when it is told to; until then it says nothing more."""

    def __init__(self, *pieces: Delta) -> None:
        self.pieces = pieces
        self.prompts: list[Prompt] = []
        self.breaks = asyncio.Event()

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Item, None]:
        self.prompts.append(prompt)
        for piece in self.pieces:
            yield piece
        yield UsageSoFar(TOLD)
        await self.breaks.wait()
        raise BROKEN


PIECES = ("message.appended", "reasoning.appended", "action.input.appended")


async def interrupted(
    it: Lab, delivery: DeliveryRef, *pieces: Delta | str, generation: int = 1, breaks: bool = False
) -> Interrupted:
    """An attempt that ends when readers have seen these pieces: it is stopped, or its stream breaks."""
    model = Interrupted(*(TextDelta(piece) if isinstance(piece, str) else piece for piece in pieces))
    it.models.now = model
    before = await pieces_seen(it)
    attempt = asyncio.create_task(it.model(delivery, generation=generation))
    kinds = len({type(each) for each in model.pieces})
    await until(lambda: bool(model.prompts), "the model to be asked")
    while await pieces_seen(it) < before + kinds:
        await asyncio.sleep(0.005)
    model.breaks.set() if breaks else attempt.cancel()
    with pytest.raises(ModelFailed if breaks else asyncio.CancelledError):
        await attempt
    return model


async def pieces_seen(it: Lab) -> int:
    return sum(each in PIECES for each in await it.types())


async def answered(it: Lab, delivery: DeliveryRef, *lines: Any, generation: int = 2) -> tuple[ModelOutcome, list[str]]:
    """An attempt that gets these replies, and what its requests ended with: who has said what."""
    it.models.now = model = ScriptedModel(lines)
    outcome = await it.model(delivery, generation=generation)
    return outcome, tail(model.prompts[-1].messages)


def tail(messages: Sequence[ModelMessage]) -> list[str]:
    """The messages after the first one, without the marks of notes."""
    found: list[str] = []
    for message in messages[1:]:
        for part in message.parts:
            if isinstance(part, UserPromptPart):
                assert isinstance(part.content, str)
                found.append("cut off" if CUT_OFF in part.content else f"user: {part.content}")
            elif isinstance(part, TextPart):
                found.append(f"model: {part.content}")
            else:
                found.append(part.part_kind)
    return found


async def decisions(it: Lab) -> list[tuple[str, str, str]]:
    """What each takeover was told to have found and decided."""
    told = [each for each in await it.events() if each.type in ("step.superseded", "step.recovered")]
    return [(each.type, each.data["phase"], each.data["decision"]) for each in told if each.data]


CONTINUED = ("step.recovered", "provider_started", "continue")
RETRACTED = ("step.superseded", "provider_started", "retract")
ASKED = ("step.superseded", "before_provider", "ask")


async def message(it: Lab) -> str:
    """The message that readers got; it is the text that they have seen grow."""
    grown = ""
    for event in await it.events():
        data = event.data or {}
        if event.type in ("step.superseded", "step.started"):
            grown = ""
        grown += data["messageDelta"] if event.type == "message.appended" else ""
    [completed] = await it.emitted("message.completed")
    assert completed["message"] == grown
    return grown
