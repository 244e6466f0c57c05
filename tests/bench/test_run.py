"""A whole run with tiny counts: everything starts, is measured, and ends; and what a turn costs Temporal."""

import asyncio

import pytest

from bench.plan import TINY
from bench.run import ALL, measure
from bench.table import Line


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    return asyncio.run(measure(TINY, ALL))


def test_every_row_is_measured(lines: list[Line]) -> None:
    talking = {"one session", "one session, inline", "3 sessions", "3 sessions, inline", "4 sessions, inline"}
    old = {"growth", "3 sessions, 2 active, 3 turns each"}
    assert {line.row for line in lines} == talking | old | {
        "event log",
        "fork",
        "compaction",
        "3 parked",
        "3 asking",
        "wake",
    }
    # A turn or two may take less processor time than the kernel counts.
    measured = [line for line in lines if not line.what.startswith("processor time")]
    assert all(line.value > 0 for line in measured if line.unit in ("ms", "/s", "B", "MiB"))
    assert all(line.reference for line in lines if line.reference is not None)


@pytest.mark.parametrize("what", ["signals per turn", "child workflows per turn", "activities per text turn"])
def test_a_text_turn_costs_one_of_each(lines: list[Line], what: str) -> None:
    assert [line.value for line in lines if line.what == what] == [1]


def test_a_step_costs_temporal_the_same_bytes_however_long_the_turn_is(lines: list[Line]) -> None:
    [ratio] = [line.ratio for line in lines if line.what.startswith("Temporal bytes of a tool round")]

    # On a busy machine the short turn costs some more, for decisions that were started twice.
    assert ratio is not None
    assert ratio < 1.1


def test_a_turn_costs_temporal_the_same_bytes_however_old_the_session_is(lines: list[Line]) -> None:
    [ratio] = [line.ratio for line in lines if line.what.startswith("Temporal bytes per turn")]

    assert ratio == pytest.approx(1, abs=0.1)
