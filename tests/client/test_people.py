"""Several callers, each with a key."""

import hashlib

import pytest

from perdure.client import AsyncClient, ClientError
from tests.cli.terminal import Terminal
from tests.support.plugin import StackFactory
from tests.support.stack import Stack

KEYS = {"ann": "sk-of-ann-1234", "bob": "sk-of-bob-1234", "eve": "sk-of-eve-1234"}


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    entries = ",".join(f"{name}={hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items())
    environment = {"PERDURE_API_KEYS": entries}
    return module_stack(provider=True, agents="tests.client.agents:agent", environment=environment)


def caller(stack: Stack, name: str) -> AsyncClient:
    return AsyncClient(stack.url, key=KEYS[name])


async def test_an_answer_that_does_not_count_yet_ends_at_once_and_the_last_one_gets_the_turn(stack: Stack) -> None:
    async with caller(stack, "ann") as ann, caller(stack, "bob") as bob:
        session = ann.session()
        asked = await (await session.send("call agree {} then say agreed")).result()
        (request,) = asked.input_requests
        answer = [{"requestId": request["requestId"], "optionId": "approve"}]

        first = await (await session.send(input_responses=answer)).result()
        (listed,) = [each async for each in bob.inputs(sessionId=session.id)]
        second = await bob.answer(listed["requestId"], "approve")
        rest = await (await session.send("say next")).result()

    assert (first.status, first.boundary) == ("waiting", None)
    assert (listed["votes"], second["status"]) == (1, "answered")
    assert rest.message == "next"


async def test_who_may_not_answer_is_told_so(stack: Stack) -> None:
    async with caller(stack, "ann") as ann, caller(stack, "eve") as eve:
        session = ann.session()
        (request,) = (await (await session.send("call agree {}")).result()).input_requests
        with pytest.raises(ClientError) as refused:
            await eve.answer(request["requestId"], "approve")
        with pytest.raises(ClientError) as hidden:
            await eve.show(session.id or "")

    assert refused.value.status in (403, 404)
    assert hidden.value.status == 404


@pytest.mark.parametrize("headers", [{}, {"x-api-key": "sk-of-nobody"}, {"authorization": "Basic YTpi"}])
async def test_who_is_not_known_is_refused(stack: Stack, headers: dict[str, str]) -> None:
    async with AsyncClient(stack.url, headers=headers) as client:
        with pytest.raises(ClientError) as refused:
            await client.session().send("say hello")

    assert (refused.value.status, refused.value.code) == (401, "unauthorized")


async def test_a_key_may_be_sent_in_the_other_form(stack: Stack) -> None:
    async with AsyncClient(stack.url, headers={"x-api-key": KEYS["ann"]}) as client:
        assert (await (await client.session().send("say hello")).result()).message == "hello"


async def test_a_chat_waits_until_others_have_agreed(stack: Stack) -> None:
    with Terminal("chat", "--url", stack.url, environment={"PERDURE_KEY": KEYS["ann"]}) as terminal:
        terminal.type("call agree {} then say both agreed")
        terminal.type("yes", prompt="answer> ").shows("Others must agree")
        terminal.type("say anything").shows("waits for an answer").type("/wait")
        async with caller(stack, "bob") as bob:
            # The oldest come first, and other tests have left some.
            *_, newest = [each async for each in bob.inputs()]
            await bob.answer(newest["requestId"], "approve")
        terminal.shows("\nboth agreed\n").type("say next").shows("\nnext\n")
