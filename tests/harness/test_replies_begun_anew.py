"""What is not gone on with after it broke off, what ends such a turn, and what is reported of it."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from perdure import Agent, Compaction, Limits
from perdure.errors import InvalidDeclaration, ModelFailed, TurnCancelled
from perdure.models.base import Delta, Prompt, ReasoningDelta, TextDelta, ToolInputDelta
from perdure.protocol.requests import Finished, ModelOutcome
from perdure.runtime.reports.journal import journal
from perdure.store.attempts import AttemptQuery
from perdure.store.sqlite.database import SqliteTransaction
from perdure.testing import ScriptedModel, call
from tests.harness.test_compaction import texts
from tests.harness.test_deadline import HOUR, much_later
from tests.harness.test_final_output import SCHEMA
from tests.harness.test_usage import REPLIED, TOLD
from tests.support.given import read_session
from tests.support.lab import SESSION, lab
from tests.support.waiting import until

from .interruptions import CONTINUES, RETRACTED, Interrupted, answered, decisions, interrupted, look, message, tail

# --- what is not continued ------------------------------------------------------------------------------------


async def test_by_default_it_is_retracted() -> None:
    async with lab([]) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")

        _, asked = await answered(it, delivery, "Once upon a time.")

        assert asked == []
        assert await decisions(it) == [RETRACTED]
        assert await message(it) == "Once upon a time."


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param((TextDelta("Let me "), ToolInputDelta("c", "look", "{")), id="a call"),
        pytest.param((ReasoningDelta("A tale?"),), id="a thought alone"),
        pytest.param((TextDelta(" \n"),), id="a blank"),
    ],
)
async def test_a_part_that_is_no_text_is_retracted(pieces: tuple[Delta, ...]) -> None:
    async with lab([], look, **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, *pieces)

        _, asked = await answered(it, delivery, "Once upon a time.")

        assert asked == []
        assert await decisions(it) == [RETRACTED]
        assert await message(it) == "Once upon a time."


async def test_what_was_retracted_is_not_gone_on_with() -> None:
    """An attempt of a build with another declaration has retracted it."""
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")
        new, it.agent = it.agent, replace(it.agent, on_interrupted_reply="retract")
        it.harness = it.worker()
        await interrupted(it, delivery, "There", generation=2)
        it.agent = new
        it.harness = it.worker()

        _, asked = await answered(it, delivery, " was.", generation=3)

        assert asked == ["model: There", "cut off"]
        assert await message(it) == "There was."


async def test_a_turn_with_a_result_begins_its_reply_anew() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Weather?", output_schema=SCHEMA)
        await interrupted(it, delivery, "It is")

        _, asked = await answered(it, delivery, ["Here.", call("final_output", city="Oslo", degrees=3)])

        assert asked == []
        assert await decisions(it) == [RETRACTED]
        assert await message(it) == "Here."


async def test_a_message_that_enters_the_turn_is_answered_by_all_of_the_reply() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")
        await it.steer("In French")

        it.models.now = model = ScriptedModel(["Il était"])
        await it.model(delivery, generation=2)

        assert texts(model.prompts[0]) == ["Hi", "In French"]
        assert tail(model.prompts[0].messages) == []
        assert await decisions(it) == [RETRACTED]
        # From here on it is the reply to both.
        assert await message(it) == "Il était"


async def test_a_message_that_comes_while_it_goes_on_enters_the_turn_after_it() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")
        it.models.now = model = ScriptedModel([" a time."])
        answering = model.stream

        async def stream(prompt: Prompt) -> AsyncGenerator[Any, None]:
            await it.steer("In French")
            async for each in answering(prompt):
                yield each

        model.stream = stream  # type: ignore[method-assign]
        await it.model(delivery, generation=2)
        it.models.now = second = ScriptedModel(["Il était"])
        await it.model(step=1)

        assert tail(second.prompts[0].messages) == ["model: Once upon a time.", "user: In French"]


# --- what ends the turn ---------------------------------------------------------------------------------------


async def test_at_the_deadline_nothing_is_continued() -> None:
    async with lab([], limits=HOUR, **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")
        much_later(it)
        it.models.now = model = ScriptedModel(["never"])

        outcome = await it.model(delivery, generation=2)

        assert isinstance(outcome, Finished)
        assert outcome.failure is not None
        assert outcome.failure.code == "TURN_DEADLINE_EXCEEDED"
        assert model.prompts == []
        assert await decisions(it) == [RETRACTED]


async def test_a_cancelled_turn_is_not_continued() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")
        await it.request_cancel()
        it.models.now = model = ScriptedModel(["never"])

        with pytest.raises(TurnCancelled):
            await it.model(delivery, generation=2)

        await it.cancel(delivery)
        assert model.prompts == []
        assert await decisions(it) == []
        assert (await it.types())[-2:] == ["turn.cancelled", "session.waiting"]


async def test_a_reply_that_is_cancelled_while_it_goes_on_is_kept_whole() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")
        it.models.now = model = ScriptedModel([" a time."])
        answering = model.stream

        async def stream(prompt: Prompt) -> AsyncGenerator[Any, None]:
            await it.request_cancel()
            async for each in answering(prompt):
                yield each

        model.stream = stream  # type: ignore[method-assign]
        outcome = await it.model(delivery, generation=2)

        assert isinstance(outcome, Finished)
        assert outcome.failure is not None
        assert outcome.failure.code == "TURN_CANCELLED"
        assert await message(it) == "Once upon a time."


async def test_a_request_that_became_too_long_is_shortened_and_goes_on_nevertheless() -> None:
    long = "word " * 2_000
    too_long = ModelFailed("The model answered 400.", too_long=True, statusCode=400)
    async with lab([long, long], compaction=Compaction(context_window=100_000), **CONTINUES) as it:
        await it.model(await it.deliver(long))
        await it.model(await it.deliver(long), turn=1)
        delivery = await it.deliver("And?")

        async def attempt(generation: int) -> ModelOutcome:
            return await it.model(delivery, turn=2, generation=generation)

        it.models.now = first = Interrupted(TextDelta("Once upon"))
        dying = asyncio.create_task(attempt(1))
        await until(lambda: bool(first.prompts), "the model to be asked")
        while (await it.types())[-1] != "message.appended":
            await asyncio.sleep(0.005)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)

        it.models.now = model = ScriptedModel([too_long, "A summary.", " a time."])
        await attempt(2)

        *_, summary, last = model.prompts
        assert "Once upon" not in str(summary.messages)
        assert tail(last.messages)[-2:] == ["model: Once upon", "cut off"]
        assert (await it.emitted("message.completed"))[-1]["message"] == "Once upon a time."


# --- reports --------------------------------------------------------------------------------------------------


async def test_the_journal_and_the_attempts_tell_both() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")
        await interrupted(it, delivery, generation=2)
        [step] = await journal(it.store, await read_session(it.store, SESSION), None)
        assert (step["phase"], step["revision"], step["committed"]) == ("provider_started", 2, False)

        await answered(it, delivery, " a time.", generation=3)

        [step] = await journal(it.store, await read_session(it.store, SESSION), None)
        assert (step["phase"], step["revision"], step["committed"]) == ("committed", 3, True)
        rows = (await it.store.attempts.list(AttemptQuery(SESSION))).attempts
        assert [(each.number, each.status) for each in rows] == [(1, "cancelled"), (2, "cancelled"), (3, "succeeded")]
        assert [each.usage for each in rows] == [TOLD, TOLD, REPLIED]


async def test_a_first_attempt_reads_no_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs a turn nothing that its agent would continue."""
    asked: list[str] = []
    execute: Any = vars(SqliteTransaction)["_execute"]

    def noted(self: SqliteTransaction, query: str, values: Any) -> Any:
        asked.append(query)
        return execute(self, query, values)

    monkeypatch.setattr(SqliteTransaction, "_execute", noted)
    async with lab(["Hello"], **CONTINUES) as it:
        await it.model(await it.deliver("Hi"))

    assert "insert_event" in asked
    assert not {"pieces", "has_pieces"} & set(asked)


def test_a_third_way_is_refused() -> None:
    with pytest.raises(InvalidDeclaration, match="on_interrupted_reply is 'retract' or 'continue'"):
        Agent("tester", on_interrupted_reply="forget", limits=Limits())  # type: ignore[arg-type]
