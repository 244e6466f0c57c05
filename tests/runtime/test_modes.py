"""What messages do while their session is busy, as their mode says it."""

import asyncio
from typing import Any

import pytest

from tests.runtime.told import LONG, all_turns, busy, change, of_type, prompts, settled, show
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import text


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.conformance.agents:concierge")


# --- the fields ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        ({}, "followup"),
        ({"mode": "steer_backlog"}, "followup"),
        ({"mode": "collect"}, "collect"),
        ({"coalesce": True}, "collect"),
        ({"lane": "main", "coalesce": True, "mode": "collect"}, "collect"),
    ],
)
async def test_a_delivery_shows_its_lane_and_its_mode(stack: Stack, asked: dict[str, Any], mode: str) -> None:
    async with stack.talk() as talk:
        await busy(talk)
        waiting = (await talk.send("say two", **asked))["deliveryId"]

        shown = await show(talk, waiting)

    assert (shown["lane"], shown["mode"], shown["position"]) == ("main", mode, 1)


@pytest.mark.parametrize(
    ("asked", "code"),
    [({"mode": "soon"}, None), ({"mode": 1}, None), ({"lane": "audit"}, "unknown_lane"), ({"lane": 1}, None)],
)
async def test_what_is_no_mode_and_no_lane_is_refused(stack: Stack, asked: dict[str, Any], code: str | None) -> None:
    async with stack.talk() as talk:
        await busy(talk)
        waiting = (await talk.send("say two"))["deliveryId"]
        body = {"continuationToken": talk.token, "message": "say three", **asked}

        told = await talk.http.post(f"/eve/v1/session/{talk.session_id}", json=body)
        edited = await talk.http.patch(f"/v1/deliveries/{waiting}", json={"message": "x", **asked})
        created = await talk.http.post("/eve/v1/session", json={"message": "say one", **asked})
        prompted = await talk.http.post("/agents/concierge/new", json={"message": "x", **asked})
        left = (await talk.http.get(f"/v1/sessions/{talk.session_id}/deliveries?status=queued")).json()["deliveries"]

    answers = [(each.status_code, each.json().get("code")) for each in (told, edited, created)]
    assert answers == [(400, code)] * 3
    assert prompted.status_code == 400
    assert [each["deliveryId"] for each in left] == [waiting]


async def test_the_first_message_has_a_mode_too(stack: Stack) -> None:
    async with stack.talk() as talk:
        first = (await talk.create("say one", mode="collect"))["deliveryId"]

        shown = await settled(talk, first)

    assert (shown["mode"], shown["outcome"], shown["answeredByTurn"]) == ("collect", "completed", "turn_0")


async def test_a_message_that_waits_is_moved(stack: Stack) -> None:
    async with stack.talk() as talk:
        await busy(talk)
        waiting = [(await talk.send(f"say {word}"))["deliveryId"] for word in ("two", "three", "four")]

        moved = await change(talk, waiting[2], position=1)
        last = await change(talk, waiting[0], position=9)
        listed = (await talk.http.get(f"/v1/sessions/{talk.session_id}/deliveries?status=queued")).json()["deliveries"]
        await talk.until_boundary()
        said = [text(await talk.until_boundary()) for _ in range(3)]

    assert (moved["position"], last["position"]) == (1, 3)
    assert {each["deliveryId"]: each["position"] for each in listed} == dict(zip(waiting, (3, 2, 1), strict=True))
    assert said == ["four", "three", "two"]


@pytest.mark.parametrize("changes", [{}, {"position": 0}, {"position": True}, {"position": "first"}])
async def test_a_change_that_says_nothing_is_refused(stack: Stack, changes: dict[str, Any]) -> None:
    async with stack.talk() as talk:
        await busy(talk)
        waiting = (await talk.send("say two"))["deliveryId"]

        answer = await talk.http.patch(f"/v1/deliveries/{waiting}", json=changes, headers={"if-match": '"0"'})

    assert (answer.status_code, answer.json()["ok"]) == (400, False)


async def test_coalesce_is_the_mode_collect_and_no_other_one(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("say one")
        body = {"continuationToken": talk.token, "message": "say two", "coalesce": True, "mode": "followup"}

        answer = await talk.http.post(f"/eve/v1/session/{talk.session_id}", json=body)

    assert (answer.status_code, answer.json()["ok"]) == (400, False)


# --- collect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [False, True])
async def test_collected_messages_become_one_turn_and_the_others_stay_alone(
    make_stack: StackFactory, killed: bool
) -> None:
    stack = make_stack(provider=True, agents="tests.conformance.agents:concierge")
    async with stack.talk() as talk:
        await busy(talk)
        ids = [(await talk.send(f"say c{number}", mode="collect"))["deliveryId"] for number in range(2)]
        alone = [(await talk.send("say f0"))["deliveryId"]]
        ids += [(await talk.send(f"say c{number}", mode="collect"))["deliveryId"] for number in range(2, 5)]
        alone += [(await talk.send("say f1"))["deliveryId"]]
        await talk.until_boundary()
        if killed:
            stack.workers[0].kill()
            stack.start_worker()
        events = await all_turns(talk, 3)
        ends = [await settled(talk, each) for each in (*ids, *alone)]

    assert prompts(events) == [[f"say c{number}" for number in range(5)], ["say f0"], ["say f1"]]
    (started,) = [event for event in events if event["type"] == "turn.started"][:1]
    assert started["meta"]["deliveryIds"] == ids
    assert [(end["outcome"], end["turnId"]) for end in ends] == [("completed", "turn_1")] * 5 + [
        ("completed", "turn_2"),
        ("completed", "turn_3"),
    ]


async def test_a_message_to_an_idle_session_waits_for_those_that_follow_at_once(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("say one")
        await talk.until_boundary()
        for word in ("two", "three", "four"):
            await talk.send(f"say {word}", mode="collect")
        events = await talk.until_boundary()

    assert prompts(events) == [["say two", "say three", "say four"]]


async def test_what_is_collected_can_be_cancelled_while_it_waits(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("say one")
        await talk.until_boundary()
        waiting = (await talk.send("say two", mode="collect"))["deliveryId"]

        cancelled = await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel", json={})
        end = await settled(talk, waiting)

    assert cancelled.json()["status"] == "accepted"
    assert end["outcome"] == "cancelled"


async def test_a_mode_can_be_changed_while_the_message_waits(stack: Stack) -> None:
    async with stack.talk() as talk:
        await busy(talk)
        for word in ("two", "three", "four"):
            last = (await talk.send(f"say {word}", mode="followup" if word == "three" else "collect"))["deliveryId"]

        changed = await change(talk, last, mode="followup")
        events = await all_turns(talk, 4)

    assert changed["mode"] == "followup"
    assert prompts(events)[-3:] == [["say two"], ["say three"], ["say four"]]


async def test_the_agent_says_what_its_messages_do_by_default(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, agents="tests.runtime.collecting:agent")
    async with stack.talk() as talk:
        await busy(talk)
        one = (await talk.send("say two"))["deliveryId"]
        alone = (await talk.send("say three", mode="followup"))["deliveryId"]

        modes = [(await show(talk, each))["mode"] for each in (one, alone)]

    assert modes == ["collect", "followup"]


# --- interrupt ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [None, "worker", "api"])
async def test_an_interrupt_stops_the_turn_and_takes_the_place_of_all_that_waits(
    make_stack: StackFactory, killed: str | None
) -> None:
    stack = make_stack(provider=True, agents="tests.conformance.agents:concierge", apis=2)
    async with stack.talk() as talk:
        running = await busy(talk)
        waiting = [(await talk.send(f"say {word}", mode=mode))["deliveryId"] for word, mode in WAITING]
        if killed == "worker":
            stack.workers[0].kill()
        urgent = (await talk.send("say now", mode="interrupt"))["deliveryId"]
        after = (await talk.send("say later"))["deliveryId"]
        if killed == "worker":
            stack.start_worker()
        if killed == "api":
            stack.apis[0].kill()
    async with stack.talk(1) as other:
        other.session_id = talk.session_id
        talk = other
        ends = [await settled(talk, each) for each in (running, *waiting, urgent, after)]
        events = await all_turns(talk, 3)

    assert [end["outcome"] for end in ends] == ["cancelled", *["superseded"] * 3, "completed", "completed"]
    assert [end.get("error") for end in ends[1:4]] == [{"code": "superseded"}] * 3
    refused = of_type(events, "delivery.refused")
    assert [(each["data"]["deliveryId"], each["data"]["code"]) for each in refused] == [
        (each, "superseded") for each in waiting
    ]
    assert prompts(events) == [[LONG], ["say now"], ["say later"]]
    assert len(of_type(events, "cancel.requested")) == 1


WAITING = (("two", "followup"), ("three", "collect"), ("four", "followup"))


async def test_an_interrupt_of_an_idle_session_is_an_ordinary_message(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("say one")
        await talk.until_boundary()
        await talk.send("say two", mode="interrupt")
        events = await talk.until_boundary()

    assert prompts(events) == [["say two"]]
    assert of_type(events, "cancel.requested", "turn.cancelled") == []


async def test_the_later_of_two_interrupts_counts(stack: Stack) -> None:
    async with stack.talk() as talk:
        await busy(talk)
        answers = await asyncio.gather(*(talk.send(f"say {number}", mode="interrupt") for number in range(5)))
        ends = [await settled(talk, answer["deliveryId"]) for answer in answers]

    # One may have begun before the next one came.
    assert [end["outcome"] for end in ends].count("completed") == 1
    assert {end["outcome"] for end in ends} <= {"completed", "superseded", "cancelled"}


async def test_an_interrupt_does_not_wait_for_an_approval(stack: Stack) -> None:
    async with stack.talk() as talk:
        asked = (await talk.create('call pay {"amount": 3} then say settled'))["deliveryId"]
        await talk.until_boundary()
        waiting = (await talk.send("say two"))["deliveryId"]

        urgent = (await talk.send("say now", mode="interrupt"))["deliveryId"]
        ends = [await settled(talk, each) for each in (asked, waiting, urgent)]
        events = await all_turns(talk, 2)

    assert [end["outcome"] for end in ends] == ["cancelled", "superseded", "completed"]
    (result,) = of_type(events, "action.result")
    assert result["data"]["status"] == "rejected"


async def test_a_waiting_message_can_be_made_to_interrupt(stack: Stack) -> None:
    async with stack.talk() as talk:
        running = await busy(talk)
        urgent, other = [(await talk.send(f"say {word}"))["deliveryId"] for word in ("now", "later")]

        await change(talk, urgent, mode="interrupt")
        ends = [await settled(talk, each) for each in (running, urgent, other)]

    assert [end["outcome"] for end in ends] == ["cancelled", "completed", "superseded"]


async def test_a_cancel_beside_an_interrupt_stops_one_turn(stack: Stack) -> None:
    async with stack.talk() as talk:
        running = await busy(talk)
        cancel = talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel", json={"turnId": "turn_0"})
        urgent, _ = await asyncio.gather(talk.send("say now", mode="interrupt"), cancel)
        ends = [await settled(talk, each) for each in (running, urgent["deliveryId"])]

    assert [end["outcome"] for end in ends] == ["cancelled", "completed"]


async def test_an_interrupt_of_a_task_waits_for_its_end(stack: Stack) -> None:
    async with stack.talk() as talk:
        running = (await talk.create(LONG, mode="task"))["deliveryId"]
        await talk.until("message.appended")
        urgent = (await talk.send("say now", mode="interrupt"))["deliveryId"]
        ends = [await settled(talk, each) for each in (running, urgent)]

    assert [end["outcome"] for end in ends] == ["completed", "refused"]
