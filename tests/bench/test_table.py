"""The table: ratios, targets, verdicts."""

import pytest

from bench.stats import quantile
from bench.table import Line, Target, markdown


def test_a_target_bounds_the_ratio_where_there_is_a_reference() -> None:
    line = Line("one session", "turn p50", "ms", 30.0, 20.0, Target("≤", 1.4))

    assert line.ratio == pytest.approx(1.5)
    assert line.verdict == "over"


def test_a_target_bounds_the_value_where_there_is_none() -> None:
    assert Line("event log", "publish p50", "ms", 12.0, target=Target("≤", 20)).verdict == "ok"


def test_a_rate_must_reach_its_target() -> None:
    assert Line("crowd", "turns per second", "/s", 35.0, 50.0, Target("≥", 0.7)).verdict == "ok"
    assert Line("crowd", "turns per second", "/s", 34.0, 50.0, Target("≥", 0.7)).verdict == "over"


def test_the_table_is_markdown() -> None:
    text = markdown([Line("crowd", "turns per second", "/s", 1234.5, 2000.0, Target("≥", 0.7))])

    head, rule, row = text.splitlines()
    assert head.startswith("| row   | what")
    assert set(rule) == {"|", "-", " "}
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "crowd",
        "turns per second",
        "2,000 /s",
        "1,234 /s",
        "0.62",
        "≥ 0.7×",
        "over",
    ]


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([5.0, 1.0, 4.0, 2.0, 3.0], 0.95) == 5.0
    assert quantile([7.0], 0.5) == 7.0
