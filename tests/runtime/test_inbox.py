"""Deliveries after they were accepted: looked up, awaited, taken back, changed, and come to one end each."""

import asyncio
from typing import Any

import pytest

from tests.runtime.told import LONG, settled, show
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import text


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.conformance.agents:concierge")


async def test_a_delivery_is_looked_up_from_its_acceptance_to_its_end(stack: Stack) -> None:
    async with stack.talk() as talk:
        first = (await talk.create(LONG))["deliveryId"]
        await talk.until("message.appended")
        second, third = [(await talk.send(f"say {word}"))["deliveryId"] for word in ("two", "three")]
        busy = [await show(talk, each) for each in (first, second, third)]
        meanwhile = (await talk.http.get(f"/v1/sessions/{talk.session_id}/deliveries")).json()["deliveries"]
        ends = await asyncio.gather(*(settled(talk, each) for each in (first, second, third)))
        listed = (await talk.http.get(f"/v1/sessions/{talk.session_id}/deliveries")).json()["deliveries"]

    assert [each["status"] for each in busy] == ["running", "queued", "queued"]
    assert [each.get("position") for each in busy] == [None, 1, 2]
    assert [(each["status"], each["outcome"], each["turnId"]) for each in ends] == [
        ("settled", "completed", f"turn_{number}") for number in range(3)
    ]
    assert all(each["acceptedAt"] <= each["startedAt"] <= each["settledAt"] for each in ends)
    assert meanwhile == busy[::-1]
    assert listed == ends[::-1]


async def test_the_end_of_a_turn_names_the_deliveries_that_it_settles(stack: Stack) -> None:
    async with stack.talk() as talk:
        asked = (await talk.create('call pay {"amount": 3} then say settled'))["deliveryId"]
        parked = await talk.until_boundary()
        waiting = await show(talk, asked)
        (request,) = next(event for event in parked if event["type"] == "input.requested")["data"]["requests"]
        given = [{"requestId": request["requestId"], "optionId": "approve"}]
        answer = (await talk.send(inputResponses=given))["deliveryId"]
        resumed = await talk.until_boundary()

    def named(events: list[dict[str, Any]]) -> list[str]:
        (end,) = [event for event in events if event["type"] == "turn.completed"]
        return end["meta"].get("deliveryIds", [])

    assert waiting["status"] == "running"
    assert named(parked) == []
    assert named(resumed) == [asked, answer]


@pytest.mark.parametrize(("message", "outcome"), [("fail 400", "failed"), (LONG, "cancelled")])
async def test_a_turn_that_does_not_complete_settles_what_it_has_read(stack: Stack, message: str, outcome: str) -> None:
    async with stack.talk() as talk:
        delivery_id = (await talk.create(message))["deliveryId"]
        if outcome == "cancelled":
            await talk.until("message.appended")
            await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel", json={})
        end = await settled(talk, delivery_id)

    assert (end["status"], end["outcome"]) == ("settled", outcome)
    assert end.get("error", {}).get("code") == ("MODEL_CALL_FAILED" if outcome == "failed" else None)


async def test_a_delivery_that_waits_is_withdrawn_and_no_turn_reads_it(stack: Stack) -> None:
    async with stack.talk() as talk:
        first = (await talk.create(LONG))["deliveryId"]
        await talk.until("message.appended")
        second = (await talk.send("say two"))["deliveryId"]
        third = (await talk.send("say three"))["deliveryId"]

        answers = [await talk.http.delete(f"/v1/deliveries/{second}") for _ in range(2)]
        taken = await talk.http.delete(f"/v1/deliveries/{first}")
        moved = await show(talk, third)
        await talk.until_boundary()
        said = text(await talk.until_boundary())
        end = await settled(talk, third)

    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["outcome"] == answers[1].json()["outcome"] == "withdrawn"
    assert (taken.status_code, taken.json()["code"]) == (409, "delivery_taken")
    assert moved["position"] == 1
    assert said == "three"
    assert end["outcome"] == "completed"


async def test_the_only_message_of_an_idle_worker_can_be_withdrawn(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, agents="tests.conformance.agents:concierge", workers=0)
    async with stack.talk() as talk:
        first = (await talk.create("say one"))["deliveryId"]
        withdrawn = await talk.http.delete(f"/v1/deliveries/{first}")
        second = (await talk.send("say two"))["deliveryId"]
        stack.start_worker()
        end = await settled(talk, second)
        said = text(await talk.until_boundary())

    assert withdrawn.json()["outcome"] == "withdrawn"
    assert (end["outcome"], said) == ("completed", "two")


async def test_a_message_that_waits_is_changed_by_who_has_read_its_newest_version(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create(LONG)
        await talk.until("message.appended")
        waiting = (await talk.send("say two"))["deliveryId"]
        url = f"/v1/deliveries/{waiting}"
        version = (await talk.http.get(url)).headers["etag"]

        unnamed = await talk.http.patch(url, json={"message": "say nothing"})
        changed = await talk.http.patch(url, json={"message": "say changed"}, headers={"if-match": version})
        stale = await talk.http.patch(url, json={"message": "say again"}, headers={"if-match": version})
        await talk.until_boundary()
        said = text(await talk.until_boundary())
        late = await talk.http.patch(url, json={"message": "say late"}, headers={"if-match": changed.headers["etag"]})

    assert [(answer.status_code, answer.json()["code"]) for answer in (unnamed, stale)] == [
        (412, "delivery_changed")
    ] * 2
    assert "If-Match" in unnamed.json()["error"]
    assert changed.status_code == 200
    assert said == "changed"
    assert (late.status_code, late.json()["code"]) == (409, "delivery_taken")


async def test_who_waits_is_answered_with_what_is_when_time_is_up(stack: Stack) -> None:
    async with stack.talk() as talk:
        running = (await talk.create(LONG))["deliveryId"]
        answer = await talk.http.get(f"/v1/deliveries/{running}", headers={"prefer": "wait=1"})

    assert answer.json()["status"] in ("queued", "running")
    assert answer.headers["preference-applied"] == "wait=1"


@pytest.mark.parametrize("kind", ["clear", "compact", "reset"])
async def test_a_control_settles_with_its_own_end(stack: Stack, kind: str) -> None:
    async with stack.talk() as talk:
        await talk.say("say one")
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/{kind}")
        listed = (await talk.http.get(f"/v1/sessions/{talk.session_id}/deliveries")).json()["deliveries"]
        end = await settled(talk, listed[0]["deliveryId"])

    assert (end["kind"], end["status"], end["outcome"]) == (kind, "settled", "completed")


async def test_a_control_that_fails_says_why(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say("say one")
        for _ in range(2):
            await talk.http.post(f"/eve/v1/session/{talk.session_id}/compact")
        listed = (await talk.http.get(f"/v1/sessions/{talk.session_id}/deliveries")).json()["deliveries"]
        ends = [await settled(talk, each["deliveryId"]) for each in listed[:2]]

    assert [each["outcome"] for each in ends] == ["failed", "completed"]
    assert ends[0]["error"]["code"] == "NOTHING_TO_SUMMARISE"


@pytest.mark.parametrize("delivery_id", ["dlv_none", "d", "ses_x", "%00"])
async def test_an_unknown_delivery_is_not_found(stack: Stack, delivery_id: str) -> None:
    async with stack.talk() as talk:
        answers = [await talk.http.request(method, f"/v1/deliveries/{delivery_id}") for method in ("GET", "DELETE")]

    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(404, "delivery_not_found")] * 2
