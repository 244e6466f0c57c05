"""Author state that lasts as long as the session."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast, overload
from weakref import WeakSet

from pydantic import TypeAdapter, ValidationError

from perdure.errors import InvalidDeclaration, UnreadableState
from perdure.protocol.wire import JsonObject

from .context import ToolContext

T = TypeVar("T")


class Slot(Generic[T]):
    """A value of a session in the store: how it is read, lifted and written."""

    def __init__(
        self,
        name: str,
        type: Any,
        *,
        default: Callable[[], T] | None = None,
        version: int = 1,
        migrate: Mapping[int, Callable[[Any], Any]] | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self._migrators = _checked_migrators(name, version, {} if migrate is None else migrate)
        self._adapter: TypeAdapter[T] = TypeAdapter(type)
        if default is None and not callable(type):
            raise InvalidDeclaration(f"State {name!r} needs a default: its type cannot be called to make one.")
        self._default = cast("Callable[[], T]", default or type)
        _DECLARED.setdefault(name, WeakSet()).add(self)

    async def get(self, ctx: ToolContext) -> T:
        """The value as this call sees it."""
        return self.read_for(ctx, await ctx.staging.get(self.name))

    async def set(self, ctx: ToolContext, value: T) -> None:
        """Replace the value, whatever it is."""
        stored = self.stored(value)
        # A value that only newer code can read is not replaced.
        self.read_for(ctx, await ctx.staging.get(self.name))
        await ctx.staging.replace(self.name, stored)

    async def update(self, ctx: ToolContext, change: Callable[[T], T]) -> T:
        """Replace the value by the result of `change`. `change` may run more than once."""

        def changed(stored: JsonObject | None) -> JsonObject:
            return self.stored(change(self.read_for(ctx, stored)))

        return self.read_for(ctx, await ctx.staging.change(self.name, changed))

    def read(self, stored: JsonObject | None) -> T:
        """The value from its stored form; a new default each time when there is none."""
        if stored is None:
            return self._default()
        # Values without a version are of version 1: they may be older than versions.
        if "version" not in stored and "value" in stored:
            return self.lift(stored["value"])
        return self.lift(stored.get("data"), version=stored.get("version"))

    def lift(self, value: Any, version: Any = 1) -> T:
        """The value of this version, as JSON, in today's type: what a session gets that has stored it."""
        if not _is_version(version) or version > self.version:
            raise UnreadableState(
                f"The state {self.name!r} has version {version!r}; this code reads versions 1 to {self.version}.",
                newer=True,
            )
        try:
            for migrate in self._migrators[version - 1 :]:
                value = migrate(value)
            return self._adapter.validate_python(value)
        # SystemExit, too: an author's code must not be able to end the worker.
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            what = "could not be lifted" if version < self.version else "does not fit its type"
            raise UnreadableState(
                f"The state {self.name!r} of version {version} {what}: {type(error).__name__}."
            ) from error

    def read_for(self, ctx: ToolContext, stored: JsonObject | None) -> T:
        """As `read`, for a call: a value that cannot be read ends it."""
        try:
            return self.read(stored)
        except UnreadableState as unreadable:
            # The tool must not be able to continue without its state, even if it catches this.
            ctx.staging.unreadable = unreadable
            raise

    def stored(self, value: T) -> JsonObject:
        """The stored form of the value; `TypeError` if it has none."""
        try:
            dumped = self._adapter.dump_python(value, mode="json", warnings="error")
            # A change in place returns None, which must not be stored as the value.
            self._adapter.validate_python(dumped)
        except (ValidationError, ValueError, TypeError) as wrong:
            raise TypeError(f"State {self.name!r} cannot hold {value!r}: {wrong}") from None
        # Code from before versions finds no value in a later version, and fails instead of misreading it.
        return {"value": dumped} if self.version == 1 else {"version": self.version, "data": dumped}


class State(Slot[T]):
    """A named slot of session state.

    `CART = State("cart", Cart)`, then in a tool `await CART.update(ctx, lambda cart: cart.with_item(item))`.
    A tool's writes are committed together with its outcome, or not at all. An `update` that finds a newer value is
    applied again to that value; of two `set`s the last one wins.

    Values live as long as their sessions. When the type changes so that old values do not fit it, raise the `version`,
    and `migrate` each older one: `State("cart", Cart, version=2, migrate={1: function})`. The function makes of a value
    of version 1, as JSON, one of version 2. A value of a newer version waits for a worker that knows it.
    """

    @overload
    def __init__(
        self,
        name: str,
        type: type[T],
        *,
        default: Callable[[], T] | None = None,
        version: int = 1,
        migrate: Mapping[int, Callable[[Any], Any]] | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        name: str,
        type: Any,
        *,
        default: Callable[[], T],
        version: int = 1,
        migrate: Mapping[int, Callable[[Any], Any]] | None = None,
    ) -> None: ...

    def __init__(
        self,
        name: str,
        type: Any,
        *,
        default: Callable[[], T] | None = None,
        version: int = 1,
        migrate: Mapping[int, Callable[[Any], Any]] | None = None,
    ) -> None:
        if not name or name.startswith("perdure."):
            raise InvalidDeclaration(f"A state slot cannot be named {name!r}.")
        super().__init__(name, type, default=default, version=version, migrate=migrate)


#: The slots that this process declares. Agents of one process may use one name for different slots.
_DECLARED: dict[str, WeakSet[Slot[Any]]] = {}


def declared_names() -> list[str]:
    """The names of the slots that this process declares."""
    return [name for name, states in _DECLARED.items() if states]


def check_readable(name: str, stored: JsonObject | None) -> None:
    """Raise `UnreadableState` if none of the declared slots of this name can read the stored value.

    That a value of today's version fits its type is not checked.
    """
    versions = {state.version for state in list(_DECLARED.get(name, ()))}
    if stored is not None and stored.get("version", 1) not in versions:
        check_fits(name, stored)


def check_fits(name: str, stored: JsonObject | None) -> None:
    """Raise `UnreadableState` if none of the declared slots of this name makes a value of what is stored."""
    found: UnreadableState | None = None
    for state in list(_DECLARED.get(name, ())):
        try:
            state.read(stored)
        except UnreadableState as unreadable:
            found = unreadable
        else:
            return
    if found is not None:
        raise found


def _checked_migrators(
    name: str, version: object, migrate: Mapping[int, Callable[[Any], Any]]
) -> tuple[Callable[[Any], Any], ...]:
    """The migrators in order; the first one lifts version 1 to 2."""
    if not _is_version(version):
        raise InvalidDeclaration(f"State {name!r}: the version is a whole number, at least 1; not {version!r}.")
    if not isinstance(cast("object", migrate), Mapping):
        raise InvalidDeclaration(f"State {name!r}: write migrate={{1: function}}, one function for each older version.")
    for number, function in migrate.items():
        if not _is_version(number) or number >= cast("int", version):
            raise InvalidDeclaration(
                f"State {name!r} has version {version}, so nothing is migrated from {number!r}: "
                f"remove that migrator, or raise the version."
            )
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise InvalidDeclaration(
                f"State {name!r}: migrate={{{number}: function}} takes a plain function of the stored JSON, "
                f"not {function!r}."
            )
    for number in range(1, cast("int", version)):
        if number not in migrate:
            raise InvalidDeclaration(
                f"State {name!r} has version {version} and cannot lift version {number}: "
                f"add migrate={{{number}: function}}."
            )
    return tuple(migrate[number] for number in range(1, cast("int", version)))


def _is_version(version: object) -> bool:
    return isinstance(version, int) and not isinstance(version, bool) and version >= 1
