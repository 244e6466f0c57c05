"""What an operator chooses: the names, the destinations of content, and how users are named."""

from collections.abc import Generator

import pytest

from perdure.errors import Invalid
from perdure.settings import read_settings
from perdure.telemetry import setup, spans
from perdure.telemetry.spans import Choices, Destination
from tests.support.collector import Collector
from tests.support.plugin import StackFactory
from tests.support.processes import wait_until
from tests.telemetry.observed import KEYS, Traced, api_keys, lines, observed, points

MARKERS = ("swordfish", "walrus", "7777777")
#: The user's message, the arguments of a call and, with the agent's instructions, all that the markers are in.
SAID = 'call add {"a": 7777777, "b": 1} then say swordfish'


@pytest.fixture
def collector() -> Generator[Collector]:
    with Collector() as collector:
        yield collector


def marked(text: str) -> list[str]:
    return [marker for marker in MARKERS if marker in text]


async def test_by_default_no_content_leaves_the_process(make_stack: StackFactory, collector: Collector) -> None:
    stack = observed(make_stack, collector)

    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await caller.says(SAID)
        caller.span("invoke_agent boss")
    points(collector, "gen_ai.execute_tool.duration")

    assert not [span.name for span in collector.spans if marked(span.raw)]
    assert not [text for text in collector.raw_metrics if marked(text)]
    assert not collector.lines


async def test_content_for_traces_is_in_spans_only(make_stack: StackFactory, collector: Collector) -> None:
    stack = observed(make_stack, collector, PERDURE_TELEMETRY_CONTENT="traces")

    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await caller.says(SAID)
        caller.span("invoke_agent boss")
        first, last = caller.spans("chat scripted", 2)
        tool = caller.span("execute_tool add")
    points(collector, "gen_ai.execute_tool.duration")

    assert marked(first.attributes["gen_ai.system_instructions"]) == ["walrus"]
    assert marked(last.attributes["gen_ai.output.messages"]) == ["swordfish"]
    assert '"type":"tool_call_response"' in last.attributes["gen_ai.input.messages"]
    assert marked(tool.attributes["gen_ai.tool.call.arguments"]) == ["7777777"]
    assert tool.attributes["gen_ai.tool.call.result"] == "7777778"
    assert not [text for text in collector.raw_metrics if marked(text)]
    assert not collector.lines


async def test_content_for_logs_is_in_events_only(make_stack: StackFactory, collector: Collector) -> None:
    stack = observed(make_stack, collector, PERDURE_TELEMETRY_CONTENT="logs")

    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await caller.says(SAID)
        caller.span("invoke_agent boss")
    [tool] = lines(collector, "perdure.execute_tool.operation.details")
    said = lines(collector, "gen_ai.client.inference.operation.details")
    points(collector, "gen_ai.execute_tool.duration")

    assert said[0].attributes["gen_ai.conversation.id"] == talk.session_id
    assert marked(said[0].attributes["gen_ai.input.messages"]) == ["swordfish", "7777777"]
    assert marked(tool.attributes["gen_ai.tool.call.arguments"]) == ["7777777"]
    assert not [span.name for span in collector.spans if marked(span.raw)]
    assert not [text for text in collector.raw_metrics if marked(text)]


async def test_content_is_bounded_in_size(make_stack: StackFactory, collector: Collector) -> None:
    stack = observed(make_stack, collector, PERDURE_TELEMETRY_CONTENT="traces", PERDURE_TELEMETRY_CONTENT_BYTES="256")

    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await caller.says("say Hello")
        await caller.says(f"say {'swordfish ' * 3_000}")
        await caller.says("say Goodbye")
        chats = caller.spans("chat scripted", 3)

    assert all(
        len(chat.attributes[name]) <= 256
        for chat in chats
        for name in ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions")
    )
    assert marked(chats[1].attributes["gen_ai.output.messages"]) == ["swordfish"]
    assert "say Goodbye" in chats[2].attributes["gen_ai.input.messages"]
    assert chats[2].attributes["perdure.content.left_out"] > 0


async def test_both_sets_of_names_can_be_emitted(make_stack: StackFactory, collector: Collector) -> None:
    stack = observed(make_stack, collector, PERDURE_TELEMETRY_NAMES="both")

    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await caller.says(SAID)
        chat = caller.spans("chat scripted", 2)[0]

    assert points(collector, "gen_ai.client.token.usage", gen_ai__token__type="output")
    assert points(collector, "gen_ai.client.inference.usage.output_tokens")
    for metric in ("gen_ai.client.operation.duration", "gen_ai.client.inference.duration"):
        wait_until(lambda metric=metric: points(collector, metric)[-1].number == 2, f"two of {metric}")
    assert points(collector, "perdure.tool.duration")
    assert points(collector, "gen_ai.execute_tool.duration")
    assert {
        "gen_ai.usage.cache_write.input_tokens",
        "gen_ai.usage.cache_creation.input_tokens",
    } <= chat.attributes.keys()


async def test_the_names_of_1_41_are_emitted_alone(make_stack: StackFactory, collector: Collector) -> None:
    stack = observed(make_stack, collector, PERDURE_TELEMETRY_NAMES="v1.41")

    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await caller.says(SAID)
        chat = caller.spans("chat scripted", 2)[0]
    points(collector, "perdure.tool.duration")

    assert points(collector, "gen_ai.client.operation.time_to_first_chunk")
    assert "gen_ai.usage.cache_creation.input_tokens" in chat.attributes
    newer = ("gen_ai.client.inference", "gen_ai.invoke_agent", "gen_ai.execute_tool")
    assert not [name for name in collector.metrics if name.startswith(newer)]


@pytest.mark.parametrize(("users", "named"), [("off", set[str]()), ("hash", {"user.hash"}), ("id", {"user.id"})])
async def test_users_are_named_as_chosen(
    make_stack: StackFactory, collector: Collector, users: str, named: set[str]
) -> None:
    stack = observed(make_stack, collector, PERDURE_TELEMETRY_USERS=users, PERDURE_API_KEYS=api_keys())

    async with stack.talk(headers={"authorization": f"Bearer {KEYS['ada']}"}) as talk:
        caller = Traced(talk, collector)
        await caller.says(SAID)
        spans = [*caller.spans("chat scripted", 2), caller.span("execute_tool add")]
    points(collector, "gen_ai.execute_tool.duration")

    assert all({name for name in span.attributes if name.startswith("user.")} == named for span in spans)
    assert all(span.attributes.get("user.id", "ada") == "ada" for span in spans)
    assert len({span.attributes.get("user.hash") for span in spans}) == 1
    assert users == "id" or not [span.name for span in collector.spans if '"ada"' in span.raw]
    assert not [point for point in collector.points if named & point.attributes.keys()]


@pytest.mark.parametrize("destination", ["traces", "logs"])
def test_content_for_which_there_is_no_endpoint_is_warned_of(
    destination: Destination, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)

    telemetry = setup.set_up("perdure-test", Choices(content=frozenset({destination})))

    assert not telemetry.measures
    assert f"PERDURE_TELEMETRY_CONTENT names {destination}, and no endpoint takes them" in caplog.text
    spans.choose(Choices())


@pytest.mark.parametrize("given", ["everything", "traces,metrics", "off,logs"])
def test_an_unknown_destination_of_content_is_refused(given: str) -> None:
    settings = read_settings(telemetry_content=given)

    with pytest.raises(Invalid, match="PERDURE_TELEMETRY_CONTENT is off, traces, logs or traces,logs"):
        assert settings.content_destinations
