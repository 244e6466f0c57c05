"""A deployment that changes the type of a state slot, and its rollback."""

from typing import Any

from tests.support.plugin import StackFactory
from tests.support.stack import Stack

FIRST = {"PERDURE_AGENTS": "tests.runtime.cart_1:agent"}
SECOND = {"PERDURE_AGENTS": "tests.runtime.cart_2:agent"}


def deploy(stack: Stack, environment: dict[str, str]) -> None:
    """Replace the worker by one of another build."""
    assert stack.workers[-1].terminate() == 0
    stack.start_worker(environment)


def carts(events: list[dict[str, Any]]) -> list[Any]:
    return [event["data"]["result"]["output"] for event in events if event["type"] == "action.result"]


async def test_a_slot_is_lifted_by_the_newer_build_and_waits_for_it_on_the_older_one(make_stack: StackFactory) -> None:
    stack = make_stack(agents=FIRST["PERDURE_AGENTS"])
    async with stack.talk() as talk:
        await talk.create('use add {"sku": "tea"}')
        first = await talk.until_boundary()

        deploy(stack, SECOND)
        await talk.send('use add {"sku": "tea"}')
        second = await talk.until_boundary()

        deploy(stack, FIRST)
        await talk.send('use add {"sku": "milk"}')
        attention = await talk.until("session.attention", talk.cursor)
        shown = (await talk.http.get(f"/v1/sessions/{talk.session_id}")).json()

        deploy(stack, SECOND)
        third = await talk.until_boundary()

    assert (carts(first), carts(second)) == ([["tea"]], [{"tea": 2}])
    assert (shown["status"], shown["attention"]["code"]) == ("needs_attention", "UNREADABLE_STATE")
    assert "'cart' has version 2; this code reads versions 1 to 1" in attention[-1]["data"]["message"]
    # The tool runs at most once, and it has.
    assert carts(third) == [{"tea": 2, "milk": 1}]
