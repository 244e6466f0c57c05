"""When somebody has to agree before a tool runs, who that is, and what silence means."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from perdure.errors import InvalidDeclaration
from perdure.protocol.inputs import Consequence, Responders
from perdure.protocol.wire import JsonObject
from perdure.text import described

from .context import SessionView
from .responders import checked


@dataclass(frozen=True)
class Call:
    """A call that the model asks for: what an approval decides about."""

    id: str
    tool: str
    #: Those that will run: validated, of the types that the tool declares, with the defaults of what was left out.
    arguments: JsonObject


@dataclass(frozen=True)
class Decision:
    """What an approval function may answer beside True (ask) and False (run)."""

    kind: Literal["allow", "ask", "deny"]
    #: Shown to whoever is asked.
    prompt: str | None = None
    #: Told to the model.
    reason: str | None = None

    @classmethod
    def allow(cls) -> "Decision":
        """Run the call without asking, as False does."""
        return cls("allow")

    @classmethod
    def ask(cls, prompt: str | None = None) -> "Decision":
        """Ask somebody, as True does; `prompt` is what they read instead of the summary."""
        return cls("ask", prompt=prompt)

    @classmethod
    def deny(cls, reason: str) -> "Decision":
        """Refuse the call; the model is told why."""
        return cls("deny", reason=reason)


Verdict: TypeAlias = bool | Decision
#: When somebody has to agree before the tool runs.
Approval: TypeAlias = Literal["never", "once", "always"] | Callable[[Call, SessionView], Verdict | Awaitable[Verdict]]
Describe: TypeAlias = Callable[[JsonObject], str | Awaitable[str]]
Seconds: TypeAlias = float | timedelta

#: Seconds. What Temporal counts in nanoseconds ends after three centuries, and a workflow cannot refuse it any more.
_LONGEST = 36_525 * 86_400


@dataclass(frozen=True)
class ApprovalPolicy:
    """What stands between a call and its run."""

    approval: Approval = "never"
    #: For `once`: an approval is remembered for this key; without it, for the tool.
    key: Describe | None = None
    #: What the call would do, in words for whoever is asked.
    summary: Describe | None = None
    responders: Responders = field(default_factory=Responders)
    #: Seconds until silence means `on_expiry`.
    expires: float | None = None
    on_expiry: Consequence = "deny"
    #: Seconds after which somebody should be reminded.
    remind: tuple[float, ...] = ()


#: Runs without asking.
OPEN = ApprovalPolicy()
#: Asks each time.
CLOSED = ApprovalPolicy("always")


def gate(
    tool: str,
    approval: Approval,
    approval_key: Describe | None,
    summary: Describe | None,
    responders: Responders | None,
    expires: Seconds | None,
    on_expiry: Consequence,
    remind: Sequence[Seconds],
) -> ApprovalPolicy:
    """The gate as declared, if it can work."""
    asked = Responders() if responders is None else responders
    if problem := _misused(approval, approval_key, summary, asked, remind):
        raise InvalidDeclaration(f"Tool {tool!r}: {problem}.")
    made = ApprovalPolicy(
        approval=approval,
        key=approval_key,
        summary=summary,
        responders=asked,
        expires=None if expires is None else seconds(f"Tool {tool!r}: expires", expires),
        on_expiry=on_expiry,
        remind=tuple(sorted(seconds(f"Tool {tool!r}: each of remind", each) for each in remind)),
    )
    problem = _problem(made, declared=made != ApprovalPolicy(approval))
    if problem:
        raise InvalidDeclaration(f"Tool {tool!r}: {problem}.")
    try:
        checked(made.responders)
    except InvalidDeclaration as unanswerable:
        raise InvalidDeclaration(f"Tool {tool!r}: {unanswerable.message}") from None
    return made


def seconds(what: str, time: object) -> float:
    """A time as an author says it; `what` it is for is named when it is none."""
    given = time.total_seconds() if isinstance(time, timedelta) else time
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) <= _LONGEST:
        raise InvalidDeclaration(f"{what} is a number of seconds or a timedelta, at most 100 years; not {time!r}.")
    return float(given)


def takes(function: Callable[..., object], *arguments: object) -> bool:
    """Whether a function of the author's can be called like this."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        # Some functions written in C do not tell.
        return True
    return True


async def result_of(function: Callable[..., Any], *arguments: object) -> Any:
    """What a function of the author's returns, sync or async; whatever it raises is an `Exception`.

    It runs where all sessions of a worker are served: an exit of its own would end the worker, and a cancellation of
    its own would look like one of the activity.
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


def _misused(approval: object, key: object, summary: object, responders: object, remind: object) -> str | None:
    """What is not even of the right kind: authors without a type checker hear of it here."""
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


def _problem(gate: ApprovalPolicy, declared: bool) -> str | None:
    if gate.approval == "never" and declared:
        return "it asks nobody, so nothing about the asking can be said; declare an approval"
    if gate.key and gate.approval != "once":
        return "an approval_key is what approval='once' remembers; nothing else does"
    return _untimely(gate)


def _untimely(gate: ApprovalPolicy) -> str | None:
    if gate.on_expiry not in ("deny", "approve", "fail"):
        return "on_expiry is 'deny', 'approve' or 'fail'"
    if gate.expires is None and gate.on_expiry != "deny":
        return "on_expiry says what happens when `expires` has passed; say when that is"
    if gate.expires is not None and gate.expires <= 0:
        return "expires must be more than 0 seconds"
    if any(each <= 0 or (gate.expires is not None and each >= gate.expires) for each in gate.remind):
        return "reminders come after more than 0 seconds, and before the request expires"
    return None
