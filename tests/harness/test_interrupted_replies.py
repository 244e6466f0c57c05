"""A reply that breaks off after readers have seen a part of it, and an agent whose model goes on from there."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ThinkingPart, UserPromptPart
from pydantic_ai.usage import RequestUsage

from perdure import Agent, Compaction, Durability, Limits, tool
from perdure.errors import InvalidDeclaration, ModelFailed, TurnCancelled
from perdure.harness.prompt import CUT_OFF
from perdure.models.base import Delta, Item, Prompt, ReasoningDelta, TextDelta, ToolInputDelta, UsageSoFar
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import Calls, Finished, ModelOutcome
from perdure.runtime.reports.journal import journal
from perdure.store.attempts import AttemptQuery
from perdure.store.lifecycle import NewFork
from perdure.store.sqlite.database import SqliteTransaction
from perdure.testing import ScriptedModel, call
from tests.harness.test_compaction import texts
from tests.harness.test_deadline import HOUR, much_later
from tests.harness.test_final_output import SCHEMA
from tests.harness.test_usage import REPLIED, TOLD, used
from tests.support.given import read_session
from tests.support.lab import SESSION, TEXT_TURN, Lab, lab
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


# --- what readers and the model see -------------------------------------------------------------------------


async def test_the_model_goes_on_from_what_readers_have_seen() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")

        outcome, asked = await answered(it, delivery, " a time.")

        assert isinstance(outcome, Finished)
        assert outcome.failure is None
        assert asked == ["model: Once upon", "cut off"]
        assert await message(it) == "Once upon a time."
        assert await it.types() == [*TEXT_TURN[:5], "step.recovered", *TEXT_TURN[4:]]
        assert (await it.emitted("step.recovered")) == [
            {
                "attempt": 2,
                "phase": "provider_started",
                "decision": "continue",
                "sequence": 0,
                "stepIndex": 0,
                "turnId": "turn_0",
            }
        ]


async def test_the_note_has_the_mark_of_the_session_and_the_instructions_come_with_it() -> None:
    async with lab([], instructions="Be brief.", **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")
        it.models.now = model = ScriptedModel([" a time."])

        await it.model(delivery, generation=2)

        *before, last = model.prompts[0].messages
        assert isinstance(last, ModelRequest)
        assert (last.instructions or "").startswith("Be brief.")
        mark = (last.instructions or "").rpartition("Never mention ")[2].rstrip(".")
        [note] = last.parts
        assert isinstance(note, UserPromptPart)
        assert note.content == f"<note {mark}>\n{CUT_OFF}\n</note {mark}>"
        assert [type(each) for each in before] == [ModelRequest, ModelResponse]


async def test_later_turns_hold_one_message_and_no_note() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")
        await answered(it, delivery, " a time.")
        it.models.now = model = ScriptedModel(["Bye"])

        await it.model(await it.deliver("And?"), turn=1)

        assert tail(model.prompts[0].messages) == ["model: Once upon a time.", "user: And?"]


async def test_a_fork_has_the_whole_message() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")
        await answered(it, delivery, " a time.")

        await it.store.fork(NewFork("f", "token of f", SESSION, 0))

        [reply] = [each for each in await it.store.records("f") if each.key == "reply"]
        assert [part["content"] for part in reply.body["response"]["parts"]] == ["Once upon a time."]


async def test_a_stream_that_breaks_is_continued_like_that_of_a_dead_worker() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon", breaks=True)

        await answered(it, delivery, " a time.")

        assert await message(it) == "Once upon a time."
        assert await decisions(it) == [CONTINUED]


async def test_the_usage_of_all_attempts_is_counted() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once ")
        await interrupted(it, delivery, "upon", generation=2)

        await answered(it, delivery, " a time.", generation=3)

        assert await used(it) == TOLD + TOLD + REPLIED


async def test_a_reply_goes_on_from_all_that_several_attempts_have_streamed() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once")
        second = await interrupted(it, delivery, " upon", generation=2)
        third = await interrupted(it, delivery, " a", generation=3)

        _, asked = await answered(it, delivery, " time.", generation=4)

        assert tail(second.prompts[0].messages) == ["model: Once", "cut off"]
        assert tail(third.prompts[0].messages) == ["model: Once upon", "cut off"]
        assert asked == ["model: Once upon a", "cut off"]
        assert await message(it) == "Once upon a time."
        assert await decisions(it) == [CONTINUED, CONTINUED, CONTINUED]


async def test_a_death_before_the_next_word_leaves_what_was_said_before() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon")
        await interrupted(it, delivery, generation=2)

        _, asked = await answered(it, delivery, " a time.", generation=3)

        assert asked == ["model: Once upon", "cut off"]
        assert await message(it) == "Once upon a time."


async def test_a_death_before_the_first_word_asks_as_if_nothing_had_been() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery)

        _, asked = await answered(it, delivery, "Once upon a time.")

        assert asked == []
        assert await decisions(it) == [ASKED]
        assert await message(it) == "Once upon a time."


async def test_the_attempts_at_a_reply_have_the_bound_of_the_agent() -> None:
    """Temporal counts those whose worker dies; those whose stream breaks are counted here."""
    async with lab([], durability=Durability(max_attempts=3), **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once", breaks=True)
        await interrupted(it, delivery, " upon", generation=2, breaks=True)

        outcome, asked = await answered(it, delivery, BROKEN, generation=6)

        assert isinstance(outcome, Finished)
        assert outcome.failure is not None
        assert outcome.failure.code == "MODEL_CALL_FAILED"
        assert asked == ["model: Once upon", "cut off"]


# --- what the model says --------------------------------------------------------------------------------------


async def test_a_reply_that_goes_on_with_a_call_is_one_reply_with_its_call() -> None:
    async with lab([], look, **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Let me")
        outcome, _ = await answered(it, delivery, [" look.", call("look")])
        assert isinstance(outcome, Calls)
        await it.tool(outcome.calls[0])
        it.models.now = model = ScriptedModel(["Seen."])

        await it.model(step=1)

        assert tail(model.prompts[0].messages) == ["model: Let me look.", "tool-call", "tool-return"]
        assert [each["message"] for each in await it.emitted("message.completed")] == ["Let me look.", "Seen."]


async def test_a_call_alone_is_put_behind_what_was_said() -> None:
    async with lab([], look, **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Let me look.")

        outcome, _ = await answered(it, delivery, call("look"))

        assert isinstance(outcome, Calls)
        assert await message(it) == "Let me look."


async def test_a_reply_from_which_nothing_was_missing_is_complete() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon a time.")

        # The model is asked a second time, because an empty reply is often a mistake of the provider.
        outcome, _ = await answered(it, delivery, "", "")

        assert isinstance(outcome, Finished)
        assert outcome.failure is None
        assert await message(it) == "Once upon a time."
        assert await used(it) == TOLD + REPLIED + REPLIED


async def test_a_line_break_is_a_part_of_the_message() -> None:
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, "Once upon a time.")

        await answered(it, delivery, "\n")

        assert await message(it) == "Once upon a time.\n"


async def test_thoughts_are_shown_whole_and_the_model_gets_back_only_its_own() -> None:
    thinking = ModelResponse(
        parts=[ThinkingPart("Go on.", signature="signed"), TextPart(" a time.")],
        usage=RequestUsage(input_tokens=10, output_tokens=5),
        finish_reason="stop",
    )
    async with lab([], **CONTINUES) as it:
        delivery = await it.deliver("Hi")
        await interrupted(it, delivery, ReasoningDelta("A tale? "), TextDelta("Once upon"))

        _, asked = await answered(it, delivery, thinking)

        # A provider that signs thoughts refuses a part of one.
        assert asked == ["model: Once upon", "cut off"]
        assert await message(it) == "Once upon a time."
        assert [each["reasoning"] for each in await it.emitted("reasoning.completed")] == ["A tale? Go on."]
        it.models.now = model = ScriptedModel(["Bye"])
        await it.model(await it.deliver("And?"), turn=1)
        [stored] = [each for each in model.prompts[0].messages if isinstance(each, ModelResponse)]
        assert [part.part_kind for part in stored.parts] == ["thinking", "text"]


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
