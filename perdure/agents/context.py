"""What tools are given: the session, the call, and the author's state, whose updates wait for the tool's outcome."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from perdure.errors import Invalid, Misconfigured, UnreadableState
from perdure.protocol.deliveries import MAIN, DispatchReceipt, Mode, Principal, QueueMode
from perdure.protocol.names import is_log
from perdure.protocol.wire import JsonObject

if TYPE_CHECKING:
    from .progress.checkpoints import Milestone
    from .progress.plan import Plan
    from .progress.slices import Slice
    from .state import Slot

#: Reads a slot: its stored value, or None, and its version (0: never written).
ReadSlot: TypeAlias = Callable[[str], Awaitable[tuple[JsonObject | None, int]]]
#: From the stored value of a slot to the next one.
Change: TypeAlias = Callable[[JsonObject | None], JsonObject]


@dataclass(frozen=True)
class StagedWrite:
    name: str
    value: JsonObject
    #: The version that `value` was computed from; None when it does not depend on one.
    expected: int | None


@dataclass
class _Staged:
    version: int
    current: JsonObject | None = None
    #: As it was read.
    before: JsonObject | None = None
    #: By `replace`; the stored value does not matter then.
    replaced: bool = False
    changes: list[Change] = field(default_factory=list[Change])


class Staging:
    """Reads see own writes. Changes are functions, so that they can be applied again to a newer value."""

    def __init__(self, read: ReadSlot) -> None:
        self._read = read
        self._slots: dict[str, _Staged] = {}
        # Set once a slot could not be read.
        self.unreadable: UnreadableState | None = None
        # The checkpoints that the tool has asked for.
        self.milestones: list[str] = []

    async def get(self, name: str) -> JsonObject | None:
        return (await self._slot(name)).current

    async def replace(self, name: str, value: JsonObject) -> None:
        # Not read first: the last writer wins, whatever the stored value is.
        staged = self._slots.setdefault(name, _Staged(version=0))
        staged.replaced, staged.current = True, value
        staged.changes.clear()

    async def change(self, name: str, change: Change) -> JsonObject:
        staged = await self._slot(name)
        value = change(staged.current)
        staged.changes.append(change)
        staged.current = value
        return value

    def writes(self) -> tuple[StagedWrite, ...]:
        return tuple(
            StagedWrite(name, staged.current, None if staged.replaced else staged.version)
            for name, staged in self._slots.items()
            if staged.current is not None and (staged.replaced or staged.changes)
        )

    def changed(self, name: str) -> tuple[JsonObject | None, JsonObject | None]:
        """The slot before the writes and after them."""
        staged = self._slots.get(name)
        return (staged.before, staged.current) if staged else (None, None)

    def kept_on_failure(self) -> "Staging":
        """Only the writes that stay although the tool has failed."""
        kept = Staging(self._read)
        kept._slots = {name: staged for name, staged in self._slots.items() if is_log(staged.current)}
        return kept

    async def rebase(self) -> None:
        """Another writer was first: read again, and apply the changes to the stored values."""
        for name, staged in self._slots.items():
            if not staged.replaced:
                value, staged.version = await self._read(name)
                staged.before = value
                for change in staged.changes:
                    value = change(value)
                staged.current = value

    async def _slot(self, name: str) -> _Staged:
        if name not in self._slots:
            value, version = await self._read(name)
            # Another coroutine of the same tool may have staged the slot while this one read.
            self._slots.setdefault(name, _Staged(version, value, value))
        return self._slots[name]


T = TypeVar("T")
V = TypeVar("V")

Log: TypeAlias = "logging.LoggerAdapter[logging.Logger]"


class Signal(Protocol):
    """A flag that is set at most once, such as `threading.Event` and `asyncio.Event`."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...


class Cancellation:
    """Whether a call should stop: its activity was cancelled, or it timed out. Thread-safe."""

    def __init__(self, outer: Signal) -> None:
        self._outer = outer
        self._own = Event()

    def is_set(self) -> bool:
        return self._own.is_set() or self._outer.is_set()

    def set(self) -> None:
        self._own.set()


@dataclass(frozen=True)
class SessionView:
    """A session as the author's code sees it."""

    id: str
    agent: str
    turn: int
    step: int
    auth: Principal
    mode: Mode = "conversation"
    parent: JsonObject | None = None
    # The session that it is a lane of.
    lane_of: str | None = None
    # The request of `Sessions.execute`.
    request: JsonObject = field(default_factory=dict[str, Any], compare=False)
    # The state of the session as its instructions see it, by slot; others get None.
    slots: Mapping[str, JsonObject | None] | None = field(default=None, repr=False, compare=False)

    def state(self, state: "Slot[V]") -> V:
        """The value of a state slot: `session.state(CART)`."""
        return state.read(self._slots.get(state.name))

    def items(self, slice: "Slice[V]") -> tuple[V, ...]:
        """The items of a slice: `session.items(FINDINGS)`."""
        return slice.read(self._slots.get(slice.slot))

    @property
    def plan(self) -> "Plan | None":
        """The plan; None: the model has made none."""
        from .progress.plan import PLAN

        return PLAN.read(self._slots.get(PLAN.name))

    @property
    def _slots(self) -> Mapping[str, JsonObject | None]:
        if self.slots is None:
            raise RuntimeError("The state of the session can be read in instructions, and by tools.")
        return self.slots


class ToolSession:
    """The session of a running tool."""

    def __init__(self, view: SessionView) -> None:
        self.id: Final = view.id
        self.agent: Final = view.agent
        self.turn: Final = view.turn
        self.step: Final = view.step
        self.auth: Final = view.auth
        self.parent: Final = view.parent
        self._lane_of = view.lane_of
        self._token: str | None = None

    @property
    def requested_token(self) -> str | None:
        """The continuation token that this call requested."""
        return self._token

    async def set_continuation_token(self, token: str) -> None:
        """Request another continuation token; the transaction that records the outcome of this call claims it."""
        if self.turn != 0:
            raise Invalid("A continuation token can only be chosen in the first turn of a session.")
        if self._lane_of is not None:
            raise Invalid("A lane has no continuation token: it is reached with that of its session.")
        if not token:
            raise Invalid("A continuation token cannot be empty.")
        self._token = token


def tool_log(tool: str, *, session_id: str, turn: int, step: int, call_id: str) -> Log:
    """The log of one call: its lines have these ids."""
    ids = {"session_id": session_id, "turn": turn, "step": step, "call_id": call_id, "tool": tool}
    return logging.LoggerAdapter(logging.getLogger(f"perdure.tools.{tool}"), ids)


class Dispatch(Protocol):
    """Accepts work for a session, as `Sessions.dispatch`. Its names are those of one owner and one agent."""

    async def __call__(
        self,
        agent: str,
        to: str,
        input: Any,
        *,
        dispatch_id: str,
        principal: Principal,
        lane: str = MAIN,
        queue_mode: QueueMode | None = None,
    ) -> DispatchReceipt: ...


class ToolContext:
    """The context of a call: a tool that declares a parameter of this type gets it."""

    def __init__(
        self,
        *,
        session: ToolSession,
        call_id: str,
        tool: str,
        idempotency_key: str,
        cancelled: Cancellation,
        staging: Staging,
        loop: asyncio.AbstractEventLoop,
        dispatch: Dispatch | None = None,
    ) -> None:
        self.session = session
        self.call_id = call_id
        self.tool = tool
        self.idempotency_key = idempotency_key
        self.cancelled = cancelled
        self.staging = staging
        # Not set while the tool runs in a thread: only the tool itself can end the thread.
        self.thread_ended = Event()
        self.thread_ended.set()
        self._loop = loop
        self._dispatch = dispatch
        self._dispatched = 0

    @property
    def log(self) -> Log:
        """A logger whose lines have the ids of the session, the turn, the step and the call."""
        at = self.session
        return tool_log(self.tool, session_id=at.id, turn=at.turn, step=at.step, call_id=self.call_id)

    async def dispatch(
        self,
        agent: str,
        to: str,
        input: Any,
        *,
        dispatch_id: str | None = None,
        lane: str = MAIN,
        queue_mode: QueueMode | None = None,
    ) -> DispatchReceipt:
        """Hand the input, which is plain JSON, to another session, and go on; it is accepted when this returns.

        `to`: the id of a session, or a name of yours for one, which is started if there is none. The session belongs
        to the caller of this one. Without a `dispatch_id`, the call has one for each dispatch that it makes, in order:
        a call that is tried again makes none twice. `lane`: the lane of the session; `queue_mode`: what the message
        does while that is busy, if not what the lane declares.
        """
        if self._dispatch is None:
            raise Misconfigured("Nothing can be dispatched here.")
        position, self._dispatched = self._dispatched, self._dispatched + 1
        key = dispatch_id or f"{self.idempotency_key}/{position}"
        return await self._dispatch(
            agent, to, input, dispatch_id=key, principal=self.session.auth, lane=lane, queue_mode=queue_mode
        )

    def checkpoint(self, milestone: "Milestone | str") -> None:
        """Keep the state of the session under this name, in the transaction that records the outcome of this call."""
        from .progress.checkpoints import Milestone

        named = milestone if isinstance(milestone, Milestone) else Milestone(milestone)
        if named.name not in self.staging.milestones:
            self.staging.milestones.append(named.name)

    def wait(self, awaitable: Awaitable[T]) -> T:
        """For tools that are not async: `cart = ctx.wait(CART.get(ctx))`."""

        async def result() -> T:
            return await awaitable

        if _running_loop() is self._loop:
            raise RuntimeError("ctx.wait() would block the loop that it waits for; use `await`.")
        return asyncio.run_coroutine_threadsafe(result(), self._loop).result()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
