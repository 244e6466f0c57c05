"""Which calls run, which wait for people, which are refused; and how a turn parks."""

from dataclasses import replace
from typing import Any

import pytest

from perdure import Agent, Call, Decision, SessionView, responders, tool
from perdure.protocol.inputs import digest
from perdure.protocol.requests import Calls, Delegated, Parked, Reminder
from perdure.protocol.wire import JsonObject
from perdure.testing import ScriptedModel, call, play
from tests.support.lab import SESSION, lab
from tests.support.tools import pay


@tool(effects="pure")
def look() -> str:
    """Look."""
    return "seen"


ASKED = [
    "session.started",
    "turn.started",
    "message.received",
    "step.started",
    "message.appended",
    "message.completed",
    "step.completed",
    "input.requested",
    "turn.completed",
    "session.waiting",
]


async def test_a_turn_that_only_asks_parks_in_the_commit_of_its_reply() -> None:
    async with lab([["Paying.", call("pay", amount=5)]], pay, can_ask=True) as it:
        delivery = await it.deliver("Pay")
        outcome = await it.model(delivery)

        assert isinstance(outcome, Parked)
        assert await it.types() == ASKED
        assert await it.session_status() == "waiting"
        (emitted,) = await it.emitted("input.requested")
        (request,) = emitted["requests"]
        assert request == {
            "requestId": outcome.open[0].request_id,
            "prompt": "Approve tool call: pay",
            "action": {"kind": "tool-call", "callId": "call_0_1", "toolName": "pay", "input": {"amount": 5}},
            "display": "confirmation",
            "allowFreeform": False,
            "options": [{"id": "approve", "label": "Yes"}, {"id": "deny", "label": "No"}],
        }
        details: JsonObject = {"kind": "approval", "responders": {"kind": "requester", "values": [], "quorum": 1}}
        assert emitted["details"] == {request["requestId"]: details}
        assert (emitted["turnId"], emitted["stepIndex"]) == ("turn_0", 0)
        row = await it.store.input(outcome.open[0].request_id)
        assert row is not None
        assert (row.status, row.request.digest) == ("open", digest({"amount": 5}))


async def test_a_second_attempt_does_not_ask_again() -> None:
    model = ScriptedModel([call("pay", amount=5)])
    async with lab(model, pay, can_ask=True) as it:
        delivery = await it.deliver("Pay")
        first = await it.model(delivery)
        before = await it.events()

        assert await it.model(delivery, generation=2) == first

        assert await it.events() == before
        assert len(model.prompts) == 1


async def test_gated_ungated_invalid_and_question_in_one_step() -> None:
    asks = [call("look"), call("pay", amount=5), call("pay", amount="much"), call("ask_question", prompt="Why?")]
    async with lab([asks], look, pay, can_ask=True) as it:
        outcome = await it.model(await it.deliver("Go"))

        assert isinstance(outcome, Calls)
        assert [each.tool for each in outcome.calls] == ["look"]
        assert len(outcome.open) == 2
        (actions,) = await it.emitted("actions.requested")
        # A call that waits for people is emitted as a request, and a question is no action at all.
        assert [(action["toolName"], action["input"]) for action in actions["actions"]] == [
            ("look", {}),
            ("pay", {"amount": "much"}),
        ]
        assert await it.emitted("input.requested") == []
        assert [await it.status_of(each) for each in outcome.open] == ["unknown", "unknown"]

        await it.tool(outcome.calls[0])
        await it.park(outcome.open)

        assert (await it.types())[-5:] == [
            "action.result",
            "step.completed",
            "input.requested",
            "turn.completed",
            "session.waiting",
        ]
        (emitted,) = await it.emitted("input.requested")
        assert [each["action"]["toolName"] for each in emitted["requests"]] == ["pay", "ask_question"]
        assert [await it.status_of(each) for each in outcome.open] == ["open", "open"]


async def test_parking_twice_is_parking_once() -> None:
    async with lab([[call("look"), call("pay", amount=5)]], look, pay, can_ask=True) as it:
        outcome = await it.model(await it.deliver("Go"))
        assert isinstance(outcome, Calls)
        await it.tool(outcome.calls[0])
        await it.park(outcome.open)
        before = await it.events()

        await it.park(outcome.open)

        assert await it.events() == before


async def test_a_gated_call_is_refused_if_the_client_takes_no_requests() -> None:
    model = ScriptedModel([call("pay", amount=5), "Sorry"])
    async with lab(model, pay) as it:
        delivery = await it.deliver("Pay")
        outcome = await it.model(delivery)

        assert isinstance(outcome, Calls)
        assert (outcome.calls, outcome.open) == ((), ())
        (emitted,) = await it.emitted("action.result")
        assert (emitted["status"], emitted["error"]["code"]) == ("rejected", "TOOL_APPROVAL_UNAVAILABLE")
        (asked,) = await it.emitted("actions.requested")
        assert [action["toolName"] for action in asked["actions"]] == ["pay"]
        row = await it.store.session(SESSION)
        assert row is not None
        assert row.tool_calls == 1
        await it.model(delivery, step=1)
        assert [tool.name for tool in model.prompts[0].tools] == ["pay"]


async def decide(call: Call, session: SessionView) -> bool | Decision:
    amount: int = call.arguments["amount"]
    if amount > 1000:
        return Decision.deny(f"{session.agent} pays no more than 1000")
    if amount > 100:
        return Decision.ask(f"Really {amount}?")
    return False


@tool(approval=decide, summary=lambda arguments: f"Pay {arguments['amount']} euros")
def spend(amount: int) -> str:
    """Spend."""
    return f"spent {amount}"


async def test_a_function_decides_whether_to_ask() -> None:
    asks = [call("spend", amount=5), call("spend", amount=500), call("spend", amount=5000)]

    played = await play_spend(asks)

    (request,) = played.pending
    assert (request.prompt, request.summary, request.input) == ("Really 500?", "Pay 500 euros", {"amount": 500})
    assert [(each.status, each.output) for each in played.tool_calls] == [
        ("completed", "spent 5"),
        (
            "rejected",
            {
                "code": "TOOL_EXECUTION_DENIED",
                "message": "Tool execution was denied. Reason: payer pays no more than 1000",
            },
        ),
    ]


async def test_a_call_that_a_function_denies_is_shown_with_its_result() -> None:
    async with lab([call("spend", amount=5000), "Sorry"], spend, can_ask=True) as it:
        outcome = await it.model(await it.deliver("Go"))

        assert isinstance(outcome, Calls)
        assert (outcome.calls, outcome.open) == ((), ())
        assert (await it.types())[-2:] == ["actions.requested", "action.result"]
        (asked,), (emitted,) = await it.emitted("actions.requested"), await it.emitted("action.result")
        assert asked["actions"] == [
            {"kind": "tool-call", "callId": "call_0_0", "toolName": "spend", "input": {"amount": 5000}}
        ]
        assert (emitted["status"], emitted["error"]["code"]) == ("rejected", "TOOL_EXECUTION_DENIED")
        assert (emitted["result"]["callId"], emitted["result"]["toolName"]) == ("call_0_0", "spend")


async def play_spend(asks: Any) -> Any:
    return await play(Agent("payer", tools=[spend]), "Go", model=ScriptedModel([asks]))


@pytest.mark.parametrize("said", [None, "yes", 1])
async def test_what_cannot_be_decided_is_refused(said: Any) -> None:
    @tool(approval=lambda call, session: said)
    def act() -> None: ...

    async with lab([call("act")], act, can_ask=True) as it:
        await it.model(await it.deliver("Go"))

        (emitted,) = await it.emitted("action.result")
        assert emitted["status"] == "rejected"
        assert "neither a bool nor a Decision" in emitted["error"]["message"]


@pytest.mark.parametrize("broken", ["approval", "summary", "approval_key"])
async def test_an_author_function_that_raises_lets_nothing_through(broken: str) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("amount")

    options: dict[str, Any] = {"approval": "once" if broken == "approval_key" else "always", broken: fails}

    @tool(**options)
    def act() -> None: ...

    async with lab([call("act")], act, can_ask=True) as it:
        await it.model(await it.deliver("Go"))

        (emitted,) = await it.emitted("action.result")
        assert emitted["status"] == "rejected"
        assert "KeyError: 'amount'" in emitted["error"]["message"]


async def test_times_and_responders_travel_with_the_request() -> None:
    @tool(
        approval="always", expires=60, on_expiry="fail", remind=[10, 30], responders=responders.role("boss", quorum=2)
    )
    def act() -> None: ...

    async with lab([call("act")], act, can_ask=True) as it:
        it.harness = it.worker(clock=lambda: 1_000_000.0)
        (open,) = await it.parked(await it.deliver("Go"))

        assert (open.expires_at, open.remind_at) == (1_000_060.0, (1_000_010.0, 1_000_030.0))
        row = await it.store.input(open.request_id)
        assert row is not None
        assert row.request.expires_at == "1970-01-12T13:47:40.000Z"
        assert row.request.on_expiry == "fail"
        assert (row.request.responders.attribute, row.request.responders.quorum) == ("role", 2)


async def test_questions_are_offered_where_people_can_be_asked() -> None:
    @tool(name="ask_question")
    def own(prompt: str) -> str:
        """Ask somebody else."""
        return prompt

    for can_ask, tools, expected in (
        (True, (), ["ask_question"]),
        (False, (), []),
        (True, (own,), ["ask_question"]),
    ):
        model = ScriptedModel(["Hi"])
        async with lab(model, *tools, can_ask=can_ask) as it:
            await it.model(await it.deliver("Go"))

            assert [tool.name for tool in model.prompts[0].tools] == expected

    async with lab([call("ask_question", prompt="Why?")], own, can_ask=True) as it:
        assert (await it.run_one()).status == "completed"


async def test_a_subagent_of_the_name_replaces_the_built_in_question() -> None:
    model = ScriptedModel([call("ask_question", message="Why?")])
    async with lab(model, can_ask=True) as it:
        it.agent = replace(it.agent, subagents=[Agent("ask_question")])
        it.harness = it.worker()
        outcome = await it.model(await it.deliver("Go"))

        assert sorted(tool.name for tool in model.prompts[0].tools) == ["agent", "ask_question"]
        assert isinstance(outcome, Delegated)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "prompt: Field required"),
        ({"prompt": "?", "options": ["a", "a"]}, "each needs an id of its own"),
        ({"prompt": "?", "more": 1}, "more: Extra inputs"),
    ],
)
async def test_a_question_that_cannot_be_asked_is_reported_to_the_model(arguments: Any, complaint: str) -> None:
    model = ScriptedModel([call("ask_question", **arguments), "Sorry"])
    async with lab(model, can_ask=True) as it:
        delivery = await it.deliver("Go")
        await it.model(delivery)
        await it.model(delivery, step=1)

        (result,) = model.prompts[1].messages[-1].parts
        assert complaint in str(result.content)  # type: ignore[union-attr]
        assert "action.result" not in await it.types()


async def test_a_tool_that_has_become_gated_since_is_not_run() -> None:
    async with lab([call("act")], tool(name="act")(unwanted())) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        it.redeclare(tool(name="act", approval="always")(unwanted()))

        assert (await it.tool(ref)).status == "rejected"


def unwanted() -> Any:
    def act() -> str:
        raise AssertionError("this must not run")

    return act


async def test_a_reminder_is_emitted_once_while_a_request_is_open() -> None:
    async with lab([call("pay", amount=5)], pay, can_ask=True) as it:
        (open,) = await it.parked(await it.deliver("Pay"))
        reminder = Reminder(session_id=SESSION, request_id=open.request_id, left=0)

        await it.harness.remind(reminder)
        await it.harness.remind(reminder)

        (emitted,) = await it.emitted("input.reminded")
        assert emitted == {"requestId": open.request_id, "callId": "call_0_0", "toolName": "pay", "left": 0}
