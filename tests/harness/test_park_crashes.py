"""A worker dies at any commit of a session that asks people; the next attempt leaves the same session behind."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from pydantic_ai.messages import ModelResponse

from perdure import Agent, AgentRegistry, tool
from perdure.models.base import Delta, Prompt, Reply
from perdure.protocol.deliveries import LOCAL
from perdure.protocol.events import Event
from perdure.protocol.inputs import InputAnswer
from perdure.protocol.requests import (
    Conclusion,
    ModelCall,
    ModelOutcome,
    ParkTurn,
    Resumed,
    ResumeTurn,
    ToolCall,
    ToolOutcome,
)
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.follow import read_all
from perdure.store.open import open_store
from perdure.store.values import Commit, Committed
from perdure.testing import OneModel, ScriptedModel, call
from perdure.testing.stage import SESSION, LocalSteps, Stage, StartTerms
from tests.support import tools
from tests.support.lab import NO, YES


class Died(BaseException):
    """The worker is gone."""


class Mortal:
    """A store whose caller dies once, before or after its commit of this number."""

    def __init__(self, store: Store, number: int, after: bool) -> None:
        self._store = store
        self._number = number
        self._after = after
        self.commits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, commit: Commit) -> Committed:
        self.commits += 1
        dies = self.commits == self._number
        if dies and not self._after:
            raise Died
        done = await self._store.commit(commit)
        if dies:
            raise Died
        return done


class Retried(LocalSteps):
    """Each step is tried again when its worker has died, by an attempt with a greater generation."""

    async def call_model(self, call: ModelCall, *, label: str | None = None) -> ModelOutcome:
        try:
            return await super().call_model(call, label=label)
        except Died:
            return await super().call_model(call, label=label)

    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        try:
            return await super().call_tool(call)
        except Died:
            return await super().call_tool(call)

    async def resume(self, resumption: ResumeTurn) -> Resumed:
        try:
            return await super().resume(resumption)
        except Died:
            return await super().resume(resumption)

    async def park(self, park: ParkTurn) -> None:
        try:
            await super().park(park)
        except Died:
            await super().park(park)

    async def conclude(self, conclusion: Conclusion) -> None:
        try:
            await super().conclude(conclusion)
        except Died:
            await super().conclude(conclusion)


@tool(effects="idempotent")
def look() -> str:
    return "seen"


pay = tool(effects="idempotent", approval="once", expires=60)(tools.pay.function)


@tool(approval="always", expires=60, on_expiry="fail")
def burn() -> None:
    raise AssertionError("this must not run")


class Recited:
    """A model that knows from the prompt how far it has come, so that asking it again changes nothing."""

    def __init__(self) -> None:
        self.asked = 0

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        self.asked += 1
        said = sum(isinstance(message, ModelResponse) for message in prompt.messages)
        async for item in ScriptedModel([LINES[said]]).stream(prompt):
            yield item


LINES: list[Any] = [
    [call("look"), call("pay", amount=1), call("pay", amount=2), call("ask_question", prompt="Why?")],
    "Done.",
    [call("burn"), call("ask_question", prompt="Sure?")],
]


class Session:
    def __init__(self, store: Mortal, model: Recited) -> None:
        self.store = store
        self.model = model
        agent = Agent("payer", tools=[look, pay, burn])
        mortal = cast(Store, store)
        steps = Retried(mortal, AgentRegistry([agent]), OneModel(model), Settings(agents=""))
        self.stage = Stage(mortal, agent, steps, StartTerms("conversation", LOCAL, can_ask=True))

    async def ask_id(self, tool: str) -> str:
        return next(row.request.request_id for row in await self.stage.waiting() if row.request.tool == tool)

    async def live(self) -> list[Event]:
        """A step of everything, answers one by one, silence that denies, silence that fails."""
        stage = self.stage
        await stage.begin("Go")
        await stage.answer({await self.ask_id("ask_question"): InputAnswer(text="because")})
        await stage.answer({await self.ask_id("pay"): YES})
        await stage.answer({await self.ask_id("pay"): NO}, message="Well")
        await stage.deliver("More")
        await stage.expire()
        return [event async for event in read_all(cast(Store, self.store), SESSION)]


@asynccontextmanager
async def session(number: int, after: bool) -> AsyncGenerator[Session]:
    store = await open_store("sqlite:///:memory:")
    await store.migrate()
    try:
        yield Session(Mortal(store, number, after), Recited())
    finally:
        await store.close()


def lasting(events: list[Event]) -> list[tuple[str, Any]]:
    """What a reader is left with once superseded deltas are gone."""
    passing = ("step.superseded", "message.appended", "action.input.appended")
    return [(event.key, event.data) for event in events if event.type not in passing]


def untimed(emitted: list[tuple[str, Any]]) -> str:
    """When a request expires depends on when it was asked."""
    return re.sub(r"'expiresAt': '[^']*'", "", "\n".join(map(str, emitted)))


async def test_the_session_of_these_tests_is_as_long_as_they_think() -> None:
    async with session(0, after=False) as it:
        events = await it.live()

        assert it.store.commits <= COMMITS
        assert [event.type for event in events].count("session.waiting") == 6
        assert events[-2].type == "turn.failed"


#: How many commits that session takes at most; deltas sometimes share one.
COMMITS = 22


@pytest.mark.parametrize("number", range(1, COMMITS + 1))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_death_at_a_commit_changes_nothing_for_readers(number: int, after: bool) -> None:
    async with session(0, after) as whole:
        expected = untimed(lasting(await whole.live()))

    async with session(number, after) as it:
        assert untimed(lasting(await it.live())) == expected
        assert it.model.asked <= whole.model.asked + 1
