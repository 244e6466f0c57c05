"""Families as large as their agents allow: many children at once, and many levels."""

import pytest

from bench import histories
from tests.support.chaos.evidence import read_store
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text, types

from .test_subagents import ask, hand, of_type

MANY, DEEP = 50, 10
#: Characters of the result of a child, and bytes of its parent's history for a child: its result is not in there.
LONG, MOST = 4_000, 1_500


def runs_child_turns(stack: str) -> bool:
    return stack == "child"


@pytest.mark.slow_where.with_args(runs_child_turns)
async def test_fifty_children_at_once_are_started_once_and_read_once_in_the_order_of_their_calls(stack: Stack) -> None:
    results = [f"{number}-{'x' * LONG}" for number in range(MANY)]
    order = hand(*[("clerk", f"say {each}") for each in results])
    async with Talk(f"{stack.url}/agents/wide") as talk:
        events = await ask(talk, f"{order} then say Done")

    called, given = of_type(events, "subagent.called"), of_type(events, "action.result")
    (requested,) = of_type(events, "actions.requested")
    assert text(events) == "Done"
    assert len({each["childSessionId"] for each in called}) == len(called) == MANY
    assert [each["result"]["callId"] for each in given] == [each["callId"] for each in requested["actions"]]
    assert [each["result"]["output"] for each in given] == results
    kept = read_store(stack.settings.database)
    for each in called:
        lines = types(list(kept.events[each["childSessionId"]]))
        assert [lines.count(type) for type in ("turn.started", "session.completed")] == [1, 1]
    reports = [each for each in kept.deliveries[talk.session_id] if each["kind"] == "child-result"]
    assert [(each["turn"], each["refused"]) for each in reports] == [(0, None)] * MANY
    runs = await histories.of_all_runs(await stack.client(), talk.session_id)
    assert sum(map(histories.size, runs)) < MOST * MANY


async def test_agents_hand_work_on_ten_times_if_they_may_and_no_deeper(stack: Stack) -> None:
    task = "say Deep"
    for _ in range(DEEP + 1):
        task = hand(("agent", task))
    async with Talk(f"{stack.url}/agents/deep") as talk:
        said = text(await ask(talk, task))
    async with stack.talk() as operator:
        family: Json = (await operator.http.get(f"/v1/sessions/{talk.session_id}/tree")).json()

    assert said.startswith("Results: " * (DEEP + 1))
    assert f"agents may hand work on {DEEP} times only" in said
    for _ in range(DEEP):
        (family,) = family["children"]
    assert family["children"] == []
