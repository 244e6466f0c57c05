"""Slices: ordered collections of values in the state of a session."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, cast

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError, to_json

from perdure.agents.context import ToolContext
from perdure.agents.state import Slot
from perdure.errors import InvalidDeclaration
from perdure.protocol.names import SLICE_PREFIX, is_slice
from perdure.protocol.wire import JsonObject

T = TypeVar("T")

#: Whether a failed tool and a rollback take back what was written: `state`, or keep it: `log`.
Policy: TypeAlias = Literal["state", "log"]

#: From the items of a slice and a new one to the next items.
Reducer: TypeAlias = Callable[[tuple[Any, ...], Any], tuple[Any, ...]]

#: The bytes of all items of a slice, as JSON: it is read and written as a whole.
LARGEST_SLICE = 1_048_576


class _Batch(Protocol):
    def __call__(self, items: tuple[Any, ...], new: Sequence[Any]) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class _Batched:
    """A reducer that adds many items in one pass: a pass for each of them would hold up the worker's loop."""

    many: _Batch

    def __call__(self, items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
        return self.many(items, (item,))


def append_all(items: tuple[T, ...], item: T) -> tuple[T, ...]:
    """Every item is kept, in order."""
    return (*items, item)


def replace_latest(items: tuple[T, ...], item: T) -> tuple[T, ...]:
    """Only the newest item is kept."""
    return (item,)


def upsert_by(key: Callable[[Any], Hashable]) -> Reducer:
    """An item takes the place of the one with the same key; the first with a key comes last."""

    def upsert(items: tuple[Any, ...], new: Sequence[Any]) -> tuple[Any, ...]:
        kept, places = list(items), dict[Hashable, list[int]]()
        for place, each in enumerate(items):
            places.setdefault(key(each), []).append(place)
        for item in new:
            found = places.setdefault(key(item), [])
            if not found:
                found.append(len(kept))
                kept.append(item)
            for place in found:
                kept[place] = item
        return tuple(kept)

    return _Batched(upsert)


def replace_latest_by(key: Callable[[Any], Hashable]) -> Reducer:
    """Of each key only the newest item is kept; the newest of all comes last."""

    def replace(items: tuple[Any, ...], new: Sequence[Any]) -> tuple[Any, ...]:
        latest = dict[Hashable, Any]()
        for item in new:
            mine = key(item)
            # Taken out first, so that it comes last.
            latest.pop(mine, None)
            latest[mine] = item
        return (*(each for each in items if key(each) not in latest), *latest.values())

    return _Batched(replace)


class Slice(Generic[T]):
    """An ordered collection of values of one type that lasts as long as the session.

    `FINDINGS = Slice("findings", Finding)`, then in a tool `await FINDINGS.add(ctx, Finding(…))`; or
    `@tool(into=FINDINGS)`, and the tool returns what is added. How an item is added says the `reducer`. Writes are
    committed with the outcome of their tool; those of tools that run at the same time are all kept. When a tool fails,
    its writes are dropped, and those of a slice with `policy="log"` are kept.

    Values are never changed in place: use frozen types. `version` and `migrate` are as for `State`; the function gets
    all items of a slice, as JSON.
    """

    def __init__(
        self,
        name: str,
        type: type[T] | Any,
        *,
        policy: Policy = "state",
        reducer: Reducer = append_all,
        version: int = 1,
        migrate: Mapping[int, Callable[[Any], Any]] | None = None,
    ) -> None:
        if not is_slice(f"{SLICE_PREFIX}{name}"):
            raise InvalidDeclaration(
                f"A slice cannot be named {name!r}: use 1 to 64 letters, digits, '_', '-' and '.'."
            )
        if policy not in ("state", "log"):
            raise InvalidDeclaration(f"Slice {name!r}: the policy is 'state' or 'log'; not {policy!r}.")
        if not callable(reducer):
            raise InvalidDeclaration(
                f"Slice {name!r}: the reducer is a function of the items and a new one: `reducer=upsert_by(key)`."
            )
        self.name = name
        self.policy = policy
        self._reducer = reducer
        self._item: TypeAdapter[T] = TypeAdapter(type)
        self._items: Slot[tuple[T, ...]] = Slot(
            f"{SLICE_PREFIX}{name}", tuple[type, ...], default=tuple, version=version, migrate=migrate
        )
        self._described: JsonObject = {"itemType": _name_of(type), "policy": policy}

    @property
    def slot(self) -> str:
        """The name of its slot."""
        return self._items.name

    async def all(self, ctx: ToolContext) -> tuple[T, ...]:
        """The items as this call sees them."""
        return await self._items.get(ctx)

    async def latest(self, ctx: ToolContext) -> T | None:
        """The last item."""
        items = await self.all(ctx)
        return items[-1] if items else None

    async def where(self, ctx: ToolContext, keep: Callable[[T], bool]) -> tuple[T, ...]:
        """The items for which `keep` is true."""
        return tuple(each for each in await self.all(ctx) if keep(each))

    async def add(self, ctx: ToolContext, *items: T) -> None:
        """Add the items as the reducer says."""

        await self._change(ctx, lambda before: _added(self._reducer, before, items))

    async def append(self, ctx: ToolContext, item: T) -> None:
        """Append the item, whatever the reducer says."""
        await self._change(ctx, lambda before: (*before, item))

    async def extend(self, ctx: ToolContext, items: "tuple[T, ...] | list[T]") -> None:
        """Append the items, whatever the reducer says."""
        more = tuple(items)
        await self._change(ctx, lambda before: (*before, *more))

    async def replace(self, ctx: ToolContext, items: "tuple[T, ...] | list[T]") -> None:
        """Keep these items and no others."""
        only = tuple(items)
        await self._change(ctx, lambda _: only)

    async def clear(self, ctx: ToolContext) -> None:
        """Keep no item."""
        await self._change(ctx, lambda _: ())

    async def add_result(self, ctx: ToolContext, result: Any) -> None:
        """Add what a tool has returned: an item, or a list of them. None adds nothing."""
        if result is None:
            return
        if isinstance(result, list | tuple) and not self._fits(result):
            await self.add(ctx, *cast("list[T]", result))
        else:
            await self.add(ctx, cast("T", result))

    def read(self, stored: JsonObject | None) -> tuple[T, ...]:
        """The items from their stored form."""
        return self._items.read(stored)

    def _fits(self, value: Any) -> bool:
        try:
            self._item.dump_python(value, mode="json", warnings="error")
        except (PydanticSerializationError, ValueError, TypeError):
            return False
        return True

    async def _change(self, ctx: ToolContext, change: Callable[[tuple[T, ...]], tuple[T, ...]]) -> None:
        def changed(stored: JsonObject | None) -> JsonObject:
            value = {**self._items.stored(tuple(change(self._items.read_for(ctx, stored)))), "slice": self._described}
            if len(to_json(value)) > LARGEST_SLICE:
                raise ValueError(f"The slice {self.name!r} would be larger than {LARGEST_SLICE} bytes.")
            return value

        await ctx.staging.change(self.slot, changed)


def _added(reducer: Reducer, before: tuple[Any, ...], items: tuple[Any, ...]) -> tuple[Any, ...]:
    if reducer is append_all:
        return (*before, *items)
    if isinstance(reducer, _Batched):
        return reducer.many(before, items)
    for item in items:
        before = reducer(before, item)
    return before


def _name_of(type: Any) -> str:
    return getattr(type, "__name__", None) or str(type)
