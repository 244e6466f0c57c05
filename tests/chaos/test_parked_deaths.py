"""`kill -9` at every place between the model's request and the step after somebody's answer."""

import asyncio
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from perdure.runtime.devserver import listens
from tests.support.ledger import running_ledger
from tests.support.processes import Process
from tests.support.stack import Stack
from tests.support.talk import text

from .consent import seconds
from .evidence import Json
from .people import answer, asked, cancel, park, response, row_of, stopped
from .scripts import Script, call, say
from .world import AGENT, HEARTBEAT, RECOVERY, Voice, World, dies_at, kept_types, reported, undisturbed, unique, until

# Alone: the deaths are died once for all tests; processes beside each other would each die them for themselves.
pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.timeout(300)]

_LANES = 4

#: Turns whose time a story may take beyond what is promised: what a parked turn does is the work of about three.
_TURNS = 3

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


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Generator[World]:
    """As elsewhere, but who says nothing is taken for dead sooner: many die here."""
    directory = tmp_path_factory.mktemp("parked")
    with running_ledger(directory) as ledger:
        environment = {"LEDGER_URL": ledger.url, "PERDURE_HEARTBEAT_TIMEOUT": "2"}
        with Stack(directory, workers=0, agents=AGENT, provider=True, environment=environment) as stack:
            world = World(stack, ledger)
            yield world
            world.close()


@dataclass(frozen=True)
class Story:
    """One session, of which a worker died."""

    script: Script
    #: By which the ledger knows the call that had to be approved.
    note: str
    #: How the request stood when it was answered, and what was told after that.
    outcome: Json
    events: list[Json]
    #: Seconds from the death to the next boundary.
    took: float
    #: How long it may take: what is promised, and what the machine needed in that minute to start the other worker,
    #: which runs on it beside other tests, and for turns without a death.
    bound: float


@pytest.fixture(scope="module")
def stories(shared_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Story]:
    """All deaths, some at the same time: most of it is waiting for heartbeats that do not come."""
    return asyncio.run(all_stories(shared_world, tmp_path_factory.mktemp("deaths")))


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


@pytest.mark.parametrize(("point", "expected"), RESUMING.items())
async def test_an_answer_survives_the_worker_that_carries_it_out(
    world: World, stories: dict[str, Story], point: str, expected: tuple[int, str, int]
) -> None:
    story = stories[point]

    acted, asked_again = len(world.ledger.of_call("pay", story.note)), world.times_asked(story.script.message, 1)
    assert (acted, reported(story.events), asked_again) == expected
    assert text(story.events) == story.script.answer
    assert story.took < story.bound


async def test_an_answer_is_told_by_another_api_when_its_own_died(world: World) -> None:
    """Counted, and nobody knows: neither the caller nor the session. Any API that lives notices."""
    world.only_worker()
    script = call("pay")
    async with world.voice() as voice:
        (request_id,) = await park(voice, script)

        await answered_into_the_void(world, voice, request_id, "before_signal")

        assert row_of(world, request_id)["status"] == "answered"
        assert text(await voice.until_boundary(30)) == script.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1


@pytest.mark.parametrize("moment", ["before_signal", "after_signal"])
async def test_an_answer_whose_api_died_counts_once_when_it_is_given_again(world: World, moment: str) -> None:
    world.only_worker()
    script = call("pay")
    async with world.voice() as voice:
        (request_id,) = await park(voice, script)

        await answered_into_the_void(world, voice, request_id, moment)
        again = [await answer(voice, request_id) for _ in range(2)]

        assert again == [{"requestId": request_id, "status": "answered", "optionId": "approve"}] * 2
        assert text(await voice.until_boundary()) == script.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1
    assert kept_types(world, voice.session_id).count("turn.started") == 2


async def test_a_wish_to_stop_whose_api_died_is_honoured_when_it_is_told_again(world: World) -> None:
    """The caller was promised nothing yet."""
    world.only_worker()
    async with world.voice() as voice:
        (request_id,) = await park(voice, call("pay"))

        doomed, url = world.dying_api("before_signal")
        await into_the_void(f"{url}/eve/v1/session/{voice.session_id}/cancel", {})
        await until(lambda: not doomed.alive, "the API to die")
        assert row_of(world, request_id)["status"] == "open"
        assert await cancel(voice) == "accepted"
        await stopped(world, voice)

    assert row_of(world, request_id)["status"] == "withdrawn"
    assert kept_types(world, voice.session_id).count("cancel.requested") == 1


async def test_an_answer_is_kept_while_temporal_is_away(world: World) -> None:
    world.only_worker()
    script = call("pay")
    async with world.voice() as voice:
        (request_id,) = await park(voice, script)

        world.stack.temporal.process.kill()
        outcome = await answer(voice, request_id)
        world.stack.restart_temporal()

        assert outcome["status"] == "answered"
        assert text(await voice.until_boundary(40)) == script.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1


async def test_a_resumed_call_outlives_temporal(world: World) -> None:
    world.only_worker()
    script = call("pay", gate="before")
    async with world.voice() as voice:
        (request_id,) = await park(voice, script)
        await answer(voice, request_id)
        await until(lambda: world.ledger.reached(script.note), "the call to be at its gate")

        world.stack.restart_temporal()
        world.ledger.open(script.note)

        assert text(await voice.until_boundary()) == script.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1


async def test_what_waits_for_people_outlives_everything(world: World) -> None:
    """The id that was seen before the end of all processes is good after it."""
    world.only_worker()
    script = call("pay")
    voice = world.voice()
    (request_id,) = await park(voice, script)

    world.kill_everything()
    world.start_everything()

    after = world.voice(voice)
    await answer(after, request_id)
    assert text(await after.until_boundary()) == script.answer
    assert len(world.ledger.of_call("pay", script.note)) == 1


async def test_time_runs_out_while_no_worker_lives(world: World) -> None:
    """Nobody can answer any more, though nobody has closed it; the next worker does what was declared."""
    world.only_worker()
    denied, agreed = call("pay_soon"), call("pay_anyway")
    voices = [world.voice(), world.voice()]
    requests = [(await park(voice, script))[0] for voice, script in zip(voices, (denied, agreed), strict=True)]
    world.kill_workers()

    await until(lambda: all(is_over(row_of(world, each)) for each in requests), "the time to answer to be over")
    late = await posted(voices[0], requests[0])
    world.only_worker()
    events = [await voice.until_boundary() for voice in voices]

    assert (late.status_code, late.json()["code"]) == (409, "input_expired")
    assert [reported(each) for each in events] == ["rejected", "completed"]
    assert [text(each) for each in events] == [denied.answer, agreed.answer]
    assert world.ledger.of_call("pay_soon", denied.note) == []
    assert len(world.ledger.of_call("pay_anyway", agreed.note)) == 1


async def test_a_wish_to_stop_waits_for_a_worker(world: World) -> None:
    """One session waits for somebody, another one has a message that nobody has taken up."""
    world.only_worker()
    gated, unheard = call("pay"), say()
    parked, idle = world.voice(), world.voice()
    (request_id,) = await park(parked, gated)
    await idle.say(say().message)
    world.kill_workers()

    await idle.send(unheard.message)
    wishes = [await cancel(parked), await cancel(idle)]
    assert "turn.cancelled" not in kept_types(world, parked.session_id) + kept_types(world, idle.session_id)
    world.only_worker()
    await stopped(world, parked)
    await stopped(world, idle)

    assert wishes == ["accepted", "accepted"]
    assert row_of(world, request_id)["status"] == "withdrawn"
    assert world.times_asked(unheard.message) == 0
    assert world.ledger.of_call("pay", gated.note) == []


# --- helpers ------------------------------------------------------------------------------------------------


async def all_stories(world: World, directory: Path) -> dict[str, Story]:
    """A few lanes, each with a queue, an API and workers of its own, so that only its own worker dies."""
    points = [*ASKING, *RESUMING]
    stories: dict[str, Story] = {}

    async def lane(number: int) -> None:
        queue = {"PERDURE_TASK_QUEUE": f"lane-{number}"}
        api = world.stack.start_api(queue, wait=False)
        url = world.stack.api_urls[-1]
        await until(lambda: listens("127.0.0.1", int(url.rpartition(":")[2])), f"{api.name} to listen")
        for point in points[number::_LANES]:
            dies = dies_at(point, directory / point.replace(":", "-"))
            stories[point] = await story(world, url, queue, dies, point)
        api.kill()

    await asyncio.gather(*(lane(number) for number in range(_LANES)))
    return stories


async def story(world: World, url: str, queue: dict[str, str], dies: dict[str, str], point: str) -> Story:
    free, gated = call("charge"), call("pay")
    script = beside(free, gated) if point.startswith("park") else gated
    doomed = world.stack.start_worker({**queue, **dies}, wait=False)
    async with Voice(url, world.receipts) as voice:
        await voice.create(script.message)
        if point in ASKING:
            heir, died, started = await takes_over(world, doomed, queue)
            (request_id,) = asked(await voice.until_boundary())
            took = time.monotonic() - died
            outcome = await answer(voice, request_id)
            events = await voice.until_boundary()
        else:
            (request_id,) = asked(await voice.until_boundary())
            outcome = await answer(voice, request_id)
            heir, died, started = await takes_over(world, doomed, queue)
            events = await voice.until_boundary()
            took = time.monotonic() - died
        # The turn is really over when the next one is heard.
        bound = HEARTBEAT + RECOVERY + await started + _TURNS * await undisturbed(voice)
    heir.kill()
    return Story(script, gated.note, outcome, events, took, bound)


def beside(free: Script, gated: Script) -> Script:
    """One step with two calls: the turn parks when the one has run, in an activity of its own."""
    word = unique()
    message = f'call charge {{"note": "{free.note}"}} and pay {{"note": "{gated.note}"}} then say {word}'
    return Script(message, word)


async def takes_over(
    world: World, doomed: Process, queue: dict[str, str]
) -> tuple[Process, float, "asyncio.Task[float]"]:
    """Wait for its death, and start another worker; that one, when it was, and how long the other took to start."""
    await until(lambda: not doomed.alive, f"{doomed.name} to die")
    died = time.monotonic()
    heir = world.stack.start_worker(queue, wait=False)

    async def started() -> float:
        await until(lambda: world.stack.serves(heir), f"{heir.name} to be ready", 60)
        return time.monotonic() - died

    return heir, died, asyncio.create_task(started())


async def answered_into_the_void(world: World, voice: Voice, request_id: str, moment: str) -> None:
    """An answer that is counted, by an API that dies before it can say so."""
    doomed, url = world.dying_api(moment)
    body = {"continuationToken": voice.token, "inputResponses": [response(request_id)]}
    await into_the_void(f"{url}/eve/v1/session/{voice.session_id}", body)
    await until(lambda: not doomed.alive, "the API to die")


async def into_the_void(url: str, body: Json) -> None:
    """A request whose answer never comes."""
    async with httpx2.AsyncClient(timeout=30) as http:
        with pytest.raises(httpx2.HTTPError):
            await http.post(url, json=body)


async def posted(voice: Voice, request_id: str) -> httpx2.Response:
    body = {"continuationToken": voice.token, "inputResponses": [response(request_id)]}
    return await voice.http.post(f"/eve/v1/session/{voice.session_id}", json=body)


def is_over(row: Json) -> bool:
    return seconds(row["request"]["expiresAt"]) < time.time()
