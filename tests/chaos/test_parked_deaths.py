"""`kill -9` at every place between the model's request and the step after an answer.

Where a worker leaves what it leaves in a turn that asks nobody (`test_killed_workers`), it dies here in `make chaos`.
"""

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx2
import pytest

from tests.support.cases import parameters_of
from tests.support.chaos.consent import seconds
from tests.support.chaos.evidence import Json
from tests.support.chaos.people import answer, asked, cancel, park, response, row_of, stopped
from tests.support.chaos.scripts import Script, call, say
from tests.support.chaos.world import Caller, World, dies_at, kept_types, reported, undisturbed, unique
from tests.support.talk import text
from tests.support.waiting import until

from .lanes import Lane, side_by_side

pytestmark = pytest.mark.chaos
BREAKS_TEMPORAL = True

#: The deaths are died once for all tests; processes beside each other would each die them for themselves.
dies_once = pytest.mark.deaths

#: Turns whose time a story may take beyond what is promised: what a parked turn does is the work of about three.
_TURNS = 3

#: Nobody is taken for dead while Temporal is away, however long its start takes on a busy machine.
PATIENT = {"PERDURE_HEARTBEAT_TIMEOUT": "60"}

#: Seconds after Temporal's return until all that was accepted meanwhile is signalled.
SIGNALLED_WITHIN = 15.0

#: Where the worker dies before people are asked, and how often the model is asked for the step that asks them.
ASKING = {
    "model_before_begin": 1,
    "model_before_settle": 2,
    "model_after_settle": 1,
    "park_before_commit": 1,
    "park_after_commit": 1,
}

#: Where it dies after they have answered: effects of the approved call, what it is reported as, and how often the
#: model is asked for the step that follows. (The second model step of its life is the one after the answer.)
RESUMING = {
    "resume_before_commit": (1, "completed", 1),
    "resume_after_commit": (1, "completed", 1),
    "tool_before_intent": (1, "completed", 1),
    "tool_after_intent": (0, "unknown", 1),
    "tool_after_effect": (1, "unknown", 1),
    "tool_after_settle": (1, "completed", 1),
    "model_before_settle:2": (1, "completed", 2),
    "model_after_settle:2": (1, "completed", 1),
}

#: What only `make chaos` runs: the model or the tool had begun nothing, or had settled everything.
OF_ANY_TURN = {
    *("model_before_begin", "model_after_settle"),
    *("tool_before_intent", "tool_after_settle", "model_before_settle:2"),
}


def is_of_any_turn(point: str) -> bool:
    return point in OF_ANY_TURN


of_any_turn = pytest.mark.slow_where.with_args(is_of_any_turn)


@pytest.fixture(scope="module")
def settings_of_all() -> dict[str, str]:
    """Who says nothing is taken for dead sooner than elsewhere: many die here."""
    return {"PERDURE_HEARTBEAT_TIMEOUT": "2"}


@dataclass(frozen=True)
class Story:
    """One session, of which a worker died."""

    script: Script
    #: By which the ledger knows the call that had to be approved.
    note: str
    #: The status of the request when it was answered, and what was emitted after that.
    outcome: Json
    events: list[Json]
    #: Seconds from the death to the next boundary, and how many it may take.
    took: float
    bound: float


@pytest.fixture(scope="module")
def stories(
    request: pytest.FixtureRequest, shared_world: World, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Story]:
    """The deaths that the chosen tests look at."""
    directory = tmp_path_factory.mktemp("deaths")
    chosen = [parameters_of(item) for item in request.session.items if item.path == request.path]
    points = [each["point"] for each in chosen if "point" in each]
    plays = {point: partial(story, point=point, once=directory / point) for point in points}
    return asyncio.run(side_by_side(shared_world, plays))


@dies_once
@of_any_turn
@pytest.mark.parametrize(("point", "times"), ASKING.items())
async def test_a_request_survives_the_worker_that_made_it(
    world: World, stories: dict[str, Story], point: str, times: int
) -> None:
    story = stories[point]

    assert (story.outcome["status"], story.outcome["optionId"]) == ("answered", "approve")
    assert text(story.events) == story.script.answer
    assert len(world.ledger.of_call("pay", story.note)) == 1
    assert (world.times_asked(story.script.message), world.times_asked(story.script.message, 1)) == (times, 1)
    assert story.took < story.bound


@dies_once
@of_any_turn
@pytest.mark.parametrize(("point", "expected"), RESUMING.items())
async def test_an_answer_survives_the_worker_that_carries_it_out(
    world: World, stories: dict[str, Story], point: str, expected: tuple[int, str, int]
) -> None:
    story = stories[point]

    acted, asked_again = len(world.ledger.of_call("pay", story.note)), world.times_asked(story.script.message, 1)
    assert (acted, reported(story.events), asked_again) == expected
    assert text(story.events) == story.script.answer
    assert story.took < story.bound


async def test_an_answer_is_signalled_by_another_api_when_its_own_died(world: World) -> None:
    """Counted, and neither the caller nor the session knows it. Any running API notices."""
    world.only_worker()
    script = call("pay")
    async with world.caller() as caller:
        (request_id,) = await park(caller, script)

        await answered_into_the_void(world, caller, request_id, "before_signal")

        assert row_of(world, request_id)["status"] == "answered"
        assert text(await caller.until_boundary()) == script.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1


@pytest.mark.parametrize("moment", ["before_signal", "after_signal"])
async def test_an_answer_whose_api_died_counts_once_when_it_is_given_again(world: World, moment: str) -> None:
    world.only_worker()
    script = call("pay")
    async with world.caller() as caller:
        (request_id,) = await park(caller, script)

        await answered_into_the_void(world, caller, request_id, moment)
        again = [await answer(caller, request_id) for _ in range(2)]

        assert again == [{"requestId": request_id, "status": "answered", "optionId": "approve"}] * 2
        assert text(await caller.until_boundary()) == script.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1
    assert kept_types(world, caller.session_id).count("turn.started") == 2


async def test_a_cancel_request_whose_api_died_is_honoured_when_it_is_retried(world: World) -> None:
    """The caller was promised nothing yet."""
    world.only_worker()
    async with world.caller() as caller:
        (request_id,) = await park(caller, call("pay"))

        doomed, url = world.dying_api("before_signal")
        await into_the_void(f"{url}/eve/v1/session/{caller.session_id}/cancel", {})
        await until(lambda: not doomed.alive, "the API to die")
        again = await cancel(caller)
        # On a busy machine the sweeper of the other API may be faster.
        assert again == "accepted" or row_of(world, request_id)["status"] == "withdrawn"
        await stopped(world, caller)

    assert row_of(world, request_id)["status"] == "withdrawn"
    assert kept_types(world, caller.session_id).count("cancel.requested") == 1


async def test_an_answer_is_kept_while_temporal_is_away_and_signalled_soon_after_its_return(world: World) -> None:
    world.only_worker()
    script = call("pay")
    async with world.caller() as caller:
        usual = await undisturbed(caller)
        (request_id,) = await park(caller, script)

        world.stack.temporal.process.kill()
        outcome = await answer(caller, request_id)
        world.stack.restart_temporal()
        returned = time.monotonic()

        assert outcome["status"] == "answered"
        assert text(await caller.until_boundary()) == script.answer
        assert time.monotonic() - returned < SIGNALLED_WITHIN + _TURNS * usual
    assert len(world.ledger.of_call("pay", script.note)) == 1


async def test_a_resumed_call_outlives_temporal(world: World) -> None:
    world.only_worker(PATIENT)
    script = call("pay", gate="before")
    async with world.caller() as caller:
        (request_id,) = await park(caller, script)
        await answer(caller, request_id)
        await until(lambda: world.ledger.reached(script.note), "the call to be at its gate")

        world.stack.restart_temporal()
        world.ledger.open(script.note)

        assert text(await caller.until_boundary()) == script.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1


async def test_what_waits_for_people_outlives_everything(world: World) -> None:
    """The id that was seen before the end of all processes is good after it."""
    world.only_worker()
    script = call("pay")
    caller = world.caller()
    (request_id,) = await park(caller, script)

    world.kill_everything()
    world.start_everything()

    after = world.caller(caller)
    await answer(after, request_id)
    assert text(await after.until_boundary()) == script.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1


async def test_time_runs_out_while_no_worker_lives(world: World) -> None:
    """It takes no answer any more, though it is not closed; the next worker does what was declared."""
    world.only_worker()
    denied, agreed = call("pay_soon"), call("pay_anyway")
    callers = [world.caller(), world.caller()]
    parked = await asyncio.gather(park(callers[0], denied), park(callers[1], agreed))
    world.kill_workers()
    requests = [request_id for (request_id,) in parked]

    await until(lambda: all(has_expired(row_of(world, each)) for each in requests), "the time to answer to end")
    late = await posted(callers[0], requests[0])
    world.only_worker()
    events = [await caller.until_boundary() for caller in callers]

    assert (late.status_code, late.json()["code"]) == (409, "input_expired")
    assert [reported(each) for each in events] == ["rejected", "completed"]
    assert [text(each) for each in events] == [denied.answer, agreed.answer]
    assert world.ledger.of_call("pay_soon", denied.note) == []
    assert len(world.ledger.of_call("pay_anyway", agreed.note)) == 1


async def test_a_cancel_request_waits_for_a_worker(world: World) -> None:
    """One session waits for an answer, another one has a message that no turn has consumed."""
    world.only_worker()
    gated, unread = call("pay"), say()
    parked, idle = world.caller(), world.caller()
    (request_id,) = await park(parked, gated)
    await idle.say(say().message)
    world.kill_workers()

    await idle.send(unread.message)
    responses = [await cancel(parked), await cancel(idle)]
    assert "turn.cancelled" not in kept_types(world, parked.session_id) + kept_types(world, idle.session_id)
    world.only_worker()
    await stopped(world, parked)
    await stopped(world, idle)

    assert responses == ["accepted", "accepted"]
    assert row_of(world, request_id)["status"] == "withdrawn"
    assert world.times_asked(unread.message) == 0
    assert world.ledger.of_call("pay", gated.note) == []


# --- helpers ------------------------------------------------------------------------------------------------


async def story(lane: Lane, *, point: str, once: Path) -> Story:
    free, gated = call("charge"), call("pay")
    script = beside(free, gated) if point.startswith("park") else gated
    doomed = lane.worker(dies_at(point, once))
    async with lane.caller() as caller:
        await caller.create(script.message)
        if point in ASKING:
            heir = await lane.takes_over(doomed)
            (request_id,) = asked(await caller.until_boundary())
            took = time.monotonic() - heir.died
            outcome = await answer(caller, request_id)
            events = await caller.until_boundary()
        else:
            (request_id,) = asked(await caller.until_boundary())
            outcome = await answer(caller, request_id)
            heir = await lane.takes_over(doomed)
            events = await caller.until_boundary()
            took = time.monotonic() - heir.died
        bound = await heir.bound(caller, _TURNS)
    heir.process.kill()
    return Story(script, gated.note, outcome, events, took, bound)


def beside(free: Script, gated: Script) -> Script:
    """One step with two calls: the turn parks when the one has run, in an activity of its own."""
    word = unique()
    message = f'call charge {{"note": "{free.note}"}} and pay {{"note": "{gated.note}"}} then say {word}'
    return Script(message, word)


async def answered_into_the_void(world: World, caller: Caller, request_id: str, moment: str) -> None:
    """An answer that is counted, by an API that dies before it can say so."""
    doomed, url = world.dying_api(moment)
    body = {"continuationToken": caller.token, "inputResponses": [response(request_id)]}
    await into_the_void(f"{url}/eve/v1/session/{caller.session_id}", body)
    await until(lambda: not doomed.alive, "the API to die")


async def into_the_void(url: str, body: Json) -> None:
    """A request whose answer never comes."""
    async with httpx2.AsyncClient(timeout=60, verify=False) as http:
        with pytest.raises(httpx2.HTTPError):
            await http.post(url, json=body)


async def posted(caller: Caller, request_id: str) -> httpx2.Response:
    body = {"continuationToken": caller.token, "inputResponses": [response(request_id)]}
    return await caller.http.post(f"/eve/v1/session/{caller.session_id}", json=body)


def has_expired(row: Json) -> bool:
    return seconds(row["request"]["expiresAt"]) < time.time()
