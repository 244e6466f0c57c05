"""Sessions that wait for somebody cost nothing, and go on at once when they are answered."""

import asyncio
from dataclasses import replace

import pytest

from bench.plan import TINY
from bench.run import measure

FIFTY = replace(TINY, parked=50, idle_seconds=5.0)


@pytest.mark.slow
def test_fifty_sessions_wait_for_nothing_and_go_on_within_a_second() -> None:
    lines = asyncio.run(measure(FIFTY, ["parked"]))

    assert [line.verdict for line in lines if line.target] == ["ok", "ok"], lines
