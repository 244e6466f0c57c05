"""The declaration of a tool."""

import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import WRAPPER_ASSIGNMENTS
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar, cast, overload

from perdure.errors import InvalidDeclaration
from perdure.protocol.inputs import Consequence, Responders
from perdure.protocol.names import POOL_NAMES, is_pool
from perdure.protocol.wire import JsonObject

from .approval import OPEN, Approval, ApprovalPolicy, Describe, Seconds, approval_policy, seconds
from .signature import Signature, read_signature

if TYPE_CHECKING:
    from .context import ToolContext
    from .progress.slices import Slice

P = ParamSpec("P")
R = TypeVar("R")

#: The effect of running a tool twice: none, the same as once, or harm.
Effects: TypeAlias = Literal["pure", "idempotent", "at_most_once"]

#: Temporal counts attempts in 32 bits, and a workflow that schedules more cannot continue.
_MOST_RETRIES = 1_000

_NAME = re.compile(r"(?=.*[A-Za-z0-9])[A-Za-z0-9_-]{1,64}")

_WRAP = "Declare a function that calls it: `@tool`, `def name(argument: int) -> str: return thing.method(argument)`."


@dataclass(frozen=True)
class Tool(Generic[P, R]):
    """The declaration of a tool; it can still be called like the function."""

    function: Callable[P, R]
    name: str
    description: str
    signature: Signature = field(repr=False)
    effects: Effects = "at_most_once"
    approval_policy: ApprovalPolicy = OPEN
    timeout: float = 300.0
    retries: int = 0
    pool: str | None = None
    #: The slice that its results are added to.
    into: "Slice[Any] | None" = None
    #: Reads the result again when the call's changes of state had to be made again.
    late_result: "Callable[[ToolContext], Awaitable[Any]] | None" = field(default=None, repr=False)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @property
    def schema(self) -> JsonObject:
        """The JSON schema of the arguments, without the context."""
        return self.signature.schema

    @property
    def approval(self) -> Approval:
        """When a call of it needs approval."""
        return self.approval_policy.approval

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function; others run in a thread."""
        return inspect.iscoroutinefunction(self.function)


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    effects: Effects = "at_most_once",
    approval: Approval = "never",
    approval_key: Describe | None = None,
    summary: Describe | None = None,
    responders: Responders | None = None,
    expires: Seconds | None = None,
    on_expiry: Consequence = "deny",
    remind: Sequence[Seconds] = (),
    timeout: Seconds = 300.0,
    retries: int = 0,
    pool: str | None = None,
    into: "Slice[Any] | None" = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    effects: Effects = "at_most_once",
    approval: Approval = "never",
    approval_key: Describe | None = None,
    summary: Describe | None = None,
    responders: Responders | None = None,
    expires: Seconds | None = None,
    on_expiry: Consequence = "deny",
    remind: Sequence[Seconds] = (),
    timeout: Seconds = 300.0,
    retries: int = 0,
    pool: str | None = None,
    into: "Slice[Any] | None" = None,
) -> Any:
    """Declare a function as a tool.

    `effects` decides what happens to a call that was interrupted: `pure` and `idempotent` tools run again,
    `at_most_once` (the default) never does; the model gets an unknown outcome. `retries` are extra
    tries after an exception, for tools that may run again. `timeout` is in seconds. Only the workers of its `pool`
    (`perdure worker --pool gpu`) run it; until one is there, its calls wait. What it returns is added to the slice
    `into`, in the transaction that records its outcome.

    `approval` says when a call needs approval: `never`, `always`, `once` in a session (for each
    `approval_key(arguments)`, when that is given), or a function of the call and the session that returns True (ask),
    False (run) or a `Decision`. The `responders` see `summary(arguments)`. A request without an answer after `expires`
    is denied, approved, or fails the turn (`on_expiry`); `remind` says when to remind.
    """
    # For annotations with local names of the caller, as in a tool declared inside a function.
    local = dict(sys._getframe(1).f_locals)  # pyright: ignore[reportPrivateUsage]

    def declare(function: Callable[..., Any]) -> Tool[..., Any]:
        if isinstance(function, str):
            raise InvalidDeclaration(f"`@tool` takes options by name: `@tool(name={function!r})`.")
        if not isinstance(function, FunctionType):
            raise InvalidDeclaration(f"{function!r} cannot be a tool: it is not a function. {_WRAP}")
        called = name or function.__name__
        _check_kind(called, function)
        policy = approval_policy(called, approval, approval_key, summary, responders, expires, on_expiry, remind)
        limit = seconds(f"Tool {called!r}: the timeout", timeout)
        _check(called, effects, limit, retries)
        if into is not None and not hasattr(into, "add_result"):
            raise InvalidDeclaration(f"Tool {called!r}: into is a slice: `into=FINDINGS`, not {into!r}.")
        if pool is not None and not is_pool(pool):
            raise InvalidDeclaration(f"Tool {called!r}: {pool!r} cannot be a pool: {POOL_NAMES}.")
        text, parameters = _documented(function)
        declared = Tool(
            function=cast("Callable[..., Any]", function),
            name=called,
            description=description if description is not None else text,
            signature=read_signature(called, function, parameters, local),
            effects=effects,
            approval_policy=policy,
            timeout=limit,
            retries=retries,
            pool=pool,
            into=into,
        )
        # The dataclass is frozen; help(), inspect and doctest need these attributes of the function.
        for attribute in WRAPPER_ASSIGNMENTS:
            object.__setattr__(declared, attribute, getattr(function, attribute))
        object.__setattr__(declared, "__wrapped__", function)
        return declared

    return declare if function is None else declare(function)


def _check_kind(name: str, function: FunctionType) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidDeclaration(f"Tool {name!r} yields; a call has one result: collect it all, and `return` that.")
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if first and first.name in ("self", "cls") and first.annotation is first.empty:
        raise InvalidDeclaration(f"Tool {name!r} is a method: nothing would be given as {first.name!r}. {_WRAP}")


def _check(name: object, effects: str, timeout: float, retries: object) -> None:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidDeclaration(f"The tool name {name!r} will not do: letters, digits, '_' and '-', at most 64.")
    if effects not in ("pure", "idempotent", "at_most_once"):
        raise InvalidDeclaration(f"Tool {name!r}: effects are 'pure', 'idempotent' or 'at_most_once'.")
    if timeout <= 0:
        raise InvalidDeclaration(f"Tool {name!r}: the timeout must be more than 0 seconds.")
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= _MOST_RETRIES:
        raise InvalidDeclaration(
            f"Tool {name!r}: retries is a whole number, not negative and at most {_MOST_RETRIES}; not {retries!r}."
        )
    if retries and effects == "at_most_once":
        raise InvalidDeclaration(
            f"Tool {name!r} runs at most once, so it cannot be retried; declare effects='idempotent' or 'pure'."
        )


def _documented(function: object) -> tuple[str, dict[str, str]]:
    """The description and the parameters from the docstring, in Google, NumPy or Sphinx style."""
    text = inspect.getdoc(function)
    if not text:
        return "", {}
    # Imported late: it takes longer to import than everything else that authors import of Perdure.
    from griffe import Docstring, DocstringSectionParameters, DocstringSectionText, parse_auto

    quiet = {"warnings": False}
    options: Any = {"google": quiet, "numpy": quiet, "sphinx": quiet}
    sections = parse_auto(Docstring(text), default="google", per_style_options=options)
    texts = [section.value for section in sections if isinstance(section, DocstringSectionText)]
    described = {
        each.name.lstrip("*"): " ".join(each.description.split())
        for section in sections
        if isinstance(section, DocstringSectionParameters)
        for each in section.value
    }
    return "\n\n".join(texts).strip(), described
