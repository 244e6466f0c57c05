"""Calls that other servers do, attempt by attempt, in the session that waits for them."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure import Agent, RemoteAgent
from perdure.harness.journal import read_journal
from perdure.harness.remote.calls import RemoteCalls
from perdure.harness.tools.children import Children
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import CollectChildren, Coordinates, Delegated, DispatchChildren, LookAtChildren
from perdure.settings import Settings
from perdure.store.open import open_store
from perdure.testing import ScriptedModel, call
from tests.support.lab import SESSION, Lab

AT = Coordinates(session_id=SESSION, turn=0, step=0)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


async def hang() -> str:
    await asyncio.Event().wait()
    return "never"


@pytest.fixture
async def it() -> AsyncGenerator[Lab]:
    """A session whose model has asked an agent on another server. The credentials for that never come."""
    store = await open_store("sqlite:///:memory:")
    try:
        await store.migrate()
        agent = Agent("tester", subagents=[RemoteAgent("away", "http://away.example", auth=hang, timeout=60)])
        it = Lab(store, agent, ScriptedModel([call("away", message="Go")]), "conversation", Settings(agents=""))
        delegated = await it.model(await it.deliver("Go"))
        assert isinstance(delegated, Delegated)
        await it.harness.children.dispatch(DispatchChildren(at=AT))
        yield it
    finally:
        await store.close()


async def remote_call(it: Lab) -> Any:
    found = await it.store.remote_call(SESSION, "subagent-call:away:call_0_0")
    assert found is not None
    return found


@pytest.mark.parametrize("output", ["half \ud83d of", nested(120)])
async def test_what_an_earlier_build_has_accepted_and_cannot_be_sent_is_a_failed_result(it: Lab, output: Any) -> None:
    begun = await remote_call(it)
    accepted = await it.store.end_remote_call(begun, {"output": output}, begun.state)
    assert accepted is not None

    ref = DeliveryRef.model_validate(accepted.delivery.ref)
    await it.harness.children.collect(CollectChildren(at=AT, deliveries=(ref,)))

    outcome = (await read_journal(it.store, SESSION, 0)).outcome(0, "call_0_0")
    assert outcome is not None
    assert (outcome.status, (outcome.error or {})["code"]) == ("failed", "SUBAGENT_EXECUTION_FAILED")


async def test_a_task_ends_in_time_when_its_credentials_never_come(it: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.harness.remote.calls._LOOK_SECONDS", 1.5)
    monkeypatch.setattr("perdure.harness.remote.calls._HEADER_SECONDS", 0.5)
    begun = await remote_call(it)
    await it.store.advance_remote_call(begun, {**begun.state, "sessionId": "ses_there", "tries": 1})
    later = RemoteCalls(it.store, clock=lambda: time.time() + 61)

    looked = await Children(it.store, it.registry, it.settings, later).look(LookAtChildren(at=AT))

    (result,) = looked.results
    (row,) = await it.store.deliveries(SESSION, [result.id])
    assert row.body is not None
    assert "has not ended in time. The other server may go on" in row.body["result"]["error"]["message"]
