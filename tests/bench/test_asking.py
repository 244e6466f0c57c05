"""Sessions that wait for people cost nothing, and continue at once when they are answered."""

import asyncio
from dataclasses import replace

import pytest

from bench.plan import TINY
from bench.run import measure

FIFTY = replace(TINY, parked=50, idle_seconds=5.0)


@pytest.mark.slow
def test_fifty_sessions_wait_for_nothing_and_continue_within_a_second() -> None:
    lines = asyncio.run(measure(FIFTY, ["parked"]))

    assert [line.verdict for line in lines if line.target] == ["ok", "ok"], lines
