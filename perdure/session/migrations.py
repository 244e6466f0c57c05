"""Lifts values that older code wrote, one version at a time.

A shipped migrator is never edited; write the next one. A value that is newer than this code is refused:
to start with an empty state would lose the session silently.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from perdure.errors import UnreadableState
from perdure.protocol.wire import JsonObject

Migrator: TypeAlias = Callable[[JsonObject], JsonObject]


class Chain:
    """Migrators in order; the first lifts version 1 to 2."""

    def __init__(self, name: str, migrators: Sequence[Migrator] = ()) -> None:
        self._name = name
        self._migrators = tuple(migrators)

    @property
    def version(self) -> int:
        return len(self._migrators) + 1

    def lift(self, version: object, data: JsonObject) -> JsonObject:
        if not isinstance(version, int) or version < 1 or version > self.version:
            raise UnreadableState(
                f"The {self._name} has version {version!r}; this code reads versions 1 to {self.version}.",
                version=version,
            )
        for migrate in self._migrators[version - 1 :]:
            data = migrate(data)
        return data


SNAPSHOT = Chain("turn snapshot")
SESSION = Chain("session state")
