"""Whatever a model, a provider, a tool or a caller sends: the turn ends once, and the session continues."""

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, example, settings
from hypothesis import given as examples
from hypothesis import strategies as st
from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.usage import RequestUsage

from api.responses import dumps
from perdure import Agent, ToolContext, tool
from perdure.errors import ModelFailed
from perdure.models.base import Delta, Prompt, Reply, ToolInputDelta
from perdure.protocol.deliveries import FilePart
from perdure.protocol.deliveries import TextPart as SaidText
from perdure.protocol.events import BOUNDARIES
from perdure.protocol.requests import Calls, Finished
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.open import open_store
from perdure.testing import ScriptedModel, call
from tests.support.examples import at_least
from tests.support.lab import Lab

_SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
_numbers = count()


@pytest.fixture(scope="module", autouse=True)
def unlogged() -> Generator[None]:
    """What is logged is not kept for reports: halves of characters cannot be sent from one process to another."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@tool(effects="pure")
def echo(value: object = None) -> object:
    return value


class _ToolOutcome:
    """What the tools do next."""

    value: Any = None
    error: BaseException | None = None
    token: str | None = None


@tool(effects="pure")
async def act(ctx: ToolContext) -> Any:
    if _ToolOutcome.token:
        await ctx.session.set_continuation_token(_ToolOutcome.token)
    if _ToolOutcome.error:
        raise _ToolOutcome.error
    return _ToolOutcome.value


class Streaming(ScriptedModel):
    """Streams the input of its calls too, under the ids and names that they have."""

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        async for item in super().stream(prompt):
            if isinstance(item, Reply):
                for part in item.response.parts:
                    if isinstance(part, ToolCallPart):
                        yield ToolInputDelta(part.tool_call_id, part.tool_name, str(part.args))
            yield item


class Unhappy:
    """One store, in one loop, for all examples."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self.store: Store = self.run(self._open(url))

    async def _open(self, url: str) -> Store:
        store = await open_store(url)
        await store.migrate()
        return store

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def close(self) -> None:
        self.run(self.store.close())
        self._runner.close()

    async def turns(self, *lines: Any, message: Any = "Hi", **body: Any) -> list[str]:
        """A turn with these lines and one more after it: the events of the first one."""
        model = Streaming([*lines, "Done", "Done", "Later"])
        agent = Agent("tester", tools=[echo, act])
        it = Lab(self.store, agent, model, "conversation", Settings(agents=""), f"s{next(_numbers)}")
        await self._turn(it, await it.deliver(message, **body))
        emitted = await it.types()
        assert len([type for type in emitted if type in BOUNDARIES]) == 1, emitted
        assert emitted[-1] == "session.waiting"
        first = len(model.prompts)
        assert first <= len(lines) + 1, "nothing is asked for, and paid, again"
        await self._turn(it, await it.deliver("Again"), turn=1)
        self._check_sendable(model.prompts[-1].messages)
        for event in await it.events():
            assert json.loads(dumps(event.model_dump())) is not None
        return emitted

    async def _turn(self, it: Lab, delivery: Any, turn: int = 0) -> None:
        for step in range(5):
            outcome = await it.model(delivery, turn=turn, step=step)
            assert outcome.model_dump_json(), "it goes to the engine"
            if isinstance(outcome, Finished):
                return
            assert isinstance(outcome, Calls)
            for ref in outcome.calls:
                assert (await it.tool(ref, turn=turn, step=step)).model_dump_json()
        raise AssertionError("the turn has no end")

    def _check_sendable(self, messages: Any) -> None:
        """As the clients of providers write it: arguments as JSON, ids and text as UTF-8."""
        assert ModelMessagesTypeAdapter.dump_json(list(messages))
        for message in messages:
            for part in message.parts:
                if isinstance(part, ToolCallPart):
                    assert part.args_as_json_str().encode()
                    assert part.tool_call_id.isprintable()
                    assert len(part.tool_call_id) <= 250


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unhappy]:
    unhappy = Unhappy(f"sqlite:///{tmp_path_factory.mktemp('text') / 'perdure.db'}")
    yield unhappy
    unhappy.close()


# What PostgreSQL does with odd texts is among the tests of the stores.
@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.slow])])
def unhappy(request: pytest.FixtureRequest, sqlite: Unhappy) -> Iterator[Unhappy]:
    if request.param == "sqlite":
        yield sqlite
        return
    unhappy = Unhappy(request.getfixturevalue("postgres_url"))
    yield unhappy
    unhappy.close()


def nested(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


def deep_json(levels: int) -> str:
    return '{"value": ' + "[" * levels + "]" * levels + "}"


NASTY = ["\0", "\ud800", "\udc00x", "\ud83d\ude00", "a\0b", "\x1b[0m", "\u202e", "", " ", "x" * 300]
texts = st.sampled_from(NASTY) | st.text(st.characters(), max_size=20)
numbers = (
    st.integers()
    | st.integers(0, 400).map(lambda zeros: 10**zeros)
    | st.floats()
    | st.sampled_from([math.nan, math.inf, -math.inf, 2**63, 2**64, -(2**63) - 1])
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
) | st.builds(nested, st.integers(0, 400), texts)
arguments = (
    st.dictionaries(st.just("value") | texts, values, max_size=2)
    | texts
    | st.sampled_from(["[]", "null", "{", '{"value": 1e400}', '{"value": NaN}', '{"value": "\\ud800"}'])
    | st.sampled_from([5, 150, 500, 20_000]).map(deep_json)
)
tools = st.sampled_from(["echo", "act", "nobody", "x" * 70]) | texts
no_texts: st.SearchStrategy[Any] = st.sampled_from([None, 5, 1.5, True, ["x"], {"x": 1}])
parts = (
    st.builds(TextPart, texts | no_texts)
    | st.builds(ThinkingPart, texts | no_texts)
    | st.builds(ToolCallPart, tools | no_texts, arguments, tool_call_id=texts | no_texts)
)
usages = st.builds(RequestUsage, input_tokens=st.integers(), output_tokens=st.integers())
replies = st.builds(
    ModelResponse,
    parts=st.lists(parts, min_size=1, max_size=4),
    usage=usages,
    model_name=texts | no_texts,
    provider_response_id=texts | no_texts,
    provider_details=st.none() | st.dictionaries(texts, values, max_size=2),
    finish_reason=st.sampled_from(["stop", "tool_call", "length", None]),
)


def repeated(unit: str, size: int) -> str:
    return unit * (size // len(unit))


def listed(unit: Any, count: int) -> list[Any]:
    return [unit] * count


#: Up to some hundred kilobytes, and what is just too large to be kept of a tool's output.
sizes = st.sampled_from([1_000, 65_535, 65_536, 65_537, 150_000, 400_000])
long_texts = st.builds(repeated, st.sampled_from(["x", "é", "\0", "\ud800", "\U0001f600", '"', "word "]), sizes)
long_lists = st.builds(listed, texts | st.integers() | st.just(math.nan), sizes.map(lambda size: size // 4))
long_values = long_texts | long_lists | st.dictionaries(long_texts, texts, min_size=1, max_size=1)
_RARELY = settings(max_examples=at_least(5), deadline=None, suppress_health_check=_SLOW)


# By itself it can be written, and beside other messages it cannot.
@example(reply=ModelResponse(parts=[TextPart("x")], provider_details={"x": nested(253)}))
@settings(max_examples=at_least(20), deadline=None, suppress_health_check=_SLOW)
@examples(replies)
def test_the_turn_ends_once_for_any_text_of_a_model(unhappy: Unhappy, reply: ModelResponse) -> None:
    _ToolOutcome.value, _ToolOutcome.error, _ToolOutcome.token = 1, None, None

    unhappy.run(unhappy.turns(reply))


@settings(max_examples=at_least(12), deadline=None, suppress_health_check=_SLOW)
@examples(values | st.binary(max_size=5) | st.builds(dict, code=texts, message=texts), st.none() | texts)
def test_whatever_a_tool_returns_the_turn_ends_once(unhappy: Unhappy, value: Any, token: str | None) -> None:
    _ToolOutcome.value, _ToolOutcome.error = value, None
    _ToolOutcome.token = f"{token}{next(_numbers)}" if token is not None else None

    emitted = unhappy.run(unhappy.turns(call("act")))

    assert emitted.count("action.result") == 1


@settings(max_examples=at_least(10), deadline=None, suppress_health_check=_SLOW)
@examples(texts.map(RuntimeError) | texts.map(ModelFailed) | st.just(Unprintable()))
def test_whatever_a_tool_raises_the_turn_ends_once(unhappy: Unhappy, error: BaseException) -> None:
    _ToolOutcome.error, _ToolOutcome.token = error, None

    emitted = unhappy.run(unhappy.turns(call("act")))

    assert emitted.count("action.result") == 1


@settings(max_examples=at_least(10), deadline=None, suppress_health_check=_SLOW)
@examples(texts.map(RuntimeError) | texts.map(ModelFailed) | st.just(Unprintable()))
def test_whatever_a_provider_fails_with_the_turn_ends_once(unhappy: Unhappy, error: Exception) -> None:
    emitted = unhappy.run(unhappy.turns(error))

    assert "turn.failed" in emitted


@settings(max_examples=at_least(10), deadline=None, suppress_health_check=_SLOW)
@examples(
    texts
    | st.lists(
        st.builds(SaidText, text=texts)
        | st.builds(
            FilePart,
            media_type=st.sampled_from(["image/png", "application/pdf"]) | texts,
            data=texts | st.just("aGVsbG8="),
            filename=texts,
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    st.lists(texts, max_size=2).map(tuple),
)
def test_the_turn_ends_once_for_any_text_of_a_caller(unhappy: Unhappy, message: Any, context: tuple[str, ...]) -> None:
    unhappy.run(unhappy.turns("Hello", message=message, client_context=context))


@_RARELY
@examples(st.builds(TextPart, long_texts) | st.builds(ThinkingPart, long_texts), long_values)
def test_the_turn_ends_once_for_any_amount_of_text_of_a_model(unhappy: Unhappy, part: Any, value: Any) -> None:
    made = ToolCallPart("echo", {"value": value}, tool_call_id="c")
    written = ToolCallPart("echo", json.dumps({"value": value}), tool_call_id="d")

    unhappy.run(unhappy.turns(ModelResponse(parts=[part, made, written], finish_reason="tool_call")))


@_RARELY
@examples(long_values)
def test_however_much_a_tool_returns_the_turn_ends_once(unhappy: Unhappy, value: Any) -> None:
    _ToolOutcome.value, _ToolOutcome.error, _ToolOutcome.token = value, None, None

    emitted = unhappy.run(unhappy.turns(call("act")))

    assert emitted.count("action.result") == 1


@_RARELY
@examples(long_texts)
def test_however_much_a_tool_raises_the_turn_ends_once(unhappy: Unhappy, text: str) -> None:
    _ToolOutcome.error, _ToolOutcome.token = RuntimeError(text), None

    emitted = unhappy.run(unhappy.turns(call("act")))

    assert emitted.count("action.result") == 1


@_RARELY
@examples(long_texts, st.lists(long_texts, max_size=2).map(tuple))
def test_the_turn_ends_once_for_any_amount_of_text_of_a_caller(
    unhappy: Unhappy, message: str, context: tuple[str, ...]
) -> None:
    unhappy.run(unhappy.turns("Hello", message=message, client_context=context))
