"""One trace from HTTP to the tools, and no content in it."""

import uuid
from collections.abc import Generator

import pytest

from tests.support.collector import Collector, Seen
from tests.support.plugin import StackFactory
from tests.support.processes import wait_until
from tests.support.stack import Stack

EXPECTED = {"POST /eve/v1/session", "invoke_agent demo", "chat demo", "execute_tool roll_dice"}
SECRET_WORDS = "the swordfish swims at midnight"


@pytest.fixture(scope="module")
def collector() -> Generator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def exporting(module_stack: StackFactory, collector: Collector) -> Stack:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
    }
    return module_stack(environment=environment)


async def spans_of_a_turn(stack: Stack, collector: Collector) -> dict[str, Seen]:
    trace = uuid.uuid4().hex
    async with stack.talk() as talk:
        talk.http.headers["traceparent"] = f"00-{trace}-b7ad6b7169203331-01"
        await talk.create(f"roll the dice, {SECRET_WORDS}")
        await talk.until_boundary()

    def arrived() -> dict[str, Seen]:
        return {span.name: span for span in collector.spans if span.trace == trace}

    wait_until(lambda: arrived().keys() >= EXPECTED, "the spans of the turn")
    return arrived()


async def test_a_turn_is_one_trace_from_http_to_the_tools(exporting: Stack, collector: Collector) -> None:
    spans = await spans_of_a_turn(exporting, collector)

    post, turn = spans["POST /eve/v1/session"], spans["invoke_agent demo"]
    assert turn.parent == post.id
    assert spans["chat demo"].parent == turn.id
    assert spans["execute_tool roll_dice"].parent == turn.id
    assert {post.service, turn.service} == {"perdure-api", "perdure-worker"}


async def test_spans_name_what_was_done_and_have_no_content_of_messages(exporting: Stack, collector: Collector) -> None:
    spans = await spans_of_a_turn(exporting, collector)

    assert spans["chat demo"].attributes["gen_ai.usage.output_tokens"] > 0
    assert spans["execute_tool roll_dice"].attributes["gen_ai.tool.name"] == "roll_dice"
    assert not [span.name for span in collector.spans if "swordfish" in span.raw]


async def test_turns_steps_tokens_and_latencies_are_measured(exporting: Stack, collector: Collector) -> None:
    await spans_of_a_turn(exporting, collector)

    expected = {
        "perdure.turns",
        "perdure.steps",
        "perdure.tool_calls",
        "perdure.streams.open",
        "gen_ai.client.inference.usage.input_tokens",
        "gen_ai.client.inference.duration",
        "http.server.request.duration",
    }
    wait_until(lambda: expected <= collector.metrics, "the metrics")
