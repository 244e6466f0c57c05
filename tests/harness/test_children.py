"""What the activities of a family do when something was done by another build, or when nobody waits any more."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from perdure import Agent, AgentRegistry, tool
from perdure.harness.harness import Harness
from perdure.protocol import names
from perdure.protocol.deliveries import CHILD_ANSWER, CHILD_INPUT, CHILD_RESULT, DeliveryRef
from perdure.protocol.events import delivery_refused
from perdure.protocol.requests import (
    CollectChildren,
    Coordinates,
    Delegated,
    DispatchChildren,
    RebuildSession,
    ShowInputs,
    StopChildren,
)
from perdure.store.engine import commit
from perdure.store.values import Attempt
from perdure.testing import ScriptedModel, call
from tests.support.lab import SESSION, Lab, lab

AT = Coordinates(session_id=SESSION, turn=0)


@tool(effects="pure", approval="always")
async def pay() -> str:
    """Pay somebody."""
    return "paid"


@dataclass
class Family:
    """A root whose turn waits for one child."""

    root: Lab
    child: Lab
    task: DeliveryRef
    keys: tuple[str, ...]

    @property
    def result(self) -> DeliveryRef:
        """What the child's driver signals when the child has ended."""
        report_id = names.delivery_of_child(self.child.session)
        return DeliveryRef(id=report_id, kind=CHILD_RESULT, token_hash="", action=self.keys[0])


@asynccontextmanager
async def family(*lines: Any) -> AsyncGenerator[Family]:
    helper = Agent("helper", tools=[pay])
    async with lab([call("helper", message="Do it"), "Done."], subagents=[helper], can_ask=True) as root:
        served = AgentRegistry([root.agent])
        root.harness = Harness(root.store, served, root.models, root.settings)
        delegated = await root.model(await root.deliver("Go"))
        assert isinstance(delegated, Delegated)
        _, (new,) = await root.harness.children.dispatch(DispatchChildren(at=AT))
        child = Lab(root.store, helper, ScriptedModel(list(lines)), "task", root.settings, new.session.session_id)
        child.can_ask = True
        child.harness = Harness(root.store, served, child.models, root.settings)
        yield Family(root, child, new.task, delegated.keys)


async def nothing(*_: Any) -> None:
    """What a build that knows no children does when one of them ends."""


async def unread(it: Lab) -> list[str]:
    return [row.kind for row in await it.store.unread(it.session)]


async def test_the_result_of_a_child_that_an_older_build_has_ended_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with family("Found it") as it:
        monkeypatch.setattr(commit, "report_end", nothing)
        await it.child.model(it.task)

        await it.root.harness.children.collect(CollectChildren(at=AT, deliveries=(it.result,)))

        (result,) = await it.root.emitted("action.result")
        assert result["result"]["output"] == "Found it"
        assert await unread(it.root) == []


async def test_to_stop_children_finds_one_that_an_older_build_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with family("Found it") as it:
        monkeypatch.setattr(commit, "report_end", nothing)
        await it.child.model(it.task)

        pending, requests = await it.root.harness.children.stop(StopChildren(at=AT))

        assert (pending.keys, requests) == (it.keys, [])
        assert await unread(it.root) == [CHILD_RESULT]


async def test_a_rebuilt_driver_finds_a_child_that_an_older_build_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with family("Found it") as it:
        monkeypatch.setattr(commit, "report_end", nothing)
        await it.child.model(it.task)

        for _ in range(2):
            await it.root.harness.children.dispatch(DispatchChildren(at=AT))

        assert await unread(it.root) == [CHILD_RESULT]


async def test_a_cancel_that_meets_the_last_words_of_a_family_does_not_wait_for_the_next_message() -> None:
    async with family(call("pay")) as it:
        (asked,) = await it.child.parked(it.task)
        await it.root.cancel()
        await it.child.withdraw([asked])
        waits = [DeliveryRef.model_validate(row.ref) for row in await it.root.store.unread(SESSION)]
        assert {each.kind for each in waits} == {CHILD_INPUT, CHILD_ANSWER, CHILD_RESULT}
        result = next(each for each in waits if each.kind == CHILD_RESULT)
        await it.root.store.refuse(SESSION, result.id, "child_not_awaited", delivery_refused(result.id, "x", "y"))

        # The caller has clicked twice.
        assert await it.root.request_cancel() is not None
        others = tuple(each for each in waits if each.kind != CHILD_RESULT)
        await it.root.harness.children.show(ShowInputs(at=AT, deliveries=others))

        row = await it.root.store.session(SESSION)
        assert row is not None
        assert row.cancel_turn is None


async def test_where_a_request_of_a_child_was_shown_first_is_known_also_after_the_loss_of_the_driver() -> None:
    async with family([call("pay"), call("pay")]) as it:
        await it.child.parked(it.task)
        one, other = [DeliveryRef.model_validate(row.ref) for row in await it.root.store.unread(SESSION)]

        # The turn parks with the first request; the other one is shown behind the boundary.
        parks = await it.root.harness.children.show(ShowInputs(at=AT, deliveries=(one,), shows=True, parks=True))
        later = await it.root.harness.children.show(ShowInputs(at=AT, deliveries=(other,), shows=True))
        state = await it.root.harness.rebuild_session(RebuildSession(session_id=SESSION, reason="LOST"), Attempt(1, 1))

        assert state is not None
        assert state.open == (*parks.open, *later.open)
        assert [each.first_shown for each in state.open] == [AT.place, AT.place]


async def test_a_child_that_works_already_needs_no_worker_that_declares_its_agent() -> None:
    async with family("Found it") as it:
        it.root.harness = Harness(
            it.root.store, AgentRegistry([replace(it.root.agent, subagents=[])]), it.root.models, it.root.settings
        )

        pending, created = await it.root.harness.children.dispatch(DispatchChildren(at=AT))

        assert (pending.keys, created) == (it.keys, [])
