"""`perdure deliveries`: what a session has accepted."""

import json

import pytest

from tests.support import commands
from tests.support.plugin import StackFactory
from tests.support.stack import Stack


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.conformance.agents:concierge")


async def test_a_person_and_a_program_read_what_became_of_each_delivery(stack: Stack) -> None:
    async with stack.talk() as talk:
        first = (await talk.create("say one"))["deliveryId"]
        await talk.until_boundary()
        second = (await talk.send("fail 400"))["deliveryId"]
        await talk.until_boundary()
        session_id = talk.session_id

    table = commands.perdure("deliveries", session_id, environment=stack.environment).stdout.splitlines()
    objects = commands.perdure("deliveries", session_id, "--json", environment=stack.environment).stdout.splitlines()

    assert [line.split()[0] for line in table] == ["delivery", second, first]
    assert [line.split()[3:] for line in table[1:]] == [
        ["failed", "turn_1", "MODEL_CALL_FAILED"],
        ["completed", "turn_0"],
    ]
    assert [json.loads(line)["outcome"] for line in objects] == ["failed", "completed"]


def test_an_unknown_session_is_said(stack: Stack) -> None:
    done = commands.perdure("deliveries", "ses_none", environment=stack.environment)

    assert done.returncode != 0
    assert "ses_none" in done.stderr


async def test_an_operator_withdraws_what_no_turn_has_read(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, agents="tests.conformance.agents:concierge", workers=0)
    async with stack.talk() as talk:
        delivery_id = (await talk.create("say one"))["deliveryId"]
        done = commands.perdure("withdraw", delivery_id, environment=stack.environment)
        unknown = commands.perdure("withdraw", "dlv_none", environment=stack.environment)
        shown = (await talk.http.get(f"/v1/deliveries/{delivery_id}")).json()

    assert done.returncode == 0
    assert shown["outcome"] == "withdrawn"
    assert unknown.returncode != 0
    assert "No such delivery" in unknown.stderr
