"""Workers of a build before queue modes beside newer ones, on one server and one store, without versions."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.runtime.test_many_messages import listed, settled_by
from tests.runtime.told import of_type, settled
from tests.support.plugin import StackFactory
from tests.support.talk import Json, Talk

MODES = ("followup", "collect", "steer", "interrupt")
PHASES = ("older", "both", "killed", "left", "again")


@pytest.mark.parametrize("turns", [pytest.param("child", marks=pytest.mark.slow), "inline"])
async def test_each_message_is_heard_once_whichever_workers_serve(
    make_stack: StackFactory, tmp_path: Path, turns: str
) -> None:
    ledger = tmp_path / "ledger"
    ledger.touch()
    agents, environment = f"tests.runtime.steered:{turns}", {"TEST_LEDGER": str(ledger)}
    stack = make_stack(provider=True, agents=agents, workers=0, environment=environment)
    stack.start_worker({"PERDURE_AGENTS": f"tests.runtime.older:{turns}"})
    talks = [stack.talk() for _ in MODES]

    await say_all(talks, "older")
    await all_settled(talks)
    turns_of_all = [{each["turnId"] for each in await listed(talk) if each["outcome"] == "completed"} for talk in talks]
    newer = stack.start_worker()
    await say_all(talks, "both")
    await all_settled(talks)
    await say_all(talks, "killed")
    newer.kill()
    # What runs where only the newer build knows the way waits for it; the rest goes on.
    await say_all(talks, "left")
    stack.start_worker()
    await say_all(talks, "again")
    await all_settled(talks)

    # The older build collects without a pause, and lets no message into a turn that runs.
    assert [len(each) for each in turns_of_all] == [4, 2, 4, 1]
    for mode, talk in zip(MODES, talks, strict=True):
        await check(mode, talk)
        await talk.http.aclose()


async def say_all(talks: list[Talk], word: str) -> None:
    """In each session begin a turn, and say three things to it in the mode of the session."""
    for talk in talks:
        begun = f"drip {PHASES.index(word) + 20} words delay 50"
        await (talk.send(begun) if talk.session_id else talk.create(begun))
    for mode, talk in zip(MODES, talks, strict=True):
        for number in range(3):
            await talk.send(f"say {word} {number}", mode=mode)


async def all_settled(talks: list[Talk]) -> None:
    async with asyncio.timeout(120):
        for talk in talks:
            for each in await listed(talk):
                while (await settled(talk, each["deliveryId"]))["status"] != "settled":
                    pass


async def check(mode: str, talk: Talk) -> None:
    """Each delivery has come to one end, no turn has failed, and each message that was read was read once."""
    shown = await talk.http.get(f"/v1/sessions/{talk.session_id}/events", params={"limit": 1000})
    events: list[Json] = [each for each in shown.json()["events"] if not each["type"].endswith(".appended")]
    deliveries = await listed(talk)

    assert settled_by(events) == Counter(each["deliveryId"] for each in deliveries)
    assert of_type(events, "turn.failed") == []
    heard = [each["data"]["message"] for each in of_type(events, "message.received")]
    assert max(Counter(heard).values()) == 1
    read = {each["deliveryId"] for each in deliveries if each["outcome"] == "completed"}
    if mode == "interrupt":
        assert {each["outcome"] for each in deliveries} <= {"completed", "cancelled", "superseded"}
        assert deliveries[-1]["outcome"] == "completed"
    else:
        assert len(read) == len(deliveries) == len(heard)
