"""What authors write of a run: its declaration, and the calls of its function."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, cast

import pytest

from perdure import InvalidDeclaration, Principal, Run, RunContext, RunStepFailed, StepOutcomeUnknown, run
from perdure.agents.run import RunWork

ADA = Principal(principal_id="ada", principal_type="user", authenticator="jwt", attributes={})


class Work:
    """Notes the calls that reach it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        def called(*arguments: Any, **named: Any) -> Awaitable[None]:
            self.calls.append((name, *arguments))
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.set_result(None)
            return future

        return called


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def ctx(work: Work) -> Any:
    """Untyped: the tests make the mistakes that a type checker would find."""
    return RunContext("run_1", "nightly", ADA, cast("RunWork", work))


async def function() -> int:
    return 1


MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda ctx: ctx.step(3, function), "ctx.step: `name` is text, not 3"),
    (lambda ctx: ctx.step("count", function, timeout="5"), "ctx.step: `timeout` is a number of seconds, not '5'"),
    (lambda ctx: ctx.sleep("5"), "ctx.sleep: `seconds` is a number of seconds or a timedelta, not '5'"),
    (lambda ctx: ctx.sleep(None), "ctx.sleep: `seconds` is a number of seconds or a timedelta, not None"),
    (lambda ctx: ctx.prompt(function, "hello"), "ctx.prompt: `agent` is the name of an agent, not <function"),
    (lambda ctx: ctx.prompt("writer", 3), "ctx.prompt: `message` is text, not 3"),
    (lambda ctx: ctx.prompt("writer", "hello", session=3), "ctx.prompt: `session` is the name of a session, not 3"),
    (
        lambda ctx: ctx.prompt("writer", "hello", output_schema=Run),
        r"`output_schema` is a JSON Schema \(`….model_json_schema\(\)`\), not <class",
    ),
    (lambda ctx: ctx.ask(3), "ctx.ask: `question` is text, not 3"),
    (lambda ctx: ctx.ask("Which?", "red"), "ctx.ask: `options` is a list of texts, not 'red'"),
    (lambda ctx: ctx.ask("Which?", [1, 2]), r"ctx.ask: `options` is a list of texts, not 1"),
    (lambda ctx: ctx.log("info", 3), "ctx.log: `message` is text, not 3"),
    (lambda ctx: ctx.log("warning", "x"), "A level is one of info, warn, error, not 'warning'"),
]


def test_the_decorator_without_a_name_says_what_to_write() -> None:
    async def nightly(ctx: RunContext, night: Any) -> None: ...

    with pytest.raises(InvalidDeclaration, match=r'write @run\(name="nightly"\)'):
        cast("Any", run)(nightly)


def test_a_function_without_input_says_what_to_write() -> None:
    async def nightly(ctx: RunContext) -> None: ...

    with pytest.raises(InvalidDeclaration, match=r"write `async def nightly\(ctx, input\)`"):
        Run("nightly", cast("Any", nightly))


def test_a_step_that_was_called_already_says_what_to_write(ctx: Any, work: Work) -> None:
    coroutine = function()

    with pytest.raises(InvalidDeclaration, match="give it the function and the arguments, and do not call it"):
        ctx.step("count", coroutine)

    assert work.calls == []


@pytest.mark.parametrize(("call", "complaint"), MISTAKES)
def test_an_argument_of_a_wrong_type_is_refused_where_it_is_written(
    ctx: Any, work: Work, call: Callable[[Any], Any], complaint: str
) -> None:
    with pytest.raises(InvalidDeclaration, match=complaint):
        call(ctx)

    assert work.calls == []


async def test_a_sleep_is_a_number_of_seconds_or_a_timedelta(ctx: Any, work: Work) -> None:
    await ctx.sleep(timedelta(minutes=2))
    await ctx.sleep(3)

    assert work.calls == [("sleep", 120.0), ("sleep", 3)]


def test_a_failed_step_says_which_one_it_is_and_what_it_has_raised() -> None:
    failed = RunStepFailed("count", "KeyError", "'north'")

    assert str(failed) == "count: KeyError: 'north'"
    assert failed.message == "'north'"
    assert str(StepOutcomeUnknown("send")) == "The step 'send' was interrupted; it is not done again."
