"""When somebody has to agree before a tool runs, who that is, and what silence means."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias

from perdure.errors import InvalidDeclaration
from perdure.protocol.inputs import Consequence, Responders
from perdure.protocol.wire import JsonObject

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
        return cls("allow")

    @classmethod
    def ask(cls, prompt: str | None = None) -> "Decision":
        return cls("ask", prompt=prompt)

    @classmethod
    def deny(cls, reason: str) -> "Decision":
        return cls("deny", reason=reason)


Verdict: TypeAlias = bool | Decision
#: When somebody has to agree before the tool runs.
Approval: TypeAlias = Literal["never", "once", "always"] | Callable[[Call, SessionView], Verdict | Awaitable[Verdict]]
Describe: TypeAlias = Callable[[JsonObject], str]
Seconds: TypeAlias = float | timedelta


@dataclass(frozen=True)
class Gate:
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
OPEN = Gate()
#: Asks each time.
CLOSED = Gate("always")


def gate(
    tool: str,
    approval: Approval,
    approval_key: Describe | None,
    summary: Describe | None,
    responders: Responders | None,
    expires: Seconds | None,
    on_expiry: Consequence,
    remind: Sequence[Seconds],
) -> Gate:
    """The gate as declared, if it can work."""
    made = Gate(
        approval=approval,
        key=approval_key,
        summary=summary,
        responders=responders or Responders(),
        expires=None if expires is None else seconds(expires),
        on_expiry=on_expiry,
        remind=tuple(sorted(seconds(each) for each in remind)),
    )
    problem = _problem(made, declared=made != Gate(approval))
    if problem:
        raise InvalidDeclaration(f"Tool {tool!r}: {problem}.")
    try:
        checked(made.responders)
    except InvalidDeclaration as unanswerable:
        raise InvalidDeclaration(f"Tool {tool!r}: {unanswerable.message}") from None
    return made


def seconds(time: Seconds) -> float:
    return time.total_seconds() if isinstance(time, timedelta) else float(time)


def _problem(gate: Gate, declared: bool) -> str | None:
    if gate.approval not in ("never", "once", "always") and not callable(gate.approval):
        return "approval is 'never', 'once', 'always' or a function"
    if gate.approval == "never" and declared:
        return "it asks nobody, so nothing about the asking can be said; declare an approval"
    if gate.key and gate.approval != "once":
        return "an approval_key is what approval='once' remembers; nothing else does"
    return _untimely(gate)


def _untimely(gate: Gate) -> str | None:
    if gate.on_expiry not in ("deny", "approve", "fail"):
        return "on_expiry is 'deny', 'approve' or 'fail'"
    if gate.expires is None and gate.on_expiry != "deny":
        return "on_expiry says what happens when `expires` has passed; say when that is"
    if gate.expires is not None and gate.expires <= 0:
        return "expires must be more than 0 seconds"
    if any(each <= 0 or (gate.expires is not None and each >= gate.expires) for each in gate.remind):
        return "reminders come after more than 0 seconds, and before the request expires"
    return None
