"""State writes of one tool call, staged until the call has an outcome."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from perdure.protocol.wire import JsonObject

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
    base: JsonObject | None
    version: int
    current: JsonObject | None = None
    #: The value of `replace`; the stored value does not matter then.
    replaced: JsonObject | None = None
    changes: list[Change] = field(default_factory=list[Change])

    def compute(self) -> None:
        value = self.base if self.replaced is None else self.replaced
        for change in self.changes:
            value = change(value)
        self.current = value


class Staging:
    """Reads see own writes. Changes are functions, so that they can be applied again to a newer value."""

    def __init__(self, read: ReadSlot) -> None:
        self._read = read
        self._slots: dict[str, _Staged] = {}

    async def get(self, name: str) -> JsonObject | None:
        return (await self._slot(name)).current

    async def replace(self, name: str, value: JsonObject) -> None:
        # Not read first: the last writer wins, whatever the stored value is.
        staged = self._slots.setdefault(name, _Staged(base=None, version=0))
        staged.replaced = staged.current = value
        staged.changes.clear()

    async def change(self, name: str, change: Change) -> JsonObject:
        staged = await self._slot(name)
        value = change(staged.current)
        staged.changes.append(change)
        staged.current = value
        return value

    def writes(self) -> tuple[StagedWrite, ...]:
        return tuple(
            StagedWrite(name, staged.current, None if staged.replaced is not None else staged.version)
            for name, staged in self._slots.items()
            if staged.current is not None and (staged.replaced is not None or staged.changes)
        )

    async def rebase(self) -> None:
        """Another writer was first: read again, and apply the changes to the stored values."""
        for name, staged in self._slots.items():
            if staged.replaced is None:
                staged.base, staged.version = await self._read(name)
                staged.compute()

    async def _slot(self, name: str) -> _Staged:
        if name not in self._slots:
            base, version = await self._read(name)
            # Another coroutine of the same tool may have staged the slot while this one read.
            self._slots.setdefault(name, _Staged(base=base, version=version, current=base))
        return self._slots[name]
