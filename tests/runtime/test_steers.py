"""Messages that enter the turn that runs, and what is meant for others than them."""

import asyncio
from pathlib import Path

import httpx2
import pytest

from tests.runtime.told import LONG, all_turns, busy, change, of_type, prompts, settled
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import text


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.conformance.agents:concierge")


THREE = 'call work {"name": "one", "seconds": 2} and work {"name": "two"} and work {"name": "three"} then say all done'
SKIPPED = "Skipped: the user said something else."


@pytest.fixture(params=["child", "inline"])
def steered(make_stack: StackFactory, tmp_path: Path, request: pytest.FixtureRequest) -> Stack:
    ledger = tmp_path / "ledger"
    ledger.touch()
    agents = f"tests.runtime.steered:{request.param}"
    return make_stack(provider=True, agents=agents, environment={"TEST_LEDGER": str(ledger)})


def ran(stack: Stack) -> list[str]:
    return Path(stack.environment["TEST_LEDGER"]).read_text().split()


async def until_ran(stack: Stack, name: str) -> None:
    async with asyncio.timeout(30):
        while name not in ran(stack):
            await asyncio.sleep(0.02)


async def asked(stack: Stack) -> list[list[str]]:
    """What people have said in each request to the model."""
    async with httpx2.AsyncClient(base_url=stack.provider_url.removesuffix("/v1"), verify=False) as http:
        found = (await http.get("/requests")).json()["requests"]
    return [request["texts"] for request in found]


@pytest.mark.parametrize("killed", [False, True])
async def test_messages_that_steer_enter_the_turn_before_the_calls_that_have_not_begun(
    steered: Stack, killed: bool
) -> None:
    async with steered.talk() as talk:
        first = (await talk.create(THREE))["deliveryId"]
        await until_ran(steered, "one")
        follow = (await talk.send("say followed"))["deliveryId"]
        ids = [(await talk.send(f"say {word}", mode="steer"))["deliveryId"] for word in ("left", "right")]
        if killed:
            steered.workers[0].kill()
            steered.start_worker()
        events = await all_turns(talk, 2)
        ends = [await settled(talk, each) for each in (first, *ids, follow)]
        requests = await asked(steered)

    assert "two" not in ran(steered)
    assert "three" not in ran(steered)
    # The provider refuses a request in which a call has no result.
    results = [each["data"]["result"]["output"] for each in of_type(events, "action.result")]
    assert results == ["one is done", SKIPPED, SKIPPED]
    assert requests[1] == [THREE, "say left", "say right"]
    (applied,) = of_type(events, "steer.applied")
    assert (applied["data"]["deliveryIds"], applied["data"]["stepIndex"]) == (ids, 1)
    assert [end["turnId"] for end in ends] == ["turn_0"] * 3 + ["turn_1"]
    assert [end["outcome"] for end in ends] == ["completed"] * 4
    assert [end["answeredByTurn"] for end in ends] == ["turn_0"] * 3 + ["turn_1"]
    assert prompts(events) == [[THREE, "say left", "say right"], ["say followed"]]
    assert len(of_type(events, "turn.started", "turn.completed")) == 4


async def test_a_message_that_steers_enters_the_turn_before_it_would_end(steered: Stack) -> None:
    async with steered.talk() as talk:
        await busy(talk)
        steering = (await talk.send("say steered", mode="steer"))["deliveryId"]
        events = await talk.until_boundary()
        end = await settled(talk, steering)
        after = await talk.say("say after")
        requests = await asked(steered)

    assert prompts(events) == [[LONG, "say steered"]]
    assert [each["data"]["finishReason"] for each in of_type(events, "message.completed")] == ["stop", "stop"]
    assert text(events).endswith("steered")
    assert (end["outcome"], end["turnId"]) == ("completed", "turn_0")
    assert after == "after"
    assert requests[1][-1] == "say steered"
    assert [each for each in requests[2] if each.startswith(("say", "drip"))] == [LONG, "say steered", "say after"]


async def test_a_message_that_steers_an_idle_session_is_an_ordinary_one(steered: Stack) -> None:
    async with steered.talk() as talk:
        await talk.create("say one", mode="steer")
        first = await talk.until_boundary()
        await talk.send("say two", mode="steer")
        events = await talk.until_boundary()

    assert (prompts(first), prompts(events)) == ([["say one"]], [["say two"]])
    assert of_type([*first, *events], "steer.applied") == []


async def test_a_message_steers_the_turn_that_begins_while_it_waits(steered: Stack) -> None:
    steered.workers[0].kill()
    async with steered.talk() as talk:
        await talk.create("say one")
        steering = (await talk.send("say two", mode="steer"))["deliveryId"]
        steered.start_worker()
        events = await talk.until_boundary()
        end = await settled(talk, steering)

    assert prompts(events) == [["say one", "say two"]]
    assert (end["outcome"], end["turnId"]) == ("completed", "turn_0")


async def test_what_steers_a_turn_that_dies_first_becomes_the_next_one(steered: Stack) -> None:
    async with steered.talk() as talk:
        first = (await talk.create('call work {"name": "one", "seconds": 2} then say done'))["deliveryId"]
        await until_ran(steered, "one")
        steering = (await talk.send("say steered", mode="steer"))["deliveryId"]
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel", json={"turnId": "turn_0"})
        ends = [await settled(talk, each) for each in (first, steering)]
        events = await all_turns(talk, 2)

    assert [(end["outcome"], end["turnId"]) for end in ends] == [("cancelled", "turn_0"), ("completed", "turn_1")]
    assert prompts(events)[1] == ["say steered"]
    assert of_type(events, "steer.applied") == []


async def test_one_that_was_withdrawn_steers_nothing(steered: Stack) -> None:
    async with steered.talk() as talk:
        await busy(talk)
        steering = (await talk.send("say steered", mode="steer"))["deliveryId"]
        await talk.http.delete(f"/v1/deliveries/{steering}")
        events = await talk.until_boundary()
        after = await talk.say("say after")

    assert prompts(events) == [[LONG]]
    assert after == "after"


async def test_a_waiting_message_can_be_made_to_steer(steered: Stack) -> None:
    async with steered.talk() as talk:
        await busy(talk)
        waiting = (await talk.send("say steered"))["deliveryId"]
        await change(talk, waiting, mode="steer")
        events = await talk.until_boundary()

    assert prompts(events) == [[LONG, "say steered"]]


@pytest.mark.parametrize(
    "point", ["model_after_begin", "model_before_settle", "model_after_settle", "model_before_begin"]
)
async def test_a_message_steers_once_wherever_the_worker_dies(
    make_stack: StackFactory, tmp_path: Path, point: str
) -> None:
    ledger = tmp_path / "ledger"
    ledger.touch()
    environment = {"TEST_LEDGER": str(ledger)}
    stack = make_stack(provider=True, agents="tests.runtime.steered:child", environment=environment, workers=0)
    async with stack.talk() as talk:
        await talk.create('call work {"name": "one"} then say done')
        steering = (await talk.send("say steered", mode="steer"))["deliveryId"]
        once = {"PERDURE_KILL_POINT": point, "PERDURE_KILL_ONCE_FILE": str(tmp_path / "killed")}
        dying = stack.start_worker(once, wait=False)
        async with asyncio.timeout(30):
            while dying.alive:
                await asyncio.sleep(0.05)
        stack.start_worker()
        events = await talk.until_boundary()
        end = await settled(talk, steering)
        requests = await asked(stack)

    assert requests[-1].count("say steered") == 1
    assert all(request.count("say steered") <= 1 for request in requests)
    assert len(of_type(events, "steer.applied")) == 1
    assert end["outcome"] == "completed"


async def test_a_message_steers_the_lane_that_it_names(steered: Stack) -> None:
    async with steered.talk() as talk:
        await talk.say("say one")
        running = (await talk.send(LONG, lane="cron"))["deliveryId"]
        async with asyncio.timeout(30):
            while [LONG] not in [request[-1:] for request in await asked(steered)]:
                await asyncio.sleep(0.02)
        steering = (await talk.send("say steered", lane="cron", mode="steer"))["deliveryId"]
        ends = [await settled(talk, each) for each in (running, steering)]
        requests = await asked(steered)

    assert [end["outcome"] for end in ends] == ["completed", "completed"]
    assert ends[0]["turnId"] == ends[1]["turnId"]
    assert [request[-1] for request in requests] == ["say one", LONG, "say steered"]


async def test_a_cancel_that_meant_what_is_superseded_spares_the_message_that_interrupts(
    make_stack: StackFactory,
) -> None:
    stack = make_stack(provider=True, agents="tests.conformance.agents:concierge", workers=0)
    async with stack.talk() as talk:
        meant = (await talk.create("say one"))["deliveryId"]
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel", json={})
        urgent = (await talk.send("say now", mode="interrupt"))["deliveryId"]
        stack.start_worker()
        ends = [await settled(talk, each) for each in (meant, urgent)]

    assert [end["outcome"] for end in ends] == ["superseded", "completed"]


async def test_a_task_that_has_not_begun_keeps_its_message(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, agents="tests.conformance.agents:concierge", workers=0)
    async with stack.talk() as talk:
        task = (await talk.create("say one", mode="task"))["deliveryId"]
        urgent = (await talk.send("say now", mode="interrupt"))["deliveryId"]
        stack.start_worker()
        ends = [await settled(talk, each) for each in (task, urgent)]

    assert [end["outcome"] for end in ends] == ["completed", "refused"]
