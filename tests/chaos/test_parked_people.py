"""People who answer at once, late, twice, for others or nonsense: nothing runs that was not approved."""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from tests.support.chaos.evidence import Json
from tests.support.chaos.people import (
    API_KEYS,
    KEYS,
    answer,
    answered_by,
    cancel,
    park,
    response,
    results,
    row_of,
    stopped,
)
from tests.support.chaos.scripts import Script, call, drip, say
from tests.support.chaos.world import Caller, World, kept_types, running_world, undisturbed, unique
from tests.support.talk import text
from tests.support.waiting import until

pytestmark = pytest.mark.chaos

#: What stops at a word stops within this time, in seconds, and that of so many turns as the machine is in that minute.
STOPS = 2.0
TURNS = 3


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Generator[World]:
    """Two APIs, and callers with keys beside the one who calls from this machine."""
    environment = {"PERDURE_API_KEYS": API_KEYS, "PERDURE_TRUST_LOOPBACK": "true"}
    with running_world(tmp_path_factory.mktemp("people"), environment, apis=2) as world:
        yield world


@pytest.fixture
async def caller(world: World) -> AsyncGenerator[Caller]:
    async with world.caller() as caller:
        yield caller


# --- at once ------------------------------------------------------------------------------------------------


async def test_of_fifty_answers_at_once_one_counts(world: World, caller: Caller) -> None:
    script = call("pay")
    (request_id,) = await park(caller, script)

    outcomes = await all_at_once(world, caller, [response(request_id)] * 50)

    assert outcomes == [{"requestId": request_id, "status": "answered", "optionId": "approve"}] * 50
    assert text(await caller.until_boundary()) == script.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1
    # One resumed turn, and no turns of their own for the losers.
    assert kept_types(world, caller.session_id).count("turn.started") == 2


async def test_of_fifty_answers_that_differ_one_counts(world: World, caller: Caller) -> None:
    script = call("pay")
    (request_id,) = await park(caller, script)

    said = [response(request_id, "approve" if number % 2 else "deny") for number in range(50)]
    outcomes = await all_at_once(world, caller, said)
    await world.settled()

    (option,) = {outcome["optionId"] for outcome in outcomes}
    assert {outcome["status"] for outcome in outcomes} == {"answered"}
    assert len(world.ledger.of_call("pay", script.note)) == (1 if option == "approve" else 0)


@pytest.mark.postgres
async def test_of_fifty_answers_at_once_one_counts_on_postgresql(shared_out: World) -> None:
    world, script = shared_out, call("pay")
    world.stack.start_worker(wait=False)
    world.stack.start_worker()
    async with world.caller() as caller:
        (request_id,) = await park(caller, script)

        outcomes = await all_at_once(world, caller, [response(request_id)] * 50)

        assert {(outcome["status"], outcome["optionId"]) for outcome in outcomes} == {("answered", "approve")}
        assert text(await caller.until_boundary()) == script.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1


async def test_an_answer_and_a_cancel_request_race(world: World) -> None:
    """Whichever wins, all get the same outcome; what was stopped does not act."""
    scripts = [call("pay") for _ in range(8)]
    callers = [world.caller() for _ in scripts]
    requests = [(await park(caller, script))[0] for caller, script in zip(callers, scripts, strict=True)]

    async def both(number: int) -> None:
        caller, request_id = callers[number], requests[number]
        said = [lambda: caller.send(inputResponses=[response(request_id)]), lambda: cancel(caller)]
        await asyncio.gather(*(each() for each in (said if number % 2 else reversed(said))))

    await asyncio.gather(*(both(number) for number in range(len(callers))))
    evidence = await world.settled()

    for caller, request_id, script in zip(callers, requests, scripts, strict=True):
        (row,) = evidence.inputs[caller.session_id]
        acted = len(world.ledger.of_call("pay", script.note))
        results = [each["data"] for each in evidence.events[caller.session_id] if each["type"] == "action.result"]
        assert row["status"] in ("answered", "withdrawn"), request_id
        assert [each["status"] == "completed" for each in results] == [acted == 1]


# --- by others ----------------------------------------------------------------------------------------------


async def test_a_request_is_not_approved_through_another_session(world: World, caller: Caller) -> None:
    script = call("pay")
    (request_id,) = await park(caller, script)
    async with world.caller() as other:
        await other.say(say().message)

        outcome = await answer(other, request_id)
        await other.until_boundary()

    assert outcome == {"requestId": request_id, "status": "unknown"}
    assert await still_open(world, caller, script, request_id)


async def test_a_request_is_not_approved_by_somebody_else(world: World, caller: Caller) -> None:
    """Neither as an answer from outside, nor with the session's own token."""
    script = call("pay")
    (request_id,) = await park(caller, script)

    outside = await answered_by(world.stack.url, request_id, {"optionId": "approve"}, "bob")
    body = {"continuationToken": caller.token, "inputResponses": [response(request_id)]}
    inside = await caller.http.post(
        f"/eve/v1/session/{caller.session_id}", json=body, headers={"x-api-key": KEYS["alice"]}
    )

    assert (outside.status_code, outside.json()["code"]) == (404, "input_not_found")
    assert inside.status_code == 404
    assert await still_open(world, caller, script, request_id)


async def test_a_plain_yes_is_no_approval_of_two_requests(world: World, caller: Caller) -> None:
    one, two = call("pay"), call("pay")
    message = f'call pay {{"note": "{one.note}"}} and pay {{"note": "{two.note}"}} then say over {unique()}'
    requests = await park(caller, Script(message, ""))

    await caller.send("yes")
    async with world.caller() as other:
        await other.say(say().message)

    assert [row_of(world, each)["status"] for each in requests] == ["open", "open"]
    assert world.ledger.of_call("pay", one.note) + world.ledger.of_call("pay", two.note) == []
    await cancel(caller)
    await stopped(world, caller)


# --- altered ------------------------------------------------------------------------------------------------


async def test_what_the_approver_changed_is_what_runs(world: World, caller: Caller) -> None:
    script, changed = call("pay"), unique("n")
    (request_id,) = await park(caller, script)

    await answer(caller, request_id, arguments={"note": changed})

    assert text(await caller.until_boundary()) == script.answer
    assert world.ledger.of_call("pay", script.note) == []
    assert len(world.ledger.of_call("pay", changed)) == 1


@pytest.mark.parametrize(
    "altered",
    [
        {"optionId": "approve", "arguments": {"note": 5}},
        {"optionId": "approve", "arguments": {}},
        {"optionId": "approve", "arguments": "x"},
        {"optionId": "deny", "arguments": {"note": "x"}},
        {"optionId": 1},
        {"optionId": "approve", "requestId": ["x"]},
    ],
    ids=str,
)
async def test_an_answer_that_makes_no_sense_leaves_the_request_open(
    world: World, caller: Caller, altered: dict[str, Any]
) -> None:
    script = call("pay")
    (request_id,) = await park(caller, script)

    body = {"continuationToken": caller.token, "inputResponses": [{"requestId": request_id, **altered}]}
    refused = await caller.http.post(f"/eve/v1/session/{caller.session_id}", json=body)

    assert refused.status_code == 400, refused.text
    assert await still_open(world, caller, script, request_id)


async def test_a_second_answer_changes_nothing_and_the_model_is_informed(world: World, caller: Caller) -> None:
    script = call("pay")
    (request_id,) = await park(caller, script)
    await answer(caller, request_id, "deny")
    assert results(await caller.until_boundary()) == [("pay", "rejected")]

    outcome = await answer(caller, request_id)
    await caller.until_boundary()

    assert outcome == {"requestId": request_id, "status": "answered", "optionId": "deny"}
    assert world.ledger.of_call("pay", script.note) == []


async def test_the_same_answer_again_is_no_new_turn(world: World, caller: Caller) -> None:
    script = call("pay")
    (request_id,) = await park(caller, script)
    first = await caller.send(inputResponses=[response(request_id)])
    await caller.until_boundary()

    again = await caller.send(inputResponses=[response(request_id)])
    following = say()

    assert again == first
    assert await caller.say(following.message) == following.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1


# --- stopped ------------------------------------------------------------------------------------------------


async def test_a_model_that_streams_is_cancelled(world: World, caller: Caller) -> None:
    script = drip(words=2000, delay=20)
    await caller.create(script.message)
    await until(lambda: "message.appended" in kept_types(world, caller.session_id), "the model to stream")

    began = time.monotonic()
    status = await cancel(caller)
    events = await caller.until_boundary()
    took = time.monotonic() - began

    assert status == "accepted"
    assert [event["type"] for event in events if not event["type"].startswith("message.")][-2:] == [
        "turn.cancelled",
        "session.waiting",
    ]
    assert await is_quiet(world, caller)
    assert took < STOPS + TURNS * await undisturbed(caller)


@pytest.mark.parametrize("tool", ["charge", "put", "look"])
async def test_a_tool_that_runs_is_stopped(world: World, caller: Caller, tool: str) -> None:
    script = call(tool, gate="before")
    await caller.create(script.message)
    await until(lambda: world.ledger.reached(script.note), "the tool to be at its gate")

    began = time.monotonic()
    await cancel(caller)
    events = await caller.until_boundary()
    took = time.monotonic() - began
    world.ledger.open(script.note)

    ends = ["action.result", "step.completed", "turn.cancelled", "session.waiting"]
    assert [event["type"] for event in events][-4:] == ends
    assert results(events) == [(tool, "failed")]
    assert await is_quiet(world, caller)
    assert took < STOPS + TURNS * await undisturbed(caller)
    assert world.ledger.of_call(tool, script.note) == []


async def test_an_approved_call_that_runs_is_stopped(world: World, caller: Caller) -> None:
    script = call("pay", gate="before")
    (request_id,) = await park(caller, script)
    await answer(caller, request_id)
    await until(lambda: world.ledger.reached(script.note), "the call to be at its gate")

    await cancel(caller)
    events = await caller.until_boundary()
    world.ledger.open(script.note)

    assert results(events) == [("pay", "failed")]
    assert await is_quiet(world, caller)
    assert world.ledger.of_call("pay", script.note) == []


async def test_nothing_is_said_to_have_stopped_before_it_has(world: World, caller: Caller) -> None:
    """A tool that does not stop: the cancel request is emitted at once, and the end when it ends."""
    note, word = unique("n"), unique()
    message = f'call pay {{"note": "{note}", "before": "{note}", "cling": true}} then say {word}'
    (request_id,) = await park(caller, Script(message, word, note))
    await answer(caller, request_id)
    await until(lambda: world.ledger.reached(note), "the call to be at its gate")

    await cancel(caller)
    async with world.caller() as other:
        # As long as a whole other session takes.
        await other.say(say().message)
    early = kept_types(world, caller.session_id)
    world.ledger.open(note)
    events = await caller.until_boundary()

    assert early[-1] == "cancel.requested"
    assert [event["type"] for event in events][-2:] == ["turn.cancelled", "session.waiting"]
    assert len(world.ledger.of_call("pay", note)) == 1
    assert await is_quiet(world, caller)


# --- helpers ------------------------------------------------------------------------------------------------


async def all_at_once(world: World, caller: Caller, said: list[Json]) -> list[Json]:
    """Answer through all APIs in turn; the response that each of the callers gets."""
    body = {"continuationToken": caller.token}
    callers = [Caller(url, world.receipts) for url in world.living_apis]

    async def one(number: int, each: Json) -> Json:
        http = callers[number % len(callers)].http
        answered = await http.post(f"/eve/v1/session/{caller.session_id}", json={**body, "inputResponses": [each]})
        assert answered.status_code == 200, answered.text
        (outcome,) = answered.json()["inputs"]
        return outcome

    outcomes = await asyncio.gather(*(one(number, each) for number, each in enumerate(said)))
    for each in callers:
        await each.http.aclose()
    return list(outcomes)


async def still_open(world: World, caller: Caller, script: Script, request_id: str) -> bool:
    """Nothing has run, and its owner can still answer."""
    assert row_of(world, request_id)["status"] == "open"
    assert world.ledger.of_call("pay", script.note) == []
    await answer(caller, request_id)
    assert text(await caller.until_boundary()) == script.answer
    return len(world.ledger.of_call("pay", script.note)) == 1


async def is_quiet(world: World, caller: Caller) -> bool:
    """What was stopped writes nothing more: the next event is of the next turn."""
    before = len(kept_types(world, caller.session_id))
    script = say()
    said = await caller.say(script.message)
    return said == script.answer and kept_types(world, caller.session_id)[before] == "turn.started"
