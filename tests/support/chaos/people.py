"""People whom sessions ask, and who answer."""

import hashlib
from typing import Any

import httpx2

from tests.support.processes import PATIENCE
from tests.support.waiting import until

from .evidence import Json
from .scripts import Script
from .world import Caller, World, kept_types

#: Two callers with keys of their own, beside the caller from this machine.
KEYS = {name: f"the key of {name}" for name in ("alice", "bob")}
API_KEYS = ",".join(f"{name}={hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items())


async def park(caller: Caller, script: Script, **body: Any) -> list[str]:
    """Say it, wait until the session waits for people, and see what they are asked."""
    await (caller.send if caller.session_id else caller.create)(script.message, **body)
    return asked(await caller.until_boundary())


def asked(events: list[Json]) -> list[str]:
    """The ids that a client sees."""
    requests = (event["data"]["requests"] for event in events if event["type"] == "input.requested")
    return [request["requestId"] for each in requests for request in each]


def response(request_id: str, option: str = "approve", **more: Any) -> Json:
    return {"requestId": request_id, "optionId": option, **more}


async def answer(caller: Caller, request_id: str, option: str = "approve", **more: Any) -> Json:
    """Answer one request; its status now."""
    receipt = await caller.send(inputResponses=[response(request_id, option, **more)])
    (outcome,) = receipt["inputs"]
    return outcome


async def answered_by(url: str, request_id: str, body: Json, who: str) -> httpx2.Response:
    """Answer as a caller with a key, who need not own the session."""
    async with httpx2.AsyncClient(base_url=url, headers={"x-api-key": KEYS[who]}, verify=False) as http:
        return await http.post(f"/v1/inputs/{request_id}", json=body)


async def cancel(caller: Caller) -> str:
    answered = await caller.http.post(f"/eve/v1/session/{caller.session_id}/cancel")
    assert answered.status_code == 200, answered.text
    return answered.json()["status"]


async def stopped(world: World, caller: Caller, times: int = 1, within: float = PATIENCE) -> None:
    """Wait until the event that the turn was cancelled is emitted."""
    await until(
        lambda: kept_types(world, caller.session_id).count("turn.cancelled") == times, "turn.cancelled", within=within
    )


def row_of(world: World, request_id: str) -> Json:
    """The request as the store holds it."""
    rows = (row for rows in world.store().inputs.values() for row in rows)
    return next(row for row in rows if row["request_id"] == request_id)


def results(events: list[Json]) -> list[tuple[str, str]]:
    """The outcomes of the calls, as a reader sees them: tool and status."""
    found = [event["data"] for event in events if event["type"] == "action.result"]
    return [(each["result"]["toolName"], each["status"]) for each in found]


def kinds(events: list[Json]) -> list[str]:
    """What kinds of requests they are, in the order of their ids."""
    asked = (event["data"] for event in events if event["type"] == "input.requested")
    return [each["details"][request["requestId"]]["kind"] for each in asked for request in each["requests"]]
