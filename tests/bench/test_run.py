"""A whole run with tiny counts: everything starts, is measured, and ends; and what a turn costs Temporal.

Each row has a product of its own. Rows that differ in their counts alone, or in how turns run, are measured by
`make chaos`; so is the run of all rows.
"""

import asyncio
from collections.abc import Sequence

import pytest

from bench.plan import TINY
from bench.run import ALL, measure
from bench.table import Line

#: What each row is called with the tiny counts.
NAMES = {
    "session": {"one session"},
    "inline": {"one session, inline"},
    "crowd": {"3 sessions"},
    "inline-crowd": {"3 sessions, inline"},
    "busy": {"4 sessions, inline"},
    "growth": {"growth"},
    "log": {"event log"},
    "fork": {"fork"},
    "compaction": {"compaction"},
    "idle": {"3 parked"},
    "parked": {"3 asking"},
    "wake": {"wake"},
    "children": {"children"},
    "code": {"code"},
    "plans": {"plans"},
    "checkpoints": {"checkpoints"},
    "runs": {"runs"},
    "readers": {"readers"},
    "deliveries": {"deliveries"},
    "console": {"console"},
    "restart": {"3 sessions, 2 active, 3 turns each"},
}
SOME = ("session", "growth", "log", "fork", "checkpoints", "readers")


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    return asyncio.run(measure(TINY, SOME))


def test_every_row_is_measured(lines: list[Line]) -> None:
    is_measured(SOME, lines)


@pytest.mark.slow
async def test_a_run_measures_all_rows() -> None:
    is_measured(ALL, await measure(TINY, ALL))


def is_measured(rows: Sequence[str], lines: list[Line]) -> None:
    assert {line.row for line in lines} == set().union(*(NAMES[row] for row in rows))
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
