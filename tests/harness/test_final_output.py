"""A turn that has to hand over a result of a certain shape."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from perdure import Agent, Limits, tool
from perdure.errors import InvalidDeclaration
from perdure.harness.tools.builtin import NOT_COMPARED
from perdure.protocol.requests import Calls, Finished
from perdure.testing import ScriptedModel, call, play
from tests.support.lab import YES, lab
from tests.support.tools import pay

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
}
GOOD = call("final_output", city="Oslo", degrees=3)
BAD = call("final_output", city="Oslo", degrees="cold")


@tool
def look() -> str:
    return "3 degrees"


async def test_a_result_that_fits_ends_the_turn() -> None:
    model = ScriptedModel([["Here.", GOOD], "Bye."])
    async with lab(model) as it:
        outcome = await it.model(await it.deliver("Weather?", output_schema=SCHEMA))

        assert isinstance(outcome, Finished)
        assert (await it.types())[-6:] == [
            "message.appended",
            "message.completed",
            "step.completed",
            "result.completed",
            "turn.completed",
            "session.waiting",
        ]
        assert await it.emitted("result.completed") == [
            {"result": {"city": "Oslo", "degrees": 3}, "sequence": 0, "stepIndex": 0, "turnId": "turn_0"}
        ]
        assert (await it.emitted("message.completed"))[0]["finishReason"] == "tool-calls"
        await it.model(await it.deliver("Thanks"), turn=1)
        assert [tool.name for tool in model.prompts[0].tools] == ["final_output"]
        assert model.prompts[1].tools == [], "the schema was in force for one turn"
        answer = model.prompts[1].messages[1].parts
        assert [part.content for part in answer] == ["Here.", '{"city": "Oslo", "degrees": 3}']  # type: ignore


async def test_a_result_that_does_not_fit_is_sent_back() -> None:
    model = ScriptedModel([BAD, GOOD])
    async with lab(model) as it:
        delivery = await it.deliver("Weather?", output_schema=SCHEMA)
        assert await it.calls(delivery) == ()
        assert isinstance(await it.model(delivery, step=1), Finished)

        (part,) = model.prompts[1].messages[-1].parts
        assert str(part.content).endswith('$.degrees: "cold" is not of type "integer"')  # type: ignore[union-attr]
        assert (await it.emitted("result.completed"))[0]["result"]["degrees"] == 3
        assert not {"actions.requested", "action.result", "action.input.appended"} & set(await it.types())


async def test_three_tries_are_enough() -> None:
    async with lab([BAD, BAD, BAD, "Hello"]) as it:
        delivery = await it.deliver("Weather?", output_schema=SCHEMA)
        for step in range(2):
            assert isinstance(await it.model(delivery, step=step), Calls)

        outcome = await it.model(delivery, step=2)

        assert isinstance(outcome, Finished)
        assert outcome.failure is not None
        assert outcome.failure.code == "OUTPUT_SCHEMA_NOT_FULFILLED"
        assert (await it.types())[-4:] == ["step.completed", "step.failed", "turn.failed", "session.waiting"]
        assert await it.model(delivery, step=2, generation=2) == outcome


async def test_of_one_reply_three_results_are_compared_and_the_others_are_not() -> None:
    model = ScriptedModel([[call("look"), *[BAD] * 5, GOOD], GOOD])
    async with lab(model, look) as it:
        delivery = await it.deliver("Weather?", output_schema=SCHEMA)
        (ref,) = await it.calls(delivery)
        await it.tool(ref)
        await it.model(delivery, step=1)

        _, *results = [str(part.content) for part in model.prompts[1].messages[-1].parts]  # type: ignore
        assert ['"cold" is not of type' in result for result in results] == [True] * 3 + [False] * 3
        assert results[3:] == [NOT_COMPARED] * 3
        assert len(await it.emitted("result.completed")) == 1


@pytest.mark.parametrize("reply", [[BAD, GOOD], [GOOD, BAD], [GOOD] * 5])
async def test_tries_beside_a_result_that_fits_leave_history_with_it(reply: Any) -> None:
    model = ScriptedModel([reply, "Bye."])
    async with lab(model) as it:
        assert isinstance(await it.model(await it.deliver("Weather?", output_schema=SCHEMA)), Finished)

        await it.model(await it.deliver("Thanks"), turn=1)

        kinds = [part.part_kind for message in model.prompts[1].messages for part in message.parts]
        assert kinds == ["user-prompt", "text", "user-prompt"]


async def test_a_result_counts_among_the_calls_of_its_step() -> None:
    model = ScriptedModel([[BAD, call("look"), call("look")], [call("look"), call("look"), GOOD], GOOD])
    async with lab(model, look, limits=Limits(calls_per_step=2)) as it:
        delivery = await it.deliver("Weather?", output_schema=SCHEMA)
        for step, runs in enumerate((1, 2)):
            refs = await it.calls(delivery, step=step)
            assert len(refs) == runs
            for ref in refs:
                await it.tool(ref, step=step)

        await it.model(delivery, step=2)

        (*_, refused) = [str(part.content) for part in model.prompts[2].messages[-1].parts]  # type: ignore
        assert refused.startswith("This call was not executed: one step may make at most 2 calls.")
        assert len(await it.emitted("result.completed")) == 1


async def test_plain_text_is_no_result_but_stays_in_history() -> None:
    model = ScriptedModel(["It is cold.", "Bye."])
    async with lab(model) as it:
        await it.model(await it.deliver("Weather?", output_schema=SCHEMA))

        (emitted,) = await it.emitted("turn.failed")
        assert emitted["message"] == "The agent could not produce a result matching the requested schema."
        assert (await it.types())[-5:-3] == ["message.completed", "step.completed"]
        await it.model(await it.deliver("Why?"), turn=1)
        assert len(model.prompts[1].messages) == 3


async def test_other_calls_of_the_step_run_first() -> None:
    model = ScriptedModel([[call("look"), GOOD], "Bye."])
    async with lab(model, look) as it:
        delivery = await it.deliver("Weather?", output_schema=SCHEMA)
        (ref,) = await it.calls(delivery)
        assert "result.completed" not in await it.types()
        await it.tool(ref)

        outcome = await it.model(delivery, step=1)

        assert isinstance(outcome, Finished)
        assert len(model.prompts) == 1, "the model is not asked again"
        assert (await it.types())[-5:] == [
            "action.result",
            "step.completed",
            "result.completed",
            "turn.completed",
            "session.waiting",
        ]
        before = await it.events()
        assert await it.model(delivery, step=1, generation=2) == outcome
        assert await it.events() == before
        await it.model(await it.deliver("Thanks"), turn=1)
        assert [type(message).__name__ for message in model.prompts[1].messages] == [
            "ModelRequest",
            "ModelResponse",
            "ModelRequest",
            "ModelResponse",
            "ModelRequest",
        ]


async def test_a_result_beside_a_request_to_people_is_too_early() -> None:
    model = ScriptedModel([[GOOD, call("pay", amount=5)], GOOD])
    async with lab(model, pay, can_ask=True) as it:
        open = await it.parked(await it.deliver("Pay", output_schema=SCHEMA))
        answer = await it.answer((open[0], YES))
        resumed = await it.resume(answer, open=open)
        await it.run_approved(resumed.calls[0])

        assert isinstance(await it.model(answer, turn=1), Finished)

        early, paid = [part.content for part in model.prompts[1].messages[-1].parts]  # type: ignore[union-attr]
        assert "This result was not accepted" in str(early)  # type: ignore
        assert paid == "paid 5"
        assert len(await it.emitted("result.completed")) == 1, "the schema is still in force after the answer"


@pytest.mark.parametrize(
    "schema", [{"type": "array", "items": {"$ref": "#/$defs/N"}, "$defs": {"N": {"type": "integer"}}}]
)
async def test_what_is_no_object_travels_in_one(schema: Any) -> None:
    model = ScriptedModel([call("final_output"), call("final_output", value=["x"]), call("final_output", value=[1, 2])])
    async with lab(model) as it:
        delivery = await it.deliver("Count", output_schema=schema)
        for step in range(3):
            await it.model(delivery, step=step)

        assert model.prompts[0].tools[0].parameters_json_schema["$defs"] == schema["$defs"]
        assert (await it.emitted("result.completed"))[0]["result"] == [1, 2]


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"type": "object", "properties": {"a": {"type": ["string", 4]}}}]
)
async def test_a_schema_that_is_none_fails_the_turn_before_the_model_is_asked(schema: Any) -> None:
    model = ScriptedModel([GOOD])
    async with lab(model) as it:
        await it.model(await it.deliver("Weather?", output_schema=schema))

        assert (await it.emitted("turn.failed"))[0]["code"] == "OUTPUT_SCHEMA_INVALID"
        assert model.prompts == []


async def test_a_schema_never_sends_us_to_the_network() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}}
    model = ScriptedModel([call("final_output", a=1)])
    async with lab(model) as it:
        await it.model(await it.deliver("Go", output_schema=schema))

        assert (await it.emitted("turn.failed"))[0]["code"] == "OUTPUT_SCHEMA_INVALID"
        assert model.prompts == []


async def test_a_result_that_takes_too_long_to_compare_fails_the_turn_once() -> None:
    many = [{"not": {"$ref": "#/$defs/one"}, "title": str(n)} for n in range(50)]
    one = {"enum": [[0, n] for n in range(1, 600)]}
    schema = {"type": "array", "items": {"allOf": many}, "$defs": {"one": one}}
    model = ScriptedModel([call("final_output", value=[[0, 0]] * 40_000)])
    async with lab(model) as it, beating() as beats:
        delivery = await it.deliver("Count", output_schema=schema)
        outcome = await it.model(delivery)

        assert (await it.emitted("turn.failed"))[0]["code"] == "OUTPUT_SCHEMA_INVALID"
        assert (await it.types())[-1] == "session.waiting"
        assert await it.model(delivery, generation=2) == outcome
        assert len(model.prompts) == 1
        assert len(beats) > 10, "others continued meanwhile"


async def test_where_the_reasons_have_no_end_the_model_learns_that_it_does_not_fit() -> None:
    kinds = [{"properties": {"kind": {"const": n}, "inner": {"$ref": "#"}}, "required": ["kind"]} for n in range(6)]
    wrong: Any = {"kind": 7}
    for _ in range(20):
        wrong = {"kind": 5, "inner": wrong}
    model = ScriptedModel([call("final_output", value=wrong), call("final_output", value={"kind": 5})])
    async with lab(model) as it:
        delivery = await it.deliver("Go", output_schema={"anyOf": kinds})
        assert await it.calls(delivery) == ()
        await it.model(delivery, step=1)

        (part,) = model.prompts[1].messages[-1].parts
        assert "$: does not fit" in str(part.content)  # type: ignore[union-attr]
        assert (await it.emitted("result.completed"))[0]["result"] == {"kind": 5}


@asynccontextmanager
async def beating() -> AsyncGenerator[list[None]]:
    """How often the loop had time for others."""
    beats: list[None] = []

    async def beat() -> None:
        while True:
            beats.append(None)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(beat())
    try:
        yield beats
    finally:
        task.cancel()


async def test_a_task_hands_over_what_its_agent_declares() -> None:
    agent = Agent("weather", output_schema=SCHEMA)

    played = await play(agent, "Weather?", model=ScriptedModel([GOOD]), mode="task")
    talked = await play(agent, "Weather?", model=ScriptedModel(["Cold."]))

    assert played.result == {"city": "Oslo", "degrees": 3}
    assert played.types[-3:] == ("result.completed", "turn.completed", "session.completed")
    assert (talked.text, talked.result) == ("Cold.", None)


def test_an_agent_cannot_declare_a_schema_that_no_result_can_be_compared_with() -> None:
    with pytest.raises(InvalidDeclaration, match="refers to itself without end"):
        Agent("weather", output_schema={"$ref": "#"})


def test_the_name_of_the_tool_is_taken() -> None:
    @tool
    def final_output() -> None: ...

    with pytest.raises(InvalidDeclaration, match="taken by the structured result"):
        Agent("weather", tools=[final_output])
