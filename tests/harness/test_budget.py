"""Budgets of tokens and costs: what does not fit is not called, and people are asked where they can be."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from perdure import Agent, Limits, Price, tool
from perdure.errors import Misconfigured, ModelFailed
from perdure.harness.tools.prices import check_prices, cost_of
from perdure.models.base import Delta, Item, Prompt, Reply
from perdure.protocol.events import Usage
from perdure.protocol.inputs import InputAnswer
from perdure.protocol.requests import Failure, Finished, ModelOutcome
from perdure.settings import Settings
from perdure.testing import ScriptedModel, call
from tests.support.lab import Lab, lab

#: A reply of the scripted model uses ten tokens of input and five of output; so much is reserved for its output.
SMALL = {"max_tokens": 5}
#: A cent for a reply.
CENT = Price(input=0, output=2000)
EXTEND = InputAnswer(option_id="extend", principal_id="ada")
STOP = InputAnswer(option_id="stop", principal_id="ada")


@tool(effects="pure")
def look() -> str:
    return "there"


@asynccontextmanager
async def spending(
    lines: Sequence[Any] | Any, *tools: Any, price: Price | None = None, more: Any = None, can_ask: bool = False,
    mode: Any = "conversation", **limits: Any,
) -> AsyncGenerator[Lab]:  # fmt: skip
    settings = Settings.model_validate({"agents": "", **(more or {})})
    async with lab(lines, *tools, limits=Limits(**limits), can_ask=can_ask, mode=mode, settings=settings) as it:
        it.agent = replace(it.agent, settings=SMALL, price=price)
        it.harness = it.worker()
        yield it


def failure_of(outcome: ModelOutcome) -> Failure:
    assert isinstance(outcome, Finished)
    assert outcome.failure is not None
    return outcome.failure


def reached(failure: Failure) -> dict[str, Any]:
    """The details of the failure, except what the call needs: that is an estimate."""
    details = dict(failure.details or {})
    assert details["used"] + details.pop("needed") > details["limit"]
    return details


def succeeded(outcome: ModelOutcome) -> bool:
    return isinstance(outcome, Finished) and outcome.failure is None


# --- turns and sessions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("price", "limits", "used", "limit"),
    [
        (None, {"session_tokens": 40}, 30, 40),
        (CENT, {"session_cost": 0.02}, 0.02, 0.02),
    ],
)
async def test_a_turn_that_does_not_fit_into_the_budget_of_its_session_fails_before_the_call(
    price: Price | None, limits: dict[str, Any], used: float, limit: float
) -> None:
    model = ScriptedModel(["One", "Two", "Three"])
    async with spending(model, price=price, **limits) as it:
        for turn in range(2):
            assert succeeded(await it.model(await it.deliver("Hi"), turn=turn))

        failure = failure_of(await it.model(await it.deliver("Hi"), turn=2))

        assert failure.code == "SESSION_BUDGET_REACHED"
        assert reached(failure) == {"budget": next(iter(limits)), "used": used, "limit": limit}
        assert len(model.prompts) == 2
        (failed,) = await it.emitted("turn.failed")
        assert (failed["code"], failed["details"]) == (failure.code, failure.details)
        assert await it.session_status() == "waiting"


async def test_each_turn_has_a_budget_of_its_own() -> None:
    model = ScriptedModel([call("look"), "Found.", call("look"), "Never"])
    async with spending(model, look, turn_tokens=45) as it:
        await it.run_one()
        assert succeeded(await it.model(step=1))
        it.agent = replace(it.agent, limits=Limits(turn_tokens=30))
        it.harness = it.worker()
        (ref,) = await it.calls(await it.deliver("Go"), turn=1)
        await it.tool(ref, turn=1)

        failure = failure_of(await it.model(turn=1, step=1))

        assert (failure.code, reached(failure)) == (
            "TURN_BUDGET_REACHED",
            {"budget": "turn_tokens", "used": 15, "limit": 30},
        )


async def test_failed_attempts_count() -> None:
    async with spending(["", ModelFailed("Busy.", transient=True)], turn_tokens=19) as it:
        delivery = await it.deliver("Hi")
        with pytest.raises(ModelFailed):
            await it.model(delivery, generation=1)

        failure = failure_of(await it.model(delivery, generation=2))

        assert reached(failure) == {"budget": "turn_tokens", "used": 15, "limit": 19}


async def test_a_task_is_not_asked_about() -> None:
    async with spending([], session_tokens=3, mode="task", can_ask=True) as it:
        assert failure_of(await it.model(await it.deliver("Hi"))).code == "SESSION_BUDGET_REACHED"
        assert await it.session_status() == "failed"


async def test_nobody_is_asked_if_the_agent_says_so() -> None:
    async with spending([], session_tokens=3, can_ask=True, extended_by=None) as it:
        assert failure_of(await it.model(await it.deliver("Hi"))).code == "SESSION_BUDGET_REACHED"


# --- extensions ---------------------------------------------------------------------------------------------


async def test_a_person_extends_the_budget_of_a_session_and_the_turn_continues() -> None:
    model = ScriptedModel(["One", "Two", "Three"])
    async with spending(model, session_tokens=20, can_ask=True) as it:
        await it.model(await it.deliver("First"))
        (asked,) = await it.parked(await it.deliver("Second"), turn=1)
        (request,) = (await it.emitted("input.requested"))[0]["requests"]
        assert request["action"]["toolName"] == "extend_budget"
        assert request["action"]["input"]["budget"] == "session_tokens"
        needed = request["action"]["input"]["needed"]
        assert 20 - 15 < needed <= 20
        assert f"needs about {needed} tokens" in request["prompt"]
        assert [each["id"] for each in request["options"]] == ["extend", "stop"]
        assert len(model.prompts) == 1

        resumed = await it.resume(await it.answer((asked, EXTEND)), open=[asked], turn=2)

        assert (resumed.calls, resumed.open, resumed.failure) == ((), (), None)
        assert succeeded(await it.model(turn=2))
        # The model does not see that people were asked.
        assert [len(prompt.messages) for prompt in model.prompts] == [1, 3]
        assert "input.resolved" in await it.types()
        # The extension is used up, and people are asked again.
        (again,) = await it.parked(await it.deliver("Third"), turn=3)
        assert again.request_id != asked.request_id


async def test_a_turn_that_is_extended_has_another_whole_budget() -> None:
    model = ScriptedModel([call("look"), "Found."])
    async with spending(model, look, turn_tokens=25, can_ask=True) as it:
        await it.run_one()
        (asked,) = await it.parked(step=1)

        await it.resume(await it.answer((asked, EXTEND)), open=[asked])

        assert succeeded(await it.model(turn=1))
        assert [len(prompt.messages) for prompt in model.prompts] == [1, 3]


@pytest.mark.parametrize("answer", [STOP, InputAnswer(text="no", principal_id="ada")])
async def test_a_budget_that_is_not_extended_fails_the_turn(answer: InputAnswer) -> None:
    async with spending([], session_tokens=3, can_ask=True) as it:
        (asked,) = await it.parked(await it.deliver("Hi"))

        resumed = await it.resume(await it.answer((asked, answer)), open=[asked])

        assert resumed.failure is not None
        assert resumed.failure.code == "SESSION_BUDGET_REACHED"
        assert (await it.types())[-2:] == ["turn.failed", "session.waiting"]


async def test_an_attempt_that_is_repeated_asks_once() -> None:
    async with spending([], session_tokens=3, can_ask=True) as it:
        delivery = await it.deliver("Hi")

        asked = [await it.parked(delivery), await it.parked(delivery)]

        assert asked[0] == asked[1]
        assert len(await it.emitted("input.requested")) == 1


async def test_a_cancel_withdraws_the_question() -> None:
    async with spending([], session_tokens=3, can_ask=True) as it:
        asked = await it.parked(await it.deliver("Hi"))

        await it.withdraw(asked)

        assert await it.status_of(asked[0]) == "withdrawn"
        assert "turn.cancelled" in await it.types()


# --- principals ---------------------------------------------------------------------------------------------


async def test_the_sessions_of_a_principal_share_a_budget() -> None:
    async with spending(["One", "Two", "Three"], more={"principal_tokens": 40}) as it:
        other = Lab(it.store, it.agent, it.models.now, "conversation", it.settings, "s2")
        assert succeeded(await it.model(await it.deliver("Hi")))
        assert succeeded(await other.model(await other.deliver("Hi")))

        failure = failure_of(await it.model(await it.deliver("Hi"), turn=1))

        assert failure.code == "PRINCIPAL_BUDGET_REACHED"
        assert reached(failure) == {"budget": "principal_tokens", "used": 30, "limit": 40}


async def test_a_principal_has_a_new_budget_in_the_next_period() -> None:
    async with spending(["One", "Two"], price=CENT, more={"principal_cost": 0.01, "principal_period": "day"}) as it:
        it.harness = it.worker(clock=lambda: 0.0)
        assert succeeded(await it.model(await it.deliver("Hi")))
        assert failure_of(await it.model(await it.deliver("Hi"), turn=1)).code == "PRINCIPAL_BUDGET_REACHED"

        it.harness = it.worker(clock=lambda: 86_400.0)

        assert succeeded(await it.model(await it.deliver("Hi"), turn=2))


async def test_many_calls_at_once_do_not_spend_more_than_the_budget() -> None:
    model = ScriptedModel(["Hello"] * 50)
    async with spending(model, more={"principal_tokens": 160}) as it:
        it.agent = replace(it.agent, settings={"max_tokens": 15})
        sessions = [Lab(it.store, it.agent, model, "conversation", it.settings, f"s{number}") for number in range(50)]

        outcomes = await asyncio.gather(*[each.model(await each.deliver("Hi")) for each in sessions])

        # Each of them uses 15.
        assert sum(map(succeeded, outcomes)) == 10
        assert len(model.prompts) == 10


async def test_a_call_waits_for_what_another_one_has_reserved() -> None:
    class Waiting(ScriptedModel):
        release = asyncio.Event()

        async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
            async for item in super().stream(prompt):
                if isinstance(item, Reply):
                    await self.release.wait()
                yield item

    model = Waiting(["One", "Two"])
    async with spending(model, more={"principal_tokens": 21}) as it:
        it.agent = replace(it.agent, settings={"max_tokens": 20})
        it.harness = it.worker()
        other = Lab(it.store, it.agent, model, "conversation", it.settings, "s2")
        first = asyncio.create_task(it.model(await it.deliver("Hi")))
        while not model.prompts:
            await asyncio.sleep(0.005)
        second = asyncio.create_task(other.model(await other.deliver("Hi")))
        await asyncio.sleep(0.05)
        assert not second.done()

        model.release.set()

        assert succeeded(await first)
        # What was used is less than what was reserved, but the second call does not fit any more.
        assert failure_of(await second).code == "PRINCIPAL_BUDGET_REACHED"
        assert len(model.prompts) == 1


@pytest.mark.parametrize("how", ["fails", "cancelled", "dies"])
async def test_an_attempt_that_ends_badly_reserves_nothing_any_more(how: str) -> None:
    class Hanging:
        started = asyncio.Event()

        async def stream(self, prompt: Prompt) -> AsyncGenerator[Item, None]:
            self.started.set()
            if how == "fails":
                raise ModelFailed("Busy.", transient=True)
            await asyncio.Event().wait()
            raise AssertionError
            yield

    model = Hanging()
    async with spending(model, more={"principal_tokens": 16}) as it:
        delivery = await it.deliver("Hi")
        attempt = asyncio.create_task(it.model(delivery, generation=1))
        await model.started.wait()
        if how == "cancelled":
            attempt.cancel()
        if how != "dies":
            with pytest.raises((ModelFailed, asyncio.CancelledError)):
                await attempt
        it.models.now = ScriptedModel(["Hello"])
        other = Lab(it.store, it.agent, ScriptedModel(["Hello"]), "conversation", it.settings, "s2")
        # The next attempt at the same call takes over what a dead one has reserved.
        session = it if how == "dies" else other
        mine = delivery if how == "dies" else await other.deliver("Hi")

        assert succeeded(await session.model(mine, generation=2))
        attempt.cancel()


# --- prices -------------------------------------------------------------------------------------------------


def test_prices_are_those_of_the_agent_then_of_the_settings_then_of_the_list() -> None:
    usage = Usage(input_tokens=1_000_000, output_tokens=1_000_000, cache_read_tokens=500_000)
    agent = Agent("a", model="anthropic:claude-sonnet-4-5")
    settings = Settings(agents="", prices={"anthropic:claude-sonnet-4-5": {"input": 1, "output": 2}})

    def dollars(agent: Agent, settings: Settings) -> float | None:
        cost = cost_of(agent, settings)
        return None if cost is None else cost(usage) / 1e9

    assert dollars(replace(agent, price=Price(input=4, output=6, cache_read=0)), settings) == 8
    assert dollars(agent, settings) == 3
    assert (dollars(agent, Settings(agents="")) or 0) > 10
    assert dollars(Agent("a", model="openai-chat:unheard-of"), Settings(agents="")) is None
    assert dollars(Agent("a"), Settings(agents="")) is None


@pytest.mark.parametrize("limits", [{"turn_cost": 1}, {"session_cost": 1}])
def test_a_worker_does_not_start_with_a_budget_of_costs_and_no_price(limits: dict[str, Any]) -> None:
    agent = Agent("thrifty", model="openai-chat:unheard-of", limits=Limits(**limits))

    with pytest.raises(Misconfigured, match=r"'thrifty' .* model openai-chat:unheard-of .* PERDURE_PRICES"):
        check_prices([agent], Settings(agents=""))

    check_prices([replace(agent, price=CENT)], Settings(agents=""))
    check_prices([replace(agent, limits=Limits(turn_tokens=5))], Settings(agents=""))
