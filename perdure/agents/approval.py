"""Approval policies: when a call needs approval, who may approve it, and what happens when the request expires."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from perdure.bounds import described
from perdure.errors import InvalidDeclaration
from perdure.protocol.inputs import Consequence, Responders
from perdure.protocol.wire import JsonObject

from .context import SessionView
from .responders import checked


@dataclass(frozen=True)
class Call:
    """A call that the model requested: the input of an approval function."""

    id: str
    tool: str
    #: The arguments that will run: validated, of the types that the tool declares, with defaults for omitted ones.
    arguments: JsonObject


@dataclass(frozen=True)
class Decision:
    """What an approval function may return beside True (ask) and False (run)."""

    kind: Literal["allow", "ask", "deny"]
    #: Shown to the responders.
    prompt: str | None = None
    #: Given to the model.
    reason: str | None = None

    @classmethod
    def allow(cls) -> "Decision":
        """Run the call without asking, as False does."""
        return cls("allow")

    @classmethod
    def ask(cls, prompt: str | None = None) -> "Decision":
        """Ask the responders, as True does; `prompt` is what they read instead of the summary."""
        return cls("ask", prompt=prompt)

    @classmethod
    def deny(cls, reason: str) -> "Decision":
        """Refuse the call; the model gets the reason."""
        return cls("deny", reason=reason)


Verdict: TypeAlias = bool | Decision
#: When a call of the tool needs approval.
Approval: TypeAlias = Literal["never", "once", "always"] | Callable[[Call, SessionView], Verdict | Awaitable[Verdict]]
Describe: TypeAlias = Callable[[JsonObject], str | Awaitable[str]]
Seconds: TypeAlias = float | timedelta

#: Seconds. Temporal counts nanoseconds in 64 bits, which end after three centuries. A workflow could not refuse more.
_LONGEST = 36_525 * 86_400


@dataclass(frozen=True)
class ApprovalPolicy:
    """When and how people approve the calls of a tool."""

    approval: Approval = "never"
    #: For `once`: an approval is stored under this key; without it, under the tool.
    key: Describe | None = None
    #: What the call would do, in words for the responders.
    summary: Describe | None = None
    responders: Responders = field(default_factory=Responders)
    #: Seconds until the request expires, with the consequence `on_expiry`.
    expires: float | None = None
    on_expiry: Consequence = "deny"
    #: Seconds after which reminders are emitted.
    remind: tuple[float, ...] = ()


#: Runs without asking.
OPEN = ApprovalPolicy()
#: Asks each time.
CLOSED = ApprovalPolicy("always")


def approval_policy(
    tool: str,
    approval: Approval,
    approval_key: Describe | None,
    summary: Describe | None,
    responders: Responders | None,
    expires: Seconds | None,
    on_expiry: Consequence,
    remind: Sequence[Seconds],
) -> ApprovalPolicy:
    """The policy as declared; `InvalidDeclaration` when it cannot work."""
    who = Responders() if responders is None else responders
    if problem := _wrong_type(approval, approval_key, summary, who, remind):
        raise InvalidDeclaration(f"Tool {tool!r}: {problem}.")
    policy = ApprovalPolicy(
        approval=approval,
        key=approval_key,
        summary=summary,
        responders=who,
        expires=None if expires is None else seconds(f"Tool {tool!r}: expires", expires),
        on_expiry=on_expiry,
        remind=tuple(sorted(seconds(f"Tool {tool!r}: each of remind", each) for each in remind)),
    )
    if problem := _problem(policy):
        raise InvalidDeclaration(f"Tool {tool!r}: {problem}.")
    try:
        checked(policy.responders)
    except InvalidDeclaration as error:
        raise InvalidDeclaration(f"Tool {tool!r}: {error.message}") from None
    return policy


def seconds(what: str, time: object) -> float:
    """A duration in seconds; the error names `what` it is for."""
    given = time.total_seconds() if isinstance(time, timedelta) else time
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) <= _LONGEST:
        raise InvalidDeclaration(f"{what} is a number of seconds or a timedelta, at most 100 years; not {time!r}.")
    return float(given)


def takes(function: Callable[..., object], *arguments: object) -> bool:
    """Whether an author's function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        # Some functions written in C have no signature.
        return True
    return True


async def result_of(function: Callable[..., Any], *arguments: object) -> Any:
    """The result of an author's function, sync or async; everything that it raises becomes an `Exception`.

    It runs in the event loop of the worker. An exit in it would end the worker, and a cancellation in it would look
    like a cancellation of the activity.
    """
    try:
        returned = function(*arguments)
        return await returned if inspect.isawaitable(returned) else returned
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(described(error)) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("CancelledError: the function cancelled itself") from error


def _wrong_type(approval: object, key: object, summary: object, responders: object, remind: object) -> str | None:
    """A field of the wrong type. Authors without a type checker get the error here."""
    if callable(approval) and not takes(approval, None, None):
        return "an approval function is called with the call and the session: `def approval(call, session)`"
    if not callable(approval) and approval not in ("never", "once", "always"):
        return "approval is 'never', 'once', 'always' or a function"
    for name, function in (("approval_key", key), ("summary", summary)):
        if function is not None and not (callable(function) and takes(function, {})):
            return f"{name} is a function of the arguments, `lambda arguments: …`"
    if not isinstance(responders, Responders):
        return f"responders is what `responders.role('support')` or `responders.anyone()` returns, not {responders!r}"
    if not isinstance(remind, list | tuple):
        return "remind is a list of times"
    return None


def _problem(policy: ApprovalPolicy) -> str | None:
    if policy.approval == "never" and policy != OPEN:
        return "it never asks, so the other approval options have no effect; declare an approval"
    if policy.key and policy.approval != "once":
        return "an approval_key is what approval='once' remembers; nothing else does"
    if policy.on_expiry not in ("deny", "approve", "fail"):
        return "on_expiry is 'deny', 'approve' or 'fail'"
    if policy.expires is None and policy.on_expiry != "deny":
        return "on_expiry says what happens when `expires` has passed; say when that is"
    if policy.expires is not None and policy.expires <= 0:
        return "expires must be more than 0 seconds"
    if any(each <= 0 or (policy.expires is not None and each >= policy.expires) for each in policy.remind):
        return "reminders come after more than 0 seconds, and before the request expires"
    return None
