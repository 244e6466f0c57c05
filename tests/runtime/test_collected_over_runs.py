"""Messages that are collected while the driver of their session continues as new, and while its worker dies."""

import asyncio
import json
from datetime import datetime

import pytest
from temporalio.client import Client

from perdure.protocol import names
from tests.runtime.told import all_turns, of_type, prompts, settled
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Json, Talk
from tests.support.waiting import until

#: The driver continues as new when its history has 400 events. Each message adds three or four.
_NEARLY = 365


@pytest.fixture(params=["child", "inline"])
def stack(make_stack: StackFactory, request: pytest.FixtureRequest) -> Stack:
    return make_stack(provider=True, agents=f"tests.runtime.many:{request.param}")


def is_inline_and_killed(stack: str, killed: bool) -> bool:
    """A killed worker is replayed alike, however its turns run."""
    return stack == "inline" and killed


def is_child(stack: str) -> bool:
    return stack == "child"


async def begin(client: Client, talk: Talk) -> str | None:
    """A session that waits, and is about to continue as new; the id of its run."""
    await talk.create("say begun")
    await talk.until_boundary()
    handle = client.get_workflow_handle(talk.session_id)

    async def idle() -> bool:
        return (await handle.query(names.DESCRIBE))["idle"]

    await until(idle, "the driver to wait")
    while (found := await handle.describe()).history_length < _NEARLY:
        # Signals that say nothing: it looks whether another build is current.
        left = _NEARLY - found.history_length
        await asyncio.gather(*(handle.signal(names.DELIVER) for _ in range(max(1, left // 2))))
    return found.run_id


async def states(client: Client, session_id: str, first_run: str | None) -> list[Json]:
    """What the runs after the first one began with, the newest first."""
    found: list[Json] = []
    run: str | None = None
    while run != first_run:
        handle = client.get_workflow_handle(session_id, run_id=run)
        history = await handle.fetch_history()
        started = history.events[0].workflow_execution_started_event_attributes
        run = started.continued_execution_run_id
        found.append(json.loads(started.input.payloads[0].data))
    return found


def of_messages(deliveries: list[Json]) -> list[str]:
    return [each["deliveryId"] for each in deliveries]


# A second without a message ends what is collected, and so do five seconds in all.
@pytest.mark.alone
@pytest.mark.slow_where.with_args(is_inline_and_killed)
@pytest.mark.parametrize("killed", [False, True])
async def test_what_is_collected_while_the_driver_continues_as_new_is_read_once_and_in_order(
    stack: Stack, killed: bool
) -> None:
    client = await stack.client()
    async with stack.talk() as talk:
        first_run = await begin(client, talk)
        said = [f"say c{number}" for number in range(20)]
        ids = of_messages([await talk.send(message, mode="collect") for message in said[:3]])
        if killed:
            stack.workers[0].kill()
        ids += of_messages([await talk.send(message, mode="collect") for message in said[3:]])
        if killed:
            stack.start_worker()
        ends = [await settled(talk, each) for each in ids]
        turns = sorted({end["turnId"] for end in ends})
        events = await all_turns(talk, len(turns))
        began = await states(client, talk.session_id, first_run)

    assert [message for turn in prompts(events) for message in turn] == said
    assert {end["outcome"] for end in ends} == {"completed"}
    # The rest is another turn if the new run has waited for its first signal for more than a second.
    assert turns in (["turn_1"], ["turn_1", "turn_2"])
    # It did so in the middle: what it had collected went along.
    assert began[-1]["inbox"]
    assert began[-1]["collecting"]


@pytest.mark.slow_where.with_args(is_child)
async def test_a_turn_begins_five_seconds_after_the_first_message_however_many_follow(stack: Stack) -> None:
    client = await stack.client()
    async with stack.talk() as talk, stack.talk() as reader:
        first_run = await begin(client, talk)
        reader.session_id, reader.cursor = talk.session_id, talk.cursor
        turn = asyncio.create_task(reader.until("turn.started", talk.cursor))
        sent: list[Json] = []
        while not turn.done():
            sent.append(await talk.send(f"say c{len(sent)}", mode="collect"))
            await asyncio.sleep(0.2)
        (started,) = of_type(await turn, "turn.started")
        ends = [await settled(talk, each["deliveryId"]) for each in sent]
        events = await all_turns(talk, len({end["turnId"] for end in ends}))
        began = await states(client, talk.session_id, first_run)

    accepted = [datetime.fromisoformat(end["acceptedAt"]) for end in ends]
    read = started["meta"]["deliveryIds"]
    assert [message for turn in prompts(events) for message in turn] == [
        f"say c{number}" for number in range(len(sent))
    ]
    assert {end["outcome"] for end in ends} == {"completed"}
    assert read == of_messages(sent)[: len(read)]
    # Nobody has paused for a second, so that the first message decides, and each run knows when it came.
    assert len(read) > 5
    collected = [state["collecting"] for state in began if state["inbox"] and state["turn"] == 1]
    assert collected
    assert all(abs(first - accepted[0].timestamp()) < 1 for first, _ in collected)
