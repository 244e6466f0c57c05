"""What a driver says of itself, as the programs outside of it read that. No turn needs it."""

from typing import Any

from pydantic import ValidationError

from perdure.protocol.wire import Wire


class _Ref(Wire):
    id: str


class _Held(Wire):
    deliveries: tuple[_Ref, ...] = ()


class DriverView(Wire):
    """A driver's answer to the query `describe`. Another build may leave out fields, which then have defaults."""

    inbox: tuple[_Ref, ...] = ()
    seen: tuple[str, ...] = ()
    held: _Held | None = None
    in_turn: tuple[str, ...] = ()
    idle: bool = False
    turn: int = 0
    told: int | None = None
    head: int | None = None

    @property
    def holds(self) -> frozenset[str]:
        """The ids of the deliveries that the driver has not finished."""
        refs = [*self.inbox, *(self.held.deliveries if self.held else ())]
        return frozenset([*self.in_turn, *(ref.id for ref in refs)])

    @property
    def dropped(self) -> frozenset[str]:
        """The ids of the deliveries that the driver takes for done. Unknown, so empty, while it runs a turn."""
        return frozenset(self.seen) - self.holds if self.is_idle else frozenset()

    def is_behind(self, turns: int) -> bool:
        """Whether the session has begun more turns than the driver knows."""
        return self.is_idle and turns > (self.turn if self.told is None else self.told)

    @property
    def is_idle(self) -> bool:
        return self.idle and self.held is None


def read_view(state: Any) -> DriverView:
    try:
        return DriverView.model_validate(state)
    except ValidationError:
        return DriverView()
