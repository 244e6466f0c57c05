"""An agent's tools as a step uses them: those declared with `@tool`, and those of pydantic-ai toolsets."""

import asyncio
import contextvars
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_ai.exceptions import UserError
from pydantic_ai.models.test import TestModel
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.tools import Tool as PydanticTool
from pydantic_ai.toolsets import AbstractToolset, FunctionToolset, ToolsetTool
from pydantic_ai.usage import RunUsage
from pydantic_core import to_json

from perdure.agents.agent import FINAL_OUTPUT, Agent
from perdure.agents.approval import CLOSED, OPEN, ApprovalPolicy, seconds
from perdure.agents.context import ToolContext
from perdure.agents.progress.plan import PlanRefused
from perdure.agents.signature import Arguments, problems
from perdure.agents.tool import Effects, Tool
from perdure.bounds import DEEPEST
from perdure.errors import InvalidDeclaration
from perdure.harness.programs.stubs import python_names
from perdure.protocol.wire import JsonObject

log = logging.getLogger("perdure.tools")

#: Seconds in which a toolset must list its tools when a worker starts.
_TIMEOUT = 20.0
#: The most values that are collected from the iterators of a result.
_MOST_COLLECTED = 100_000


LateResult: TypeAlias = Callable[[ToolContext], Awaitable[Any]]


class InvalidArguments(Exception):
    """The model's arguments do not fit the tool; the text is shown to the model."""


class Usable(Protocol):
    """A tool that can be offered to a model and called."""

    @property
    def definition(self) -> ToolDefinition: ...
    @property
    def effects(self) -> Effects: ...
    @property
    def approval_policy(self) -> ApprovalPolicy: ...
    @property
    def timeout(self) -> float: ...
    @property
    def retries(self) -> int: ...
    @property
    def pool(self) -> str | None: ...
    @property
    def late_result(self) -> LateResult | None:
        """Reads the result again when the call's changes of state had to be made again."""
        ...

    def read(self, arguments: JsonObject) -> Arguments:
        """The validated arguments of a call; raises `InvalidArguments`."""
        ...

    async def call(self, arguments: JsonObject, context: ToolContext) -> Any: ...


async def open_toolbox(agent: Agent) -> Mapping[str, Usable]:
    """The agent's tools by name, in the order of their declaration."""
    box: dict[str, Usable] = {}
    for declared in (*agent.tools, *_planning_tools(agent)):
        if isinstance(declared, Tool):
            found: list[Usable] = [OwnTool(cast("Tool[..., Any]", declared))]
        else:
            found = await _pydantic_tools(declared)
        for usable in found:
            name = usable.definition.name
            if box.setdefault(name, usable) is not usable:
                raise InvalidDeclaration(f"Agent {agent.name!r} has more than one tool named {name}.")
            if name == FINAL_OUTPUT:
                raise InvalidDeclaration(f"Agent {agent.name!r}: the name {name!r} is taken by the structured result.")
    return box


def _planning_tools(agent: Agent) -> Sequence[object]:
    if agent.planning is None:
        return ()
    from perdure.agents.progress.tools import PLANNING_TOOLS

    return PLANNING_TOOLS


async def check_tools(agents: Iterable[Agent]) -> None:
    """Open all toolboxes once; raises `InvalidDeclaration` if one can never be opened."""
    await asyncio.gather(*(_check(agent) for agent in agents))


async def _check(agent: Agent) -> None:
    try:
        async with asyncio.timeout(_TIMEOUT):
            names = list(await open_toolbox(agent))
        if agent.code_mode:
            python_names(agent.name, [*names, *(name for name, _ in agent.children)])
    except InvalidDeclaration:
        raise
    except UserError as wrong:
        raise InvalidDeclaration(f"Agent {agent.name!r}: {wrong}") from None
    except Exception as error:
        # A server that is unavailable now may be back when it is needed, and other agents do not need it.
        log.warning("Agent %r: its tools cannot be listed now (%s).", agent.name, type(error).__name__)


class OwnTool:
    """A tool declared with `@tool`."""

    def __init__(self, tool: Tool[..., Any]) -> None:
        self._tool = tool
        self.definition = ToolDefinition(
            name=tool.name, description=tool.description or None, parameters_json_schema=tool.signature.schema
        )
        self.effects: Effects = tool.effects
        self.approval_policy = tool.approval_policy
        self.timeout = tool.timeout
        self.retries = tool.retries
        self.pool = tool.pool
        self.late_result = tool.late_result

    @property
    def returns(self) -> JsonObject | None:
        """The schema of what it returns, if its annotation has one."""
        function = self._tool.function
        try:
            return TypeAdapter(get_type_hints(function)["return"]).json_schema(mode="serialization")
        except (KeyError, NameError, PydanticUserError):
            return None

    def read(self, arguments: JsonObject) -> Arguments:
        try:
            return self._tool.signature.read(arguments)
        except ValidationError as invalid:
            raise invalid_arguments(self._tool.name, invalid) from None

    async def call(self, arguments: JsonObject, context: ToolContext) -> Any:
        try:
            result = await self._result(arguments, context)
        except PlanRefused as refused:
            raise InvalidArguments(str(refused)) from None
        if self._tool.into is not None:
            await self._tool.into.add_result(context, result)
        return result

    async def _result(self, arguments: JsonObject, context: ToolContext) -> Any:
        args, kwargs = self._tool.signature.bind(self._validated(arguments), context)
        if self._tool.is_async:
            result = await self._tool.function(*args, **kwargs)
        else:
            result = await self._in_thread(lambda: _collected(self._tool.function(*args, **kwargs)), context)
            if not inspect.iscoroutine(result):
                return result
            # A plain function may return a coroutine.
            result = await result
        # In a thread, because iterators run the tool's code, which may take long or never end.
        return await self._in_thread(lambda: _collected(result), context) if _may_be_lazy(result) else result

    async def _in_thread(self, work: Callable[[], Any], context: ToolContext) -> Any:
        return await in_thread(work, self._tool.name, ended=context.thread_ended)

    def _validated(self, arguments: JsonObject) -> Any:
        try:
            return self._tool.signature.model.model_validate_json(to_json(arguments))
        except ValidationError as invalid:
            raise invalid_arguments(self._tool.name, invalid) from None


def _may_be_lazy(result: object) -> bool:
    return isinstance(result, Iterator | dict | list | tuple)


def _collected(result: Any) -> Any:
    """The result with its generators and other iterators replaced by lists of their values."""
    return _Collecting().made(result) if _is_lazy(result) else result


def _is_lazy(result: Any) -> bool:
    """Whether the result contains an iterator at any depth."""
    seen: set[int] = set()
    level: list[Any] = [result]
    while level:
        value = level.pop()
        if isinstance(value, dict | list | tuple):
            if id(cast(object, value)) not in seen:
                seen.add(id(cast(object, value)))
                level.extend(
                    cast("dict[Any, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
                )
        elif not isinstance(value, str | int | float | bytes | None) and isinstance(value, Iterator):
            return True
    return False


class _Collecting:
    """Replaces the iterators in a result by lists; all of them together have a limit."""

    def __init__(self) -> None:
        self._left = _MOST_COLLECTED

    def made(self, value: Any, depth: int = 0) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"the tool returned something that is nested deeper than {DEEPEST} levels")
        match value:
            case dict():
                known = cast("dict[Any, Any]", value)
                return {name: self.made(inner, depth + 1) for name, inner in known.items()}
            case list() | tuple():
                return [self.made(inner, depth + 1) for inner in cast("list[Any]", value)]
            case Iterator():
                return [self.made(inner, depth + 1) for inner in self._values(cast("Iterator[Any]", value))]
            case _:
                return value

    def _values(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            if self._left == 0:
                raise ValueError(f"the tool returned iterators of more than {_MOST_COLLECTED} values")
            self._left -= 1
            yield value


@dataclass(frozen=True)
class _PydanticTool:
    """A tool of a pydantic-ai toolset. Its effects are unknown, so it runs at most once."""

    toolset: AbstractToolset[Any]
    tool: ToolsetTool[Any]
    effects: Effects = "at_most_once"
    retries: int = 0
    pool: str | None = None
    late_result: LateResult | None = None

    @property
    def definition(self) -> ToolDefinition:
        return self.tool.tool_def

    @property
    def approval_policy(self) -> ApprovalPolicy:
        return CLOSED if self.tool.tool_def.kind == "unapproved" else OPEN

    @property
    def timeout(self) -> float:
        return _timeout(self.tool.tool_def)

    def read(self, arguments: JsonObject) -> Arguments:
        validated = self._validated(arguments)
        # The original JSON is kept: only the toolset knows whether its values can be written as JSON and read back.
        return Arguments(arguments, lambda: validated)

    async def call(self, arguments: JsonObject, context: ToolContext) -> Any:
        # A toolset's tool finds our ToolContext in `ctx.deps`.
        run = replace(
            _run(context),
            tool_name=self.definition.name,
            tool_call_id=context.call_id,
            # A call that needs an approval runs only after it was approved.
            tool_call_approved=self.approval_policy is CLOSED,
        )
        async with self.toolset:
            return await self.toolset.call_tool(self.definition.name, self._validated(arguments), run, self.tool)

    def _validated(self, arguments: JsonObject) -> dict[str, Any]:
        try:
            return self.tool.args_validator.validate_json(to_json(arguments))
        except ValidationError as invalid:
            raise invalid_arguments(self.definition.name, invalid) from None


async def _pydantic_tools(declared: object) -> list[Usable]:
    if isinstance(declared, PydanticTool):
        declared = FunctionToolset([cast("PydanticTool[Any]", declared)])
    if not isinstance(declared, AbstractToolset):
        raise InvalidDeclaration(f"{declared!r} is neither a pydantic-ai tool nor a toolset.")
    toolset = cast("AbstractToolset[Any]", declared)
    async with toolset:
        tools = await toolset.get_tools(_run(None))
    for tool in tools.values():
        _timeout(tool.tool_def)
    return [_PydanticTool(toolset, tool) for tool in tools.values()]


def _timeout(definition: ToolDefinition) -> float:
    return seconds(f"Tool {definition.name!r}: the timeout", definition.timeout or 300.0)


def _run(context: ToolContext | None) -> RunContext[Any]:
    # There is no agent run of pydantic-ai: its tools get a minimal context.
    return RunContext(deps=context, model=TestModel(), usage=RunUsage())


def invalid_arguments(tool: str, invalid: ValidationError) -> InvalidArguments:
    return InvalidArguments(f"Invalid arguments for {tool}: {problems(invalid)}")


async def in_thread(work: Callable[[], Any], name: str, *, ended: threading.Event) -> Any:
    """Run in a new thread; `ended` is set when the thread has ended, even if the caller was cancelled before.

    No pool: tools that hang would block all others. The thread is a daemon, so that a tool that hangs does not keep
    the worker from stopping.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = context.run(work)
        except (SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit) as error:
            # A future does not accept StopIteration, and the others would end the event loop.
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        except BaseException as error:
            failure = error
        finally:
            ended.set()
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    ended.clear()
    threading.Thread(target=run, name=f"tool-{name}", daemon=True).start()
    return await future
