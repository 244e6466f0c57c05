"""A collector that accepts connections and never answers."""

import time
from collections.abc import Generator

import pytest

from tests.support.plugin import StackFactory
from tests.support.sockets import BlackHole
from tests.support.stack import Stack

#: Seconds until a process must have ended: the grace period of uvicorn, and that of the last spans.
_ENDED = 15.0


@pytest.fixture
def black_hole() -> Generator[str]:
    with BlackHole() as hole:
        yield f"http://{hole.address}"


async def test_a_collector_that_does_not_answer_costs_no_turn_and_no_shutdown(
    make_stack: StackFactory, black_hole: str
) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": black_hole,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_METRIC_EXPORT_INTERVAL": "100",
        "PERDURE_TELEMETRY_CONTENT": "traces,logs",
    }
    stack = make_stack(environment=environment)
    plain = make_stack()

    async def seconds_of(talking: Stack) -> float:
        best = float("inf")
        for _ in range(5):
            began = time.monotonic()
            async with talking.talk() as talk:
                await talk.say("hello")
            best = min(best, time.monotonic() - began)
        return best

    observed, unobserved = await seconds_of(stack), await seconds_of(plain)
    codes = [process.terminate(_ENDED) for process in (*stack.workers, *stack.apis)]

    assert observed < unobserved + 2
    assert codes == [0, 0]
