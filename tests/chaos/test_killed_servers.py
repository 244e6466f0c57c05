"""`kill -9` of the API, of Temporal, of everything at once."""

import json
import time

import httpx2
import pytest

from tests.support.chaos.evidence import Json
from tests.support.chaos.people import cancel
from tests.support.chaos.scripts import Script, call, drip, say
from tests.support.chaos.world import Caller, World, undisturbed, unique
from tests.support.processes import Process
from tests.support.talk import text, types
from tests.support.waiting import until

pytestmark = pytest.mark.chaos
BREAKS_TEMPORAL = True

#: A session is signalled what was accepted within this time after Temporal is back, in seconds; and of so many turns as
#: the machine is in that minute.
SIGNALLED_AGAIN = 15.0
TURNS = 5


async def test_a_reader_continues_at_another_api_where_the_first_one_died(world: World) -> None:
    """In one stream, read in two pieces: no gap, no repeat, and the turn did not notice."""
    world.only_worker()
    doomed = world.stack.start_api()
    gate, word = unique("g"), unique()
    arguments = json.dumps({"note": gate, "before": gate})
    # It does not end before the other API has taken over, however slowly the first one was read.
    message = f"drip 20 words delay 30; call put {arguments} then say {word}"

    async with world.caller() as caller:
        await caller.create(message)
        read = await read_until_broken(caller, doomed, after=5)
        async with world.caller(caller) as other:
            other.cursor = len(read)
            world.ledger.open(gate)
            rest = await other.until_boundary()

    assert [index(event) for event in read + rest] == list(range(len(read) + len(rest)))
    assert text(rest) == word
    assert (world.times_asked(message), world.times_asked(message, 1)) == (1, 1)


@pytest.mark.parametrize("moment", ["before_signal", "after_signal"])
async def test_a_message_whose_api_died_is_delivered_once_when_it_is_sent_again(world: World, moment: str) -> None:
    world.only_worker()
    script, key = say(), unique("key")

    async with world.caller() as caller:
        await caller.say(say().message)
        doomed, url = world.dying_api(moment)
        body = {"continuationToken": caller.token, "message": script.message}
        await sent_into_the_void(f"{url}/eve/v1/session/{caller.session_id}", body, key)
        await until(lambda: not doomed.alive, "the API to die")
        caller.http.headers["idempotency-key"] = key
        receipt = await caller.send(script.message)
        again = await caller.send(script.message)

        assert receipt == again
        assert text(await caller.until_boundary()) == script.answer
    assert world.times_asked(script.message) == 1


@pytest.mark.parametrize("moment", ["before_start", "after_start"])
async def test_a_session_whose_api_died_starts_once_when_it_is_asked_for_again(world: World, moment: str) -> None:
    world.only_worker()
    script, key = say(), unique("key")
    doomed, url = world.dying_api(moment)

    await sent_into_the_void(f"{url}/eve/v1/session", {"message": script.message}, key)
    await until(lambda: not doomed.alive, "the API to die")
    async with world.caller() as caller:
        caller.http.headers["idempotency-key"] = key
        await caller.create(script.message)

        assert text(await caller.until_boundary()) == script.answer
    assert world.times_asked(script.message) == 1
    assert sum(session["title"] == script.message for session in world.store().sessions) == 1


@pytest.mark.parametrize("moment", ["before_signal", "after_signal", "before_start", "after_start"])
async def test_what_an_api_had_written_before_it_died_is_consumed_without_a_retry(world: World, moment: str) -> None:
    world.only_worker()
    script = say()
    async with world.caller() as caller:
        await caller.say(say().message)
        bound = SIGNALLED_AGAIN + TURNS * await undisturbed(caller)
        doomed, url = world.dying_api(moment)
        if moment.endswith("start"):
            await sent_into_the_void(f"{url}/eve/v1/session", {"message": script.message}, unique("key"))
        else:
            body = {"continuationToken": caller.token, "message": script.message}
            await sent_into_the_void(f"{url}/eve/v1/session/{caller.session_id}", body, unique("key"))
        await until(lambda: not doomed.alive, "the API to die")

        died = time.monotonic()
        await until(lambda: world.times_asked(script.message) == 1, "the message to be consumed")
        assert time.monotonic() - died < bound


async def test_a_cancel_counts_for_a_message_whose_api_died_before_the_signal(world: World) -> None:
    """The session seems idle to its driver, but a turn is about to begin: the cancel must not say otherwise."""
    world.only_worker()
    script = say()
    async with world.caller() as caller:
        await caller.say(say().message)
        idle = await cancel(caller)
        doomed, url = world.dying_api("before_signal")
        body = {"continuationToken": caller.token, "message": script.message}
        await sent_into_the_void(f"{url}/eve/v1/session/{caller.session_id}", body, unique("key"))
        await until(lambda: not doomed.alive, "the API to die")

        stopped = await cancel(caller)
        ended = await caller.until_boundary()
        after = await caller.say(say().message)

    assert (idle, stopped) == ("no_active_turn", "accepted")
    assert types(ended)[-2:] == ["turn.cancelled", "session.waiting"]
    assert world.times_asked(script.message) == 0
    assert after


async def test_a_turn_outlives_temporal(world: World) -> None:
    """The server is killed while the model streams and while a tool works; it comes back on its file."""
    # Nobody is taken for dead while Temporal is away, however long its start takes on a busy machine.
    world.only_worker({"PERDURE_HEARTBEAT_TIMEOUT": "60"})
    text_turn, tool_turn = drip(words=40, delay=30), call("charge", gate="before")

    async with world.caller() as one, world.caller() as other:
        await one.create(text_turn.message)
        await other.create(tool_turn.message)
        await until(lambda: world.ledger.reached(tool_turn.note), "the tool to be at its gate")
        world.stack.restart_temporal()
        world.ledger.open(tool_turn.note)

        assert text(await one.until_boundary()) == text_turn.answer
        assert text(await other.until_boundary()) == tool_turn.answer
    assert len(world.ledger.of_call("charge", tool_turn.note)) == 1


async def test_a_message_is_accepted_while_temporal_is_away_and_consumed_once_it_is_back(world: World) -> None:
    world.only_worker()
    async with world.caller() as caller:
        await caller.say(say().message)
        calm = await undisturbed(caller)
        first, second = say(), say()

        world.stack.temporal.process.kill()
        began = time.monotonic()
        accepted = await caller.http.post(
            f"/eve/v1/session/{caller.session_id}", json={"continuationToken": caller.token, "message": first.message}
        )
        took = time.monotonic() - began
        world.stack.restart_temporal()

        assert (accepted.status_code, accepted.headers["x-perdure-delayed"]) == (200, "true")
        caller.received(accepted)
        assert took < SIGNALLED_AGAIN + TURNS * calm
        began = time.monotonic()
        await caller.send(second.message)
        # In the order in which they were accepted, though the first signal never arrived.
        assert text(await caller.until_boundary()) == first.answer
        assert time.monotonic() - began < SIGNALLED_AGAIN + TURNS * calm
        assert text(await caller.until_boundary()) == second.answer


async def test_everything_may_die_at_once(world: World) -> None:
    """Sessions in the middle of a text, in the middle of a tool, and at rest: all continue."""
    world.only_worker()
    scripts = [drip(words=60), drip(words=60), call("charge", gate="before"), call("put", gate="after")]
    callers = [world.caller() for _ in scripts]
    resting = world.caller()
    await resting.say(say().message)
    for caller, script in zip(callers, scripts, strict=True):
        await caller.create(script.message)
    for script in scripts:
        await until(lambda script=script: in_the_middle(world, script), f"{script.message} to be under way")

    world.kill_everything()
    world.start_everything()

    answers: list[str] = []
    for caller, script in zip(callers, scripts, strict=True):
        world.ledger.open(script.note)
        answers.append(text(await world.caller(caller).until_boundary()))
    assert answers == [script.answer for script in scripts]
    script = say()
    assert await world.caller(resting).say(script.message) == script.answer


# --- helpers ------------------------------------------------------------------------------------------------


async def read_until_broken(caller: Caller, doomed: Process, after: int) -> list[Json]:
    """Read, let the API die after some events, and read on to the end of the connection."""
    read: list[Json] = []
    try:
        async for event in caller.events():
            read.append(event)
            if len(read) == after:
                doomed.kill()
    except httpx2.HTTPError:
        return read
    raise AssertionError("the stream of a dead API ended as if the session were over")


async def sent_into_the_void(url: str, body: Json, key: str) -> None:
    """A request whose answer never comes."""
    async with httpx2.AsyncClient(timeout=60, verify=False) as http:
        with pytest.raises(httpx2.HTTPError):
            await http.post(url, json=body, headers={"idempotency-key": key})


def in_the_middle(world: World, script: Script) -> bool:
    return world.ledger.reached(script.note) if script.note else world.times_asked(script.message) > 0


def index(event: Json) -> int:
    return int(event["meta"]["id"].rpartition(":")[2])
