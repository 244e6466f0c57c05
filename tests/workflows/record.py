"""Record histories for the replay test: `python -m tests.workflows.record NAME` against a running dev server.

Record when workflow code ships, and keep every recording: a change that cannot replay them strands live sessions.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, cast

from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from perdure.protocol import names
from perdure.protocol.inputs import OpenInput
from perdure.protocol.requests import CallRef, Calls, Finished, ModelCall, ModelOutcome, Parked
from perdure.runtime.connect import connect
from perdure.settings import Settings

from .harness import Bench, Outside

HISTORIES = Path(__file__).parent / "histories"


async def varied(call: ModelCall) -> ModelOutcome:
    """A text turn, a turn with two tools at once, a failed turn, a structural end."""
    match call.at.turn, call.at.step:
        case 1, 0:
            return Calls(calls=(CallRef(call_id="a", tool="a"), CallRef(call_id="b", tool="b")))
        case 2, _:
            raise ApplicationError("no", {"structural": False}, type="MODEL_CALL_FAILED", non_retryable=True)
        case 3, _:
            raise ApplicationError("gone", {"structural": True}, type="AGENT_GONE", non_retryable=True)
        case _:
            return Finished()


async def asks(call: ModelCall) -> ModelOutcome:
    return Finished() if call.at.turn else Parked(open=(OpenInput(request_id="inp_1"),))


async def record(label: str) -> None:
    bench, outside = Bench(await connect(Settings())), Outside()
    outside.answer = varied
    async with bench.working(outside):
        session = await bench.start(outside)
        await session.deliver("dlv_stale", token="old")
        for number in range(4):
            await session.deliver(f"dlv_{number}")
        await session.handle.result()
        parked = await _parked(bench, outside)
    HISTORIES.mkdir(exist_ok=True)
    await _keep(bench.client, session.handle.id, f"{label}-session")
    for turn in range(4):
        await _keep(bench.client, names.turn_workflow(session.handle.id, turn), f"{label}-turn-{turn}")
    await _keep(bench.client, parked, f"{label}-parked")


async def _parked(bench: Bench, outside: Outside) -> str:
    """People are asked, and cancel the turn that will read the answer before the driver knows of that answer."""
    outside.answer = asks
    session = await bench.start(outside)
    await session.deliver("dlv_0")
    await session.parked()
    await session.handle.signal(names.CANCEL, {"turnId": "turn_1"})
    await session.deliver("dlv_1", kind="answer")
    await outside.until(lambda: "dlv_1" in [each.id for call in outside.model_calls for each in call.deliveries])
    return session.handle.id


async def _keep(client: Client, workflow_id: str, name: str) -> None:
    history = await client.get_workflow_handle(workflow_id).fetch_history()
    # Stack traces name the files of the machine that recorded them; no replay reads them.
    anonymous = json.dumps(_without_traces(json.loads(history.to_json())), indent=1)
    (HISTORIES / f"{name}.json").write_text(anonymous + "\n")


def _without_traces(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return {key: "" if key == "stackTrace" else _without_traces(item) for key, item in items}
    if isinstance(value, list):
        return [_without_traces(item) for item in cast(list[Any], value)]
    return value


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1]))
