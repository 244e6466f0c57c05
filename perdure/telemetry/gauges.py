"""Metrics of what is now: how much runs and waits, and how late the event loop is."""

from collections.abc import Mapping
from time import monotonic

from opentelemetry import metrics

from . import names
from .spans import in_seconds, meter

#: For how many seconds the numbers of a backlog are true enough.
_FRESH = 60.0
_LAGS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

_lag = in_seconds(names.LOOP_LAG, "By how much the event loop is late", _LAGS)


class _Level:
    """A gauge whose values are forgotten when they are not renewed: an old number would look like a new one."""

    def __init__(self, name: str, description: str) -> None:
        self._values: Mapping[str, int] = {}
        self._until = 0.0
        meter.create_observable_gauge(name, [self._observe], description=description)

    def set(self, values: Mapping[str, int]) -> None:
        self._values, self._until = values, monotonic() + _FRESH

    def _observe(self, _: metrics.CallbackOptions) -> list[metrics.Observation]:
        if monotonic() >= self._until:
            return []
        return [metrics.Observation(number, {names.STATUS: of} if of else None) for of, number in self._values.items()]


_levels = {
    names.SESSIONS: _Level(names.SESSIONS, "Sessions that have not ended, by status"),
    names.IN_NEED: _Level(names.IN_NEED, "Sessions that need attention"),
    names.OPEN_INPUTS: _Level(names.OPEN_INPUTS, "Requests that wait for people"),
    names.WAITING_DELIVERIES: _Level(names.WAITING_DELIVERIES, "Deliveries that no turn has read"),
}


def backlog(sessions: Mapping[str, int], in_need: int, open_inputs: int, deliveries: int) -> None:
    """How much runs and waits now."""
    _levels[names.SESSIONS].set(sessions)
    for name, number in (
        (names.IN_NEED, in_need),
        (names.OPEN_INPUTS, open_inputs),
        (names.WAITING_DELIVERIES, deliveries),
    ):
        _levels[name].set({"": number})


def loop_was_late(late: float) -> None:
    _lag.record(late)
