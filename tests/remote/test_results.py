"""Results of other servers that were accepted, in the session that waits for them."""

from typing import Any

import pytest

from perdure import Agent, RemoteAgent
from perdure.harness.journal import read_journal
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import CollectChildren, Coordinates, Delegated, DispatchChildren
from perdure.settings import Settings
from perdure.store.open import open_store
from perdure.testing import ScriptedModel, call
from tests.support.lab import SESSION, Lab

AT = Coordinates(session_id=SESSION, turn=0, step=0)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize("output", ["half \ud83d of", nested(120)])
async def test_what_an_earlier_build_has_accepted_and_cannot_be_sent_is_a_failed_result(output: Any) -> None:
    store = await open_store("sqlite:///:memory:")
    try:
        await store.migrate()
        agent = Agent("tester", subagents=[RemoteAgent("away", "http://away.example")])
        it = Lab(store, agent, ScriptedModel([call("away", message="Go")]), "conversation", Settings(agents=""))
        delegated = await it.model(await it.deliver("Go"))
        assert isinstance(delegated, Delegated)
        await it.harness.children.dispatch(DispatchChildren(at=AT))
        (key,) = delegated.keys
        begun = await store.remote_call(SESSION, key)
        assert begun is not None
        accepted = await store.end_remote_call(begun, {"output": output}, begun.state)
        assert accepted is not None

        ref = DeliveryRef.model_validate(accepted.delivery.ref)
        await it.harness.children.collect(CollectChildren(at=AT, deliveries=(ref,)))

        outcome = (await read_journal(store, SESSION, 0)).outcome(0, "call_0_0")
        assert outcome is not None
        assert (outcome.status, (outcome.error or {})["code"]) == ("failed", "SUBAGENT_EXECUTION_FAILED")
    finally:
        await store.close()
