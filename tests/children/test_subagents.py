"""Turns that hand work to other agents, with real processes."""

import json
from typing import Any

from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types


def hand(*tasks: tuple[str, str]) -> str:
    """An order to hand tasks to agents, all in one step. The steps of a task are not steps of this order."""
    orders = (f"{name} {json.dumps({'message': task})}" for name, task in tasks)
    return "call " + " and ".join(order.replace(" then ", "\\u0020then ") for order in orders)


def of_type(events: list[Json], type: str) -> list[Json]:
    return [each["data"] for each in events if each["type"] == type]


async def ask(talk: Talk, message: Any) -> list[Json]:
    await talk.create(message)
    return await talk.until_boundary()


async def stream_of(talk: Talk, session_id: str) -> list[Json]:
    """All events of a session that has ended."""
    child = Talk(str(talk.http.base_url))
    child.session_id = session_id
    async with child:
        return [event async for event in child.events()]


async def test_the_result_of_a_subagent_comes_back_to_the_turn_that_asked(talk: Talk) -> None:
    events = await ask(talk, hand(("researcher", "say Found it")))

    assert text(events) == "Results: Found it"
    shown = [each for each in types(events) if not each.endswith(".appended")]
    assert shown == [
        *("session.started", "turn.started", "message.received"),
        *("step.started", "actions.requested", "step.completed"),
        *("subagent.called", "subagent.completed", "action.result"),
        *("step.started", "message.completed", "step.completed", "turn.completed", "session.waiting"),
    ]


async def test_readers_see_whom_a_turn_has_asked_and_where_to_follow_it(talk: Talk) -> None:
    events = await ask(talk, hand(("researcher", "say Found it")))

    (requested,), (called,) = of_type(events, "actions.requested"), of_type(events, "subagent.called")
    (completed,), (result,) = of_type(events, "subagent.completed"), of_type(events, "action.result")
    (action,) = requested["actions"]
    call_id = action["callId"]
    assert action == {
        "kind": "subagent-call",
        "callId": call_id,
        "name": "researcher",
        "nodeId": "subagents/researcher",
        "subagentName": "researcher",
        "description": "Finds things out.",
        "input": {"message": "say Found it"},
    }
    assert (called["callId"], called["sessionId"], called["turnId"]) == (call_id, talk.session_id, "turn_0")
    assert completed == {"callId": call_id, "subagentName": "researcher", "output": "Found it"}
    assert result["result"] == {
        "kind": "subagent-result",
        "callId": call_id,
        "subagentName": "researcher",
        "output": "Found it",
    }
    child = await stream_of(talk, called["childSessionId"])
    assert (child[0]["type"], child[-1]["type"], text(child)) == ("session.started", "session.completed", "Found it")


async def test_several_children_work_at_once_and_their_results_come_in_the_order_of_the_calls(talk: Talk) -> None:
    slow, quick = ("researcher", "drip 20 words delay 20"), ("clerk", "say Quick")
    events = await ask(talk, hand(slow, quick, quick))

    called, results = of_type(events, "subagent.called"), of_type(events, "action.result")
    assert [each["name"] for each in called] == ["researcher", "clerk", "clerk"]
    assert [each["result"]["callId"] for each in results] == [each["callId"] for each in called]
    assert len({each["childSessionId"] for each in called}) == 3
    ends = [types(events).index(each) for each in ("subagent.called", "subagent.completed")]
    assert types(events)[ends[0] : ends[1]] == ["subagent.called"] * 3


async def test_a_step_may_mix_tools_and_agents(talk: Talk) -> None:
    events = await ask(talk, 'call add {"a": 1, "b": 2} and clerk {"message": "say Hello"} then say Done')

    results = [each["result"] for each in of_type(events, "action.result")]
    assert [(each["kind"], each["output"]) for each in results] == [("tool-result", 3), ("subagent-result", "Hello")]
    assert text(events) == "Done"


async def test_children_have_children(talk: Talk) -> None:
    inner = hand(("clerk", 'call add {"a": 20, "b": 22}'))
    events = await ask(talk, hand(("researcher", inner)))

    assert text(events) == "Results: Results: Results: 42"
    (called,) = of_type(events, "subagent.called")
    (below,) = of_type(await stream_of(talk, called["childSessionId"]), "subagent.called")
    session = (await talk.http.get(f"/v1/sessions/{below['childSessionId']}")).json()
    assert session["parent"]["rootSessionId"] == talk.session_id
    assert (session["parent"]["sessionId"], session["parent"]["depth"]) == (called["childSessionId"], 2)


async def test_a_copy_of_the_agent_does_not_know_the_conversation(talk: Talk) -> None:
    events = await ask(talk, hand(("agent", "say I know nothing")))

    assert text(events) == "Results: I know nothing"
    (requested,) = of_type(events, "actions.requested")
    assert requested["actions"][0]["nodeId"] == "__root__"


async def test_a_failed_child_is_a_failed_result_and_the_turn_goes_on(talk: Talk) -> None:
    events = await ask(talk, hand(("clerk", "fail 400")) + " then say Sorry")

    (result,) = of_type(events, "action.result")
    assert (result["status"], result["error"]["code"]) == ("failed", "SUBAGENT_EXECUTION_FAILED")
    assert "subagent.completed" not in types(events)
    assert text(events) == "Sorry"


async def test_agents_hand_work_on_three_times_and_no_deeper(talk: Talk) -> None:
    task = "say Deep"
    for _ in range(5):
        task = hand(("agent", task)) + " then say Up"
    events = await ask(talk, task)

    assert text(events) == "Up"
    for _ in range(3):
        (called,) = of_type(events, "subagent.called")
        events = await stream_of(talk, called["childSessionId"])
    (result,) = of_type(events, "action.result")
    assert result["error"]["code"] == "SUBAGENT_LIMIT_REACHED"
    assert "subagent.called" not in types(events)


async def test_one_step_hands_on_so_many_tasks_and_no_more(talk: Talk) -> None:
    events = await ask(talk, hand(*[("clerk", "say Hi")] * 34) + " then say Done")

    codes = [each["error"]["code"] for each in of_type(events, "action.result") if "error" in each]
    assert codes == ["SUBAGENT_LIMIT_REACHED"] * 2
    assert len(of_type(events, "subagent.completed")) == 32


async def test_a_child_gives_a_structured_result(talk: Talk) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    order = {"message": 'call final_output {"sum": 42}', "outputSchema": schema}
    events = await ask(talk, f"call clerk {json.dumps(order)} then say Done")

    (result,) = of_type(events, "action.result")
    assert result["result"]["output"] == {"sum": 42}


async def test_a_task_that_no_tool_accepts_is_told_to_the_model(talk: Talk) -> None:
    events = await ask(talk, 'call clerk {"task": "say Hi"} then say Done')

    (result,) = of_type(events, "action.result")
    assert result["status"] == "failed"
    assert "message" in result["error"]["message"]


async def test_a_message_that_comes_while_children_work_begins_the_next_turn(talk: Talk) -> None:
    await talk.create(hand(("clerk", "drip 20 words delay 50")) + " then say Done")
    await talk.until("subagent.called")
    await talk.send("say Next")

    assert text(await talk.until_boundary()) == "Done"
    assert text(await talk.until_boundary()) == "Next"


async def test_a_task_hands_work_on_and_ends_with_its_result(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create(hand(("clerk", "say Hi")), mode="task")
        events = [event async for event in talk.events()]

    assert types(events)[-1] == "session.completed"
    assert text(events) == "Results: Hi"


async def test_to_cancel_a_turn_stops_its_children_and_theirs_before_it_says_so(talk: Talk) -> None:
    await talk.create(hand(("researcher", hand(("clerk", "drip 2000 words delay 50"))), ("clerk", "say Quick")))
    called = of_type(await talk.until("subagent.called"), "subagent.called")
    child = Talk(str(talk.http.base_url))
    child.session_id = called[0]["childSessionId"]
    async with child:
        (below,) = of_type(await child.until("subagent.called"), "subagent.called")
    assert (await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")).is_success

    events = await talk.until_boundary()

    assert types(events)[-2:] == ["turn.cancelled", "session.waiting"]
    ended = [await stream_of(talk, each) for each in (below["childSessionId"], called[0]["childSessionId"])]
    assert ["turn.cancelled" in types(each) for each in ended] == [True, True]
    assert await talk.say("say Still here") == "Still here"


async def test_children_are_stopped_at_the_deadline_of_the_turn_that_waits_for_them(talk: Talk) -> None:
    path = "/agents/hasty/eve/v1/session"
    created = (await talk.http.post(path, json={"message": hand(("clerk", "drip 2000 words delay 50"))})).json()
    talk.session_id, talk.token = created["sessionId"], created["continuationToken"]

    events = await talk.until_boundary()

    (failed,) = of_type(events, "turn.failed")
    assert failed["code"] == "TURN_DEADLINE_EXCEEDED"
    (called,) = of_type(events, "subagent.called")
    assert types(await stream_of(talk, called["childSessionId"]))[-1] == "session.failed"


async def test_callers_cannot_start_a_subagent(talk: Talk) -> None:
    answer = await talk.http.post("/agents/clerk/eve/v1/session", json={"message": "say Hi"})

    assert answer.status_code == 404


async def test_a_child_takes_no_messages_of_others(talk: Talk) -> None:
    (called,) = of_type(await ask(talk, hand(("clerk", "say Hi"))), "subagent.called")
    child = called["childSessionId"]

    for token in (talk.token, f"child/{child}"):
        body = {"continuationToken": token, "message": "say More"}
        assert (await talk.http.post(f"/eve/v1/session/{child}", json=body)).status_code in (404, 409)
