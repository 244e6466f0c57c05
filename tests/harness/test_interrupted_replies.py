"""A reply that breaks off after readers have seen a part of it, and an agent whose model goes on from there."""

from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, ThinkingPart, UserPromptPart
from pydantic_ai.usage import RequestUsage

from perdure import Durability
from perdure.harness.prompt import CUT_OFF
from perdure.models.base import ReasoningDelta, TextDelta
from perdure.protocol.requests import Calls, Finished
from perdure.store.lifecycle import NewFork
from perdure.testing import ScriptedModel, call
from tests.harness.test_usage import REPLIED, TOLD, used
from tests.support.lab import SESSION, TEXT_TURN, lab

from .interruptions import ASKED, BROKEN, CONTINUED, CONTINUES, answered, decisions, interrupted, look, message, tail

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
