"""Author state that lasts as long as the session."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast, overload

from pydantic import TypeAdapter, ValidationError

from perdure.errors import InvalidDeclaration
from perdure.protocol.wire import JsonObject

from .context import ToolContext

T = TypeVar("T")


class State(Generic[T]):
    """A named slot of session state.

    `CART = State("cart", Cart)`, then in a tool `await CART.update(ctx, lambda cart: cart.with_item(item))`.
    A tool's writes are committed together with its outcome, or not at all. An `update` that finds a newer value is
    applied again to that value; of two `set`s the last one wins.
    """

    @overload
    def __init__(self, name: str, type: type[T], *, default: Callable[[], T] | None = None) -> None: ...

    @overload
    def __init__(self, name: str, type: Any, *, default: Callable[[], T]) -> None: ...

    def __init__(self, name: str, type: Any, *, default: Callable[[], T] | None = None) -> None:
        if not name or name.startswith("perdure."):
            raise InvalidDeclaration(f"A state slot cannot be named {name!r}.")
        self.name = name
        self._adapter: TypeAdapter[T] = TypeAdapter(type)
        if default is None and not callable(type):
            raise InvalidDeclaration(f"State {name!r} needs a default: its type cannot be called to make one.")
        self._default = cast("Callable[[], T]", default or type)

    async def get(self, ctx: ToolContext) -> T:
        """The value as this call sees it."""
        return self.read(await ctx.staging.get(self.name))

    async def set(self, ctx: ToolContext, value: T) -> None:
        """Replace the value, whatever it is."""
        await ctx.staging.replace(self.name, self._stored(value))

    async def update(self, ctx: ToolContext, change: Callable[[T], T]) -> T:
        """Replace the value by the result of `change`. `change` may run more than once."""
        return self.read(await ctx.staging.change(self.name, lambda stored: self._stored(change(self.read(stored)))))

    def read(self, stored: JsonObject | None) -> T:
        """The value from its stored form; a new default each time when there is none."""
        return self._default() if stored is None else self._adapter.validate_python(stored["value"])

    def _stored(self, value: T) -> JsonObject:
        try:
            dumped = self._adapter.dump_python(value, mode="json", warnings="error")
            # A change in place returns None, which must not be stored as the value.
            self._adapter.validate_python(dumped)
        except (ValidationError, ValueError, TypeError) as wrong:
            raise TypeError(f"State {self.name!r} cannot hold {value!r}: {wrong}") from None
        return {"value": dumped}
