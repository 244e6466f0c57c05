from pydantic import BaseModel

from perdure import Agent, SessionView, State, ToolContext, tool
from perdure.agents.demo import NOTES, agent
from perdure.testing import ScriptedModel, call, play


class Cart(BaseModel):
    items: list[str] = []


CART = State("cart", Cart)


@tool
async def add_item(ctx: ToolContext, sku: str) -> str:
    """Put something into the cart."""
    cart = await CART.update(ctx, lambda cart: Cart(items=[*cart.items, sku]))
    return f"{len(cart.items)} item(s)"


async def greet(session: SessionView) -> str:
    return f"You serve {session.auth.principal_id} in turn {session.turn}."


SHOP = Agent("shop", tools=[add_item], instructions=greet)


async def test_an_author_can_play_an_agent() -> None:
    model = ScriptedModel([call("add_item", sku="tea"), "Added.", "Bye."])

    played = await play(SHOP, "Tea, please", "Thanks", model=model)

    assert played.texts == ("Added.", "Bye.")
    assert played.text == "Bye."
    assert [(each.tool, each.input, each.output) for each in played.tool_calls] == [
        ("add_item", {"sku": "tea"}, "1 item(s)")
    ]
    assert played.state(CART).items == ["tea"]
    assert played.types[-1] == "session.waiting"


async def test_instructions_are_made_anew_for_each_step() -> None:
    model = ScriptedModel(["One", "Two"])

    await play(SHOP, "Hi", "Hi", model=model)

    said = [prompt.messages[-1].instructions for prompt in model.prompts]  # type: ignore[union-attr]
    assert said == ["You serve local-dev in turn 0.", "You serve local-dev in turn 1."]


async def test_the_demo_agent_remembers_in_two_rounds() -> None:
    played = await play(agent, "Remember that tea is hot, then tell me the time")

    assert [each.tool for each in played.tool_calls] == ["remember_note", "current_time"]
    assert played.state(NOTES) == ["tea is hot"]
    assert played.text.startswith("remember_note: Noted.")


async def test_a_script_that_is_too_short_fails_the_turn_and_says_so() -> None:
    played = await play(SHOP, "Hi", model=ScriptedModel([]))

    assert played.types[-2:] == ("turn.failed", "session.waiting")
    assert "The script has 0 replies" in str(played.events[-2].data)
