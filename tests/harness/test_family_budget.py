"""Budgets of families: what children use is taken from the budgets of the sessions above them."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from perdure import Agent, AgentRegistry, Compaction, Limits, Price
from perdure.errors import Misconfigured, ModelFailed
from perdure.harness.harness import Harness
from perdure.harness.tools.prices import check_prices
from perdure.protocol.deliveries import Lineage
from perdure.protocol.events import Usage
from perdure.protocol.inputs import InputAnswer
from perdure.protocol.requests import Failure, Finished, ModelOutcome
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.values import SessionRow
from perdure.testing import ScriptedModel
from tests.support.given import read_session
from tests.support.lab import SESSION, Lab, lab

#: A reply of the scripted model uses ten tokens of input and five of output; so much is reserved for its output.
SMALL = {"max_tokens": 5}
REPLIED = Usage(input_tokens=10, output_tokens=5)
#: Two cents for a reply of the root, one for a reply of another session.
TWO_CENTS = Price(input=0, output=4000)
CENT = Price(input=0, output=2000)
EXTEND = InputAnswer(option_id="extend", principal_id="ada")


class Family:
    """A root, and sessions below it that are served by the same worker."""

    def __init__(self, root: Lab, helper: Agent) -> None:
        self.root = root
        self.helper = helper
        self.served: Sequence[Agent] = (replace(root.agent, subagents=[helper]),)
        root.harness = self._harness(root)

    def child(self, lines: Sequence[Any], session: str = "child", *above: str) -> Lab:
        """A session below the last one of `above`, or below the root."""
        chain = (SESSION, *above)
        made = Lab(self.root.store, self.helper, ScriptedModel(lines), "task", self.root.settings, session)
        lineage = Lineage(
            session_id=chain[-1],
            root_session_id=SESSION,
            turn=0,
            step=0,
            call_id=f"call of {session}",
            name="helper",
            depth=len(chain),
        )
        made.parent = lineage.model_dump(mode="json")
        made.harness = self._harness(made)
        return made

    def _harness(self, it: Lab) -> Harness:
        return Harness(it.store, AgentRegistry(self.served), it.models, it.settings)

    async def work(self, session: str, *above: str) -> None:
        """A child does a task with one reply."""
        it = self.child(["Done."], session, *above)
        assert succeeded(await it.model(await it.deliver("Do it")))


@asynccontextmanager
async def family(
    lines: Sequence[Any] = (), *, can_ask: bool = False, compaction: Compaction | None = None, **limits: Any
) -> AsyncGenerator[Family]:
    async with lab(lines, can_ask=can_ask) as root:
        root.agent = replace(root.agent, settings=SMALL, price=TWO_CENTS, limits=Limits(**limits))
        helper = Agent("helper", settings=SMALL, price=CENT)
        yield Family(root, replace(helper, compaction=compaction) if compaction else helper)


def failure_of(outcome: ModelOutcome) -> Failure:
    assert isinstance(outcome, Finished)
    assert outcome.failure is not None
    return outcome.failure


def succeeded(outcome: ModelOutcome) -> bool:
    return isinstance(outcome, Finished) and outcome.failure is None


def reached(failure: Failure) -> dict[str, Any]:
    """The details of the failure, except what the call needs: that is an estimate."""
    details = dict(failure.details or {})
    assert details["used"] + details.pop("needed") > details["limit"]
    return details


# --- what stops children ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "used", "limit"),
    [
        ({"session_tokens": 49}, 45, 49),
        # Two cents of the root, and one of each child.
        ({"session_cost": 0.04}, 0.04, 0.04),
        ({"turn_tokens": 49}, 45, 49),
        ({"turn_cost": 0.04}, 0.04, 0.04),
    ],
)
async def test_a_child_whose_call_does_not_fit_above_fails_before_the_call(
    limits: dict[str, Any], used: float, limit: float
) -> None:
    async with family(["Hello"], **limits) as it:
        await it.root.model(await it.root.deliver("Hi"))
        await it.work("first")
        await it.work("second")
        late = it.child([], "late")

        failure = failure_of(await late.model(await late.deliver("Do it")))

        assert failure.code == "PARENT_BUDGET_REACHED"
        assert reached(failure) == {
            "budget": next(iter(limits)),
            "used": used,
            "limit": limit,
            "sessionId": SESSION,
        }
        assert await late.session_status() == "failed"
        (failed,) = await late.emitted("session.failed")
        assert failed["code"] == failure.code


async def test_a_root_far_above_stops_a_child_too() -> None:
    async with family(["Hello"], session_tokens=49) as it:
        await it.root.model(await it.root.deliver("Hi"))
        # Each is started while the one above it works.
        child, grandchild, deep = (
            it.child(["Done."], "a"),
            it.child(["Done."], "aa", "a"),
            it.child([], "aaa", "a", "aa"),
        )
        tasks = [await each.deliver("Do it") for each in (child, grandchild, deep)]
        assert succeeded(await grandchild.model(tasks[1]))
        assert succeeded(await child.model(tasks[0]))

        failure = failure_of(await deep.model(tasks[2]))

        assert (failure.code, reached(failure)["used"]) == ("PARENT_BUDGET_REACHED", 45)


@pytest.mark.parametrize("limits", [{"input_tokens": 20}, {"output_tokens": 10}])
async def test_the_token_limits_of_a_session_count_and_stop_its_children(limits: dict[str, Any]) -> None:
    async with family(["Hello", "Never"], **limits) as it:
        await it.root.model(await it.root.deliver("Hi"))
        await it.work("first")
        late = it.child([], "late")

        assert failure_of(await late.model(await late.deliver("Do it"))).code == "PARENT_BUDGET_REACHED"
        own = failure_of(await it.root.model(await it.root.deliver("Again"), turn=1))

        assert own.code == "SESSION_TOKEN_LIMIT_REACHED"


async def test_an_agent_that_is_not_served_here_sets_no_limit() -> None:
    async with family(["Hello"], session_tokens=16) as it:
        await it.root.model(await it.root.deliver("Hi"))
        it.served = [it.helper]

        await it.work("first")

        assert (await read_session(it.root.store, SESSION)).below.usage == REPLIED


class WithoutSession:
    """The store after a session was deleted."""

    def __init__(self, store: Store, session_id: str) -> None:
        self._store = store
        self._session_id = session_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def session(self, session_id: str) -> SessionRow | None:
        return None if session_id == self._session_id else await self._store.session(session_id)


@pytest.mark.parametrize(("limit", "fails"), [(100, False), (16, True)])
async def test_a_child_whose_parent_was_deleted_has_the_budget_of_the_root(limit: int, fails: bool) -> None:
    async with family(["Hello"], session_tokens=limit) as it:
        await it.root.model(await it.root.deliver("Hi"))
        between, orphan = it.child([], "a"), it.child(["Done."], "aa", "a")
        await between.deliver("Do it")
        task = await orphan.deliver("Do it")
        store: Any = WithoutSession(it.root.store, "a")
        orphan.harness = Harness(store, AgentRegistry(it.served), orphan.models, orphan.settings)

        outcome = await orphan.model(task)

        assert succeeded(outcome) is not fails
        if fails:
            assert failure_of(outcome).code == "PARENT_BUDGET_REACHED"


# --- what the sessions above count --------------------------------------------------------------------------


async def test_the_next_call_of_a_parent_asks_people_and_an_extension_is_for_its_children_too() -> None:
    async with family(["One", "Two"], session_tokens=40, can_ask=True) as it:
        await it.root.model(await it.root.deliver("First"))
        await it.work("a")
        (asked,) = await it.root.parked(await it.root.deliver("Second"), turn=1)
        (request,) = (await it.root.emitted("input.requested"))[0]["requests"]
        assert request["action"]["input"]["used"] == 30

        await it.root.resume(await it.root.answer((asked, EXTEND)), open=[asked], turn=2)

        await it.work("b")
        assert succeeded(await it.root.model(turn=2))


async def test_each_turn_has_a_budget_of_its_own_also_for_children() -> None:
    async with family(["One", "Two", "Never"], turn_tokens=34) as it:
        await it.root.model(await it.root.deliver("First"))
        await it.work("a")

        assert succeeded(await it.root.model(await it.root.deliver("Second"), turn=1))
        await it.work("b")
        late = it.child([], "late")

        assert reached(failure_of(await late.model(await late.deliver("Do it"))))["used"] == 30


async def test_everything_that_children_pay_for_is_counted_above_once() -> None:
    async with family() as it:
        await it.root.deliver("Hi")
        child = it.child(["", ModelFailed("Busy.", transient=True)])
        delivery = await child.deliver("Do it")
        with pytest.raises(ModelFailed):
            await child.model(delivery, generation=1)
        child.models.now = ScriptedModel(["Done."])

        outcomes = [await child.model(delivery, generation=each) for each in (2, 3)]

        assert all(map(succeeded, outcomes))
        root, own = [await read_session(it.root.store, each) for each in (SESSION, "child")]
        assert root.below.usage == own.usage == REPLIED + REPLIED
        assert root.below.dollars == 0.02


async def test_the_summaries_of_children_are_counted_above() -> None:
    too_long = ModelFailed("The model answered 400.", too_long=True, statusCode=400)
    async with family(compaction=Compaction(context_window=1_000)) as it:
        await it.root.deliver("Hi")
        # A conversation below the root, so that there is history to summarise.
        child = it.child(["One", "Two", too_long, "Summary", "Three"])
        child.mode = "conversation"
        for turn in range(3):
            assert succeeded(await child.model(await child.deliver("word " * 50), turn=turn))

        root, own = [await read_session(it.root.store, each) for each in (SESSION, "child")]

        assert "compaction.completed" in await child.types()
        assert root.below.usage == own.usage == REPLIED + REPLIED + REPLIED + REPLIED
        assert root.below.dollars == 0.04


async def test_a_child_whose_price_is_not_known_counts_its_tokens() -> None:
    async with lab([]) as root:
        it = Family(root, Agent("helper", model="openai-chat:unheard-of"))
        await root.deliver("Hi")

        await it.work("a")

        below = (await read_session(root.store, SESSION)).below
        assert (below.usage, below.cost) == (REPLIED, 0)


def test_a_worker_does_not_start_if_a_subagent_without_a_price_spends_from_a_budget_of_costs() -> None:
    helper = Agent("helper", model="openai-chat:unheard-of")
    boss = Agent(
        "boss", price=CENT, limits=Limits(session_cost=1), subagents=[Agent("lead", price=CENT, subagents=[helper])]
    )

    with pytest.raises(Misconfigured, match=r"'helper' spends, as a subagent of 'boss', from a budget of costs"):
        check_prices([boss], Settings(agents=""))

    check_prices([replace(boss, limits=Limits(session_tokens=1))], Settings(agents=""))
