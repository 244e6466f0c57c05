"""The declaration of a run, and what its function is given."""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import NoneType
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, get_args

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import to_json

from perdure.errors import InvalidDeclaration
from perdure.protocol.deliveries import MAIN, DispatchReceipt, Principal, QueueMode
from perdure.protocol.inputs import Responders
from perdure.protocol.wire import JsonObject

from .responders import checked
from .tool import Effects

T = TypeVar("T")

Level: TypeAlias = Literal["info", "warn", "error"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*")
_LONGEST_NAME = 100
#: The longest name of a step, in characters: it is a part of a key.
_LONGEST_STEP_NAME = 200
#: The longest time-out of a step, in seconds.
_LONGEST_TIMEOUT = 12 * 3600


@dataclass(frozen=True)
class Question:
    """What a run asks people."""

    text: str
    options: Sequence[str]
    freeform: bool
    responders: Responders = field(default_factory=Responders)


class RunWork(Protocol):
    """What does the work of a `RunContext`."""

    def step(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], effects: Effects, timeout: float
    ) -> Awaitable[Any]: ...

    def sleep(self, seconds: float) -> Awaitable[None]: ...

    def prompt(
        self, agent: str, message: str, session: str | None, output_schema: JsonObject | None
    ) -> Awaitable[Any]: ...

    def dispatch(
        self, agent: str, to: str, input: Any, dispatch_id: str | None, lane: str, queue_mode: QueueMode | None
    ) -> Awaitable[Any]: ...

    def ask(self, question: Question) -> Awaitable[str]: ...

    def log(self, level: Level, message: str, attributes: JsonObject) -> None: ...


@dataclass(frozen=True)
class RunContext:
    """What the function of a run is given. What it does through this is done once, however often the function is run.

    The function runs from its top again after each wait and after each death of a worker. So it has to make the same
    calls in the same order each time: what may differ, such as the time or the answer of a server, belongs in a step.
    """

    id: str
    name: str
    principal: Principal
    _work: RunWork = field(repr=False)

    def step(
        self,
        name: str,
        function: "Callable[..., Awaitable[T] | T]",
        /,
        *arguments: Any,
        effects: Effects = "at_most_once",
        timeout: float = 300.0,
    ) -> Awaitable[T]:
        """Call the function, and return its result, which must be JSON, here and in all later attempts.

        A function that raises is not called again: `RunStepFailed` is raised here, in all attempts. `effects` is as
        for tools: a step that runs at most once and was interrupted raises `StepOutcomeUnknown`.
        """
        _check("step", "name", name, "text", str)
        if not (name and len(name) <= _LONGEST_STEP_NAME and name.isprintable()):
            raise InvalidDeclaration(
                f"A step is named by 1 to {_LONGEST_STEP_NAME} printable characters, not {name!r}."
            )
        if inspect.iscoroutine(function):
            function.close()
            raise InvalidDeclaration(
                f"Step {name!r}: give it the function and the arguments, and do not call it: "
                f"`ctx.step({name!r}, {function.__name__}, …)`."
            )
        if effects not in get_args(Effects):
            raise InvalidDeclaration(f"Step {name!r}: effects are 'pure', 'idempotent' or 'at_most_once'.")
        _check("step", "timeout", timeout, "a number of seconds", int, float)
        # So written, it refuses NaN too: a timer for it would never be due, and others would wait behind it.
        if not 0 < timeout <= _LONGEST_TIMEOUT:
            raise InvalidDeclaration(
                f"Step {name!r}: its timeout is more than 0 and at most {_LONGEST_TIMEOUT} seconds."
            )
        return self._work.step(name, function, arguments, effects, timeout)

    def sleep(self, seconds: float | timedelta) -> Awaitable[None]:
        """Wait so long from the first time that this is reached. A run that waits uses no compute."""
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        _check("sleep", "seconds", seconds, "a number of seconds or a timedelta", int, float)
        return self._work.sleep(seconds)

    def prompt(
        self, agent: str, message: str, *, session: str | None = None, output_schema: JsonObject | None = None
    ) -> Awaitable[Any]:
        """Have an agent do a task, and return its text, or the structured result that `output_schema` asks for.

        The task gets a session of its own. With `session`, it is a message to the session of this name, which is
        started if there is none; the result is the text of the turn. `RunStepFailed` when the agent fails.
        """
        _check("prompt", "agent", agent, "the name of an agent", str)
        _check("prompt", "message", message, "text", str)
        _check("prompt", "session", session, "the name of a session", str, NoneType)
        _check("prompt", "output_schema", output_schema, "a JSON Schema (`….model_json_schema()`)", dict, NoneType)
        return self._work.prompt(agent, message, session, output_schema)

    def dispatch(
        self,
        agent: str,
        to: str,
        input: Any,
        *,
        dispatch_id: str | None = None,
        lane: str = MAIN,
        queue_mode: QueueMode | None = None,
    ) -> Awaitable[DispatchReceipt]:
        """Hand the input, which is plain JSON, to a session, and go on; the result is the receipt.

        `to`: the id of a session, or a name of yours for one, as for `prompt`; `lane`: the lane of that session;
        `queue_mode`: what the message does while that is busy, if not what the lane declares.
        `RunStepFailed` when it is refused.
        """
        _check("dispatch", "agent", agent, "the name of an agent", str)
        _check("dispatch", "to", to, "the id or the name of a session", str)
        _check("dispatch", "dispatch_id", dispatch_id, "text", str, NoneType)
        _check("dispatch", "lane", lane, "the name of a lane", str)
        _check("dispatch", "queue_mode", queue_mode, "a mode of messages", str, NoneType)
        accepted = self._work.dispatch(agent, to, input, dispatch_id, lane, queue_mode)

        async def receipt() -> DispatchReceipt:
            return DispatchReceipt.model_validate(await accepted)

        return receipt()

    def ask(
        self,
        question: str,
        options: Sequence[str] = (),
        *,
        freeform: bool | None = None,
        responders: Responders | None = None,
    ) -> Awaitable[str]:
        """Ask people, and return the option that they choose, or their text; without options only text is possible.

        `responders`: who may answer, as for approvals; without them it is the owner of the run.
        """
        _check("ask", "question", question, "text", str)
        if isinstance(options, str):
            # A text is a sequence of texts too: of its letters.
            raise InvalidDeclaration(f"ctx.ask: `options` is a list of texts, not {options!r}.")
        for option in options:
            _check("ask", "options", option, "a list of texts", str)
        free, who = not options if freeform is None else freeform, Responders() if responders is None else responders
        _check("ask", "responders", who, "made by perdure.agents.responders", Responders)
        return self._work.ask(Question(question, tuple(options), free, checked(who)))

    def log(self, level: Level, message: str, **attributes: Any) -> None:
        """Write an event that readers of the run see. `attributes` must be JSON."""
        if level not in get_args(Level):
            raise InvalidDeclaration(f"A level is one of {', '.join(get_args(Level))}, not {level!r}.")
        _check("log", "message", message, "text", str)
        self._work.log(level, message, attributes)


def _check(call: str, name: str, value: object, what: str, *types: type) -> None:
    """Raise in the function if the argument is none: what did it later would have to do with the run as a whole."""
    if not isinstance(value, types) or isinstance(value, bool):
        raise InvalidDeclaration(f"ctx.{call}: `{name}` is {what}, not {value!r}.")


RunFunction: TypeAlias = Callable[[RunContext, Any], Awaitable[Any]]


@dataclass(frozen=True)
class Run:
    """The declaration of a run: a name, and the function that does the work."""

    name: str
    function: RunFunction
    input: Any = Any
    output: Any = Any
    _input: TypeAdapter[Any] = field(init=False, repr=False, compare=False)
    _output: TypeAdapter[Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (isinstance(cast("object", self.name), str) and _NAME.fullmatch(self.name)) or (
            len(self.name) > _LONGEST_NAME
        ):
            raise InvalidDeclaration(
                f"The run name {self.name!r} will not do: letters and digits in parts that '-' joins, at most "
                f"{_LONGEST_NAME} characters, and a letter first."
            )
        if not inspect.iscoroutinefunction(self.function):
            raise InvalidDeclaration(f"Run {self.name!r}: its function must be an `async def`.")
        try:
            inspect.signature(self.function).bind(None, None)
        except TypeError:
            raise InvalidDeclaration(
                f"Run {self.name!r}: its function takes the RunContext and the input; "
                f"write `async def {self.name.replace('-', '_')}(ctx, input)`."
            ) from None
        object.__setattr__(self, "_input", self._adapter("input", self.input))
        object.__setattr__(self, "_output", self._adapter("output", self.output))

    def __call__(self, context: RunContext, input: Any) -> Awaitable[Any]:
        return self.function(context, input)

    def read_input(self, value: Any) -> Any:
        """The input in the type that the run declares; raises pydantic's `ValidationError` when it does not fit."""
        return self._input.validate_json(to_json(value))

    def dump_output(self, value: Any) -> Any:
        """The output as JSON; raises pydantic's `ValidationError` when it does not fit what the run declares."""
        return self._output.dump_python(self._output.validate_python(value), mode="json", by_alias=True)

    def _adapter(self, what: str, kind: Any) -> TypeAdapter[Any]:
        try:
            return TypeAdapter(kind)
        except (PydanticSchemaGenerationError, PydanticUserError) as error:
            raise InvalidDeclaration(f"Run {self.name!r}: {kind!r} cannot be its {what}: {error}") from None


def run(
    function: None = None, /, *, name: str = "", input: Any = Any, output: Any = Any
) -> Callable[[RunFunction], Run]:
    """Declare a function as a run: `@run(name="nightly", input=Nightly)`, `async def nightly(ctx, input): …`."""
    if not name:
        of = str(getattr(function, "__name__", "nightly")).replace("_", "-")
        raise InvalidDeclaration(f'A run has a name: write @run(name="{of}").')

    def declare(function: RunFunction) -> Run:
        return Run(name, function, input, output)

    return declare


class RunRegistry:
    """Runs by name."""

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        self._runs: dict[str, Run] = {}
        for each in runs:
            if self._runs.setdefault(each.name, each) is not each:
                raise InvalidDeclaration(f"Two runs are named {each.name!r}.")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all of them, in order."""
        return tuple(self._runs)

    def get(self, name: str) -> Run | None:
        """The run of this name, or None."""
        return self._runs.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._runs

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)
