import asyncio

import pytest
from pydantic import BaseModel

from perdure import Agent, Principal, RemoteAgent, SessionView, State, ToolContext, responders, tool
from perdure.agents.demo import NOTES, agent
from perdure.errors import ForbiddenResponder
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

    # What follows them is how the model knows notes of ours.
    said = [str(prompt.messages[-1].instructions).partition("\n\n")[0] for prompt in model.prompts]  # type: ignore
    assert said == ["You serve local-dev in turn 0.", "You serve local-dev in turn 1."]


async def test_what_a_tool_dispatches_is_shown_and_not_played() -> None:
    @tool(effects="idempotent")
    async def escalate(ctx: ToolContext, ticket: str) -> str:
        """Tell the clerk about a ticket."""
        return (await ctx.dispatch("clerk", "desk", {"ticket": ticket}, queue_mode="collect")).delivery_id

    played = await play(
        Agent("host", tools=[escalate]), "Hi", model=ScriptedModel([[call("escalate", ticket="7")], "Told."])
    )

    [handed] = played.dispatched
    assert (handed.agent, handed.to, handed.input, handed.queue_mode) == ("clerk", "desk", {"ticket": "7"}, "collect")
    assert played.text == "Told."


async def test_the_demo_agent_remembers_in_two_rounds() -> None:
    played = await play(agent, "Remember that tea is hot, then tell me the time")

    assert [each.tool for each in played.tool_calls] == ["remember_note", "current_time"]
    assert played.state(NOTES) == ["tea is hot"]
    assert played.text.startswith("remember_note: Noted.")


async def test_a_script_that_is_too_short_fails_the_turn_with_a_reason() -> None:
    played = await play(SHOP, "Hi", model=ScriptedModel([]))

    assert played.types[-2:] == ("turn.failed", "session.waiting")
    assert "The script has 0 replies" in str(played.events[-2].data)


@tool(approval="always", summary=lambda arguments: f"Pay {arguments['amount']} euros")
async def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


BANK = Agent("bank", tools=[pay])


async def test_a_play_stops_where_people_are_asked_and_continues_with_their_answers() -> None:
    model = ScriptedModel([call("pay", amount=5), "Paid.", "Bye."])

    played = await play(BANK, "Pay", "Thanks", model=model)
    assert [(each.tool, each.summary) for each in played.pending] == [("pay", "Pay 5 euros")]
    assert played.types[-2:] == ("turn.completed", "session.waiting")
    played = await played.answer("pay", "approve", arguments={"amount": 3})

    assert played.pending == ()
    assert played.texts == ("Paid.", "Bye.")
    assert [(each.status, each.output) for each in played.tool_calls] == [("completed", "paid 3")]


async def test_a_play_can_deny_and_let_time_run_out() -> None:
    for ends in ("deny", "expire"):
        asks = tool(name="pay", approval="always", expires=60)(pay.function)
        model = ScriptedModel([call("pay", amount=5), "Then not."])
        played = await play(Agent("bank", tools=[asks]), "Pay", model=model)

        played = await (played.answer("pay", "deny", reason="no money") if ends == "deny" else played.expire())

        assert played.text == "Then not."
        assert [each.status for each in played.tool_calls] == ["rejected"]


async def test_a_played_question_is_answered_with_an_option_or_text() -> None:
    model = ScriptedModel([call("ask_question", prompt="Which?", options=["red"]), "Nice."])
    played = await play(BANK, "Go", model=model)

    played = await played.answer(played.pending[0].request_id, "red")

    assert model.prompts[1].messages[-1].parts[0].content == {"optionId": "red", "status": "answered"}  # type: ignore
    assert played.text == "Nice."


async def test_a_message_may_deny_what_is_asked() -> None:
    model = ScriptedModel([call("pay", amount=5), "As you wish."])

    played = await play(Agent("bank", tools=[pay], while_waiting="deny"), "Pay", "No, leave it", model=model)

    assert (played.pending, played.text) == ((), "As you wish.")
    said = [part.content for part in model.prompts[1].messages[-1].parts]  # type: ignore[union-attr]
    assert said[1] == "No, leave it"


def user_named(name: str, role: str) -> Principal:
    return Principal(principal_id=name, principal_type="user", authenticator="jwt", attributes={"role": role})


async def test_a_play_knows_who_may_answer_and_how_many_must_agree() -> None:
    asks = tool(name="pay", approval="always", responders=responders.role("boss", quorum=2))(pay.function)
    model = ScriptedModel([call("pay", amount=5), "Paid."])
    played = await play(Agent("bank", tools=[asks]), "Pay", model=model)

    with pytest.raises(ForbiddenResponder):
        await played.answer("pay", "approve", by=user_named("eve", "guest"))
    played = await played.answer("pay", "approve", by=user_named("ada", "boss"))
    assert [asked.tool for asked in played.pending] == ["pay"]
    played = await played.answer("pay", "approve", by=user_named("bob", "boss"))

    assert (played.pending, played.text) == ((), "Paid.")


async def test_a_play_counts_a_service_and_a_user_of_one_name_as_two() -> None:
    asks = tool(name="pay", approval="always", responders=responders.role("boss", quorum=2))(pay.function)
    model = ScriptedModel([call("pay", amount=5), "Paid."])
    played = await play(Agent("bank", tools=[asks]), "Pay", model=model)
    user = user_named("ada", "boss")

    played = await played.answer("pay", "approve", by=user)
    assert [asked.tool for asked in played.pending] == ["pay"]
    played = await played.answer("pay", "approve", by=user.model_copy(update={"authenticator": "api-key"}))

    assert (played.pending, played.text) == ((), "Paid.")


async def test_answers_may_come_one_after_the_other() -> None:
    model = ScriptedModel([[call("pay", amount=1), call("pay", amount=2)], "Done."])

    played = await play(BANK, "Pay", model=model)
    played = await played.answer("pay", "approve")
    assert len(played.pending) == 1
    played = await played.answer("pay", "deny")

    assert [each.status for each in played.tool_calls] == ["completed", "rejected"]
    assert played.text == "Done."


async def test_calls_are_in_the_order_in_which_the_model_asked_for_them() -> None:
    second_is_done = asyncio.Event()

    @tool
    async def slow() -> str:
        await second_is_done.wait()
        return "slow"

    @tool
    async def quick() -> str:
        second_is_done.set()
        return "quick"

    asks = [call("pay", amount=1), call("slow"), call("fly"), call("quick"), call("pay", amount="much")]
    model = ScriptedModel([asks, call("quick"), "Done."])

    played = await play(Agent("mixed", tools=[slow, quick, pay]), "Go", model=model)
    played = await played.answer("pay", "approve")

    assert [(each.tool, each.input, each.status) for each in played.tool_calls] == [
        ("pay", {"amount": 1}, "completed"),
        ("slow", {}, "completed"),
        ("fly", {}, "failed"),
        ("quick", {}, "completed"),
        ("pay", {"amount": "much"}, "failed"),
        ("quick", {}, "completed"),
    ]


async def test_a_played_agent_hands_work_to_others() -> None:
    helper = Agent(name="helper")
    agent = Agent(name="boss", subagents=[helper])
    lines = [[call("helper", message="One"), call("helper", message="Two")], "Done one", "Done two", "All done"]

    played = await play(agent, "Go", model=ScriptedModel(lines))

    assert [each.output for each in played.tool_calls] == ["Done one", "Done two"]
    assert played.text == "All done"


async def test_a_remote_agent_cannot_be_played() -> None:
    agent = Agent(name="boss", subagents=[RemoteAgent("away", url="https://agents.example.com", description="Far.")])

    with pytest.raises(AssertionError, match="no other servers: put an Agent"):
        await play(agent, "Go", model=ScriptedModel([call("away", message="Hi")]))
