"""The whole way: real SDKs, real HTTP, a real store."""

import asyncio
import sys
from collections.abc import AsyncGenerator

import pytest

from perdure import tool
from perdure.errors import ModelFailed
from perdure.models.base import Models
from perdure.protocol.requests import Finished
from tests.support.lab import Lab, lab
from tests.support.provider import Provider, serving

NAMES = ["openai-chat:scripted", "anthropic:claude-scripted"]


@pytest.fixture
async def provider(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Provider]:
    async with serving() as provider:
        for name, value in provider.environment().items():
            monkeypatch.setenv(name, value)
        yield provider


@tool(effects="pure")
def double(n: int) -> int:
    """Double it."""
    return 2 * n


async def round_of_tools(it: Lab, said: str, turn: int = 0) -> None:
    delivery = await it.deliver(said)
    for ref in await it.calls(delivery, turn=turn):
        await it.tool(ref, turn=turn)
    assert isinstance(await it.model(turn=turn, step=1), Finished)


@pytest.mark.parametrize("name", NAMES)
async def test_results_reach_the_model_in_the_order_of_its_calls(provider: Provider, name: str) -> None:
    async with lab(Models().model(name), double, instructions="Be brief.") as it:
        await round_of_tools(it, 'call double {"n": 4} and double {"n": "x"} and nothing {}')

        (emitted,) = await it.emitted("message.completed")
        first, second, third = emitted["message"].split(" | ")
        assert first == "Results: 8"
        assert "Invalid arguments for double: n:" in second
        assert "Unknown tool" in third
        assert len(await it.emitted("action.result")) == 3


@pytest.mark.parametrize("name", NAMES)
async def test_a_later_turn_carries_the_earlier_ones_whole(provider: Provider, name: str) -> None:
    async with lab(Models().model(name), double) as it:
        await round_of_tools(it, 'call double {"n": 4} then say Eight')
        await it.model(await it.deliver("say Again"), turn=1)

        assert [emitted["message"] for emitted in await it.emitted("message.completed")] == ["Eight", "Again"]
        assert not provider.unpaired
        assert max(provider.counts.values()) == 1, "nothing was asked twice"


@pytest.mark.parametrize("name", NAMES)
async def test_a_failed_attempt_is_taken_back_and_asked_again(provider: Provider, name: str) -> None:
    async with lab(Models().model(name)) as it:
        delivery = await it.deliver("fail 500 times 1; say Hello")
        with pytest.raises(ModelFailed) as failed:
            await it.model(delivery)

        await it.model(delivery, generation=2)

        assert failed.value.transient
        assert [emitted["message"] for emitted in await it.emitted("message.completed")] == ["Hello"]
        assert len(await it.emitted("step.superseded")) == 1


@pytest.mark.parametrize("name", [*NAMES, "openai:scripted"])
async def test_a_reply_that_breaks_off_is_gone_on_with(provider: Provider, name: str) -> None:
    async with lab(Models().model(name), on_interrupted_reply="continue") as it:
        delivery = await it.deliver("cut after 9; drip 15 words delay 20")
        with pytest.raises(ModelFailed):
            await it.model(delivery)

        await it.model(delivery, generation=2)
        await it.model(await it.deliver("say Again"), turn=1)

        whole = "".join(f"w{number} " for number in range(15))
        assert [emitted["message"] for emitted in await it.emitted("message.completed")] == [whole, "Again"]
        assert provider.requests[0]["messages"] == provider.requests[1]["messages"]
        begun = provider.requests[1]["begun"]
        assert begun
        assert begun != whole
        assert provider.requests[2]["texts"] == ["cut after 9; drip 15 words delay 20", "say Again"]


@pytest.mark.parametrize("name", [*NAMES, "openai:scripted"])
async def test_a_request_that_is_too_long_is_sent_again_with_a_summary(provider: Provider, name: str) -> None:
    async with lab(Models().model(name), double) as it:
        await round_of_tools(it, 'call double {"n": 4} then say ' + "eight " * 1_000)
        await it.model(await it.deliver("limit 4000; say Short"), turn=1)

        assert [emitted["message"] for emitted in await it.emitted("message.completed")][1:] == ["Short"]
        assert len(await it.emitted("compaction.completed")) == 1
        assert not provider.unpaired


async def test_the_provider_runs_as_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.provider", "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{port}/v1")
        async with lab(Models().model(NAMES[0])) as it:
            await it.model(await it.deliver("say Hello"))

            assert (await it.emitted("message.completed"))[0]["message"] == "Hello"
    finally:
        process.kill()
        await process.wait()
