"""What the spans and metrics of a turn say: of its calls, its children, its failures, and its attempts."""

from collections.abc import Generator

import pytest

from tests.support.collector import Collector
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Talk
from tests.support.waiting import until
from tests.telemetry.observed import Traced, observed, points


@pytest.fixture(scope="module")
def collector() -> Generator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory, collector: Collector) -> Stack:
    return observed(module_stack, collector)


async def test_a_model_call_says_what_was_asked_and_what_has_answered(stack: Stack, collector: Collector) -> None:
    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await caller.says("cached 6; think Let me see; say Hello there")
        [chat] = caller.spans("chat scripted")

    seen = chat.attributes
    assert seen["gen_ai.operation.name"] == "chat"
    assert (seen["gen_ai.provider.name"], seen["gen_ai.request.model"]) == ("openai", "scripted")
    assert (seen["gen_ai.response.model"], seen["gen_ai.response.id"]) == ("scripted", "chatcmpl-1")
    assert (seen["gen_ai.usage.input_tokens"], seen["gen_ai.usage.output_tokens"]) == (10, 2)
    assert seen["gen_ai.usage.cache_read.input_tokens"] == 6
    assert seen["gen_ai.usage.cache_write.input_tokens"] == 0
    assert seen["gen_ai.usage.reasoning.output_tokens"] == 3
    assert 0 < seen["gen_ai.response.time_to_first_chunk"] < 60
    assert (seen["gen_ai.conversation.id"], seen["session.id"]) == (talk.session_id, talk.session_id)
    assert (seen["perdure.turn"], seen["perdure.step"], seen["perdure.attempt"]) == (0, 0, 1)


async def test_the_metrics_of_a_turn_have_todays_names_and_no_ids(stack: Stack, collector: Collector) -> None:
    async with stack.talk() as talk:
        await Traced(talk, collector).says('think Let me see; call add {"a": 1, "b": 2}')

    base = {"gen_ai__operation__name": "chat", "gen_ai__provider__name": "openai", "gen_ai__request__model": "scripted"}
    for name in ("duration", "time_to_first_chunk", "operation.input_tokens", "operation.output_tokens"):
        assert points(collector, f"gen_ai.client.inference.{name}", **base, gen_ai__response__model="scripted")
    for name in ("input_tokens", "output_tokens", "cache_read.input_tokens", "cache_write.input_tokens"):
        assert points(collector, f"gen_ai.client.inference.usage.{name}", **base, gen_ai__token__modality="unknown")
    assert points(collector, "gen_ai.client.inference.usage.reasoning.output_tokens", **base)[-1].number >= 3
    assert points(collector, "gen_ai.execute_tool.duration", gen_ai__tool__name="add")
    for name in ("duration", "inference_calls", "tool_calls"):
        assert points(collector, f"gen_ai.invoke_agent.{name}", gen_ai__agent__name="boss")
    assert points(collector, "perdure.event_loop.lag")
    assert points(collector, "perdure.sessions", perdure__status="waiting")
    assert not {"gen_ai.client.token.usage", "gen_ai.client.operation.duration"} & collector.metrics
    assert not [text for text in collector.raw_metrics if talk.session_id in text]


async def test_a_turn_that_asks_people_is_two_spans(stack: Stack, collector: Collector) -> None:
    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        events = await caller.says('call pay {"amount": 5}')
        [asked] = [event for event in events if event["type"] == "input.requested"]
        request = asked["data"]["requests"][0]["requestId"]
        assert not caller.named("execute_tool pay")
        await talk.send(inputResponses=[{"requestId": request, "optionId": "approve"}])
        await talk.until_boundary()
        parked, resumed = caller.spans("invoke_agent boss", 2)
        paid = caller.span("execute_tool pay")

    assert parked.attributes["perdure.outcome"] == "parked"
    assert resumed.attributes["perdure.outcome"] == "completed"
    assert paid.parent == resumed.id


async def test_the_session_of_a_child_is_that_of_its_root(stack: Stack, collector: Collector) -> None:
    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await caller.says('call clerk {"message": "call add {\\"a\\": 1, \\"b\\": 2}"}')
        turn = caller.span("invoke_agent clerk")
        added = caller.span("execute_tool add")

    for seen in (turn.attributes, added.attributes):
        assert seen["session.id"] == talk.session_id
        assert seen["gen_ai.conversation.id"] != talk.session_id
    assert added.parent == turn.id


async def test_a_failed_tool_and_a_failed_turn_say_so_and_not_why(stack: Stack, collector: Collector) -> None:
    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await caller.says('call explode {"fuse": "swordfish"} then fail 400')
        tool, turn = caller.span("execute_tool explode"), caller.span("invoke_agent boss")
        failed = caller.spans("chat scripted", 2)[-1]

    assert (tool.failed, tool.attributes["error.type"]) == (True, "failed")
    assert (failed.failed, failed.attributes["error.type"]) == (True, "ModelFailed")
    assert turn.failed
    assert turn.attributes["perdure.outcome"] == "failed"
    assert points(collector, "gen_ai.client.inference.duration", error__type="ModelFailed")
    assert not [span for span in collector.spans if "swordfish" in span.raw or "scripted failure" in span.raw]


async def test_the_tokens_of_a_reply_that_breaks_off_are_counted(stack: Stack, collector: Collector) -> None:
    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await caller.says("break rate_limit_error; say a b")
        broken = caller.spans("chat scripted")[0]

    assert broken.failed
    assert broken.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert "gen_ai.usage.input_tokens" in broken.attributes
    assert "gen_ai.response.id" not in broken.attributes


async def test_a_retried_model_call_has_the_number_of_its_attempt(stack: Stack, collector: Collector) -> None:
    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await caller.says("fail 503 times 1; say Hello")
        first, second = caller.spans("chat scripted", 2)

    assert (first.failed, first.attributes["perdure.attempt"]) == (True, 1)
    assert (second.failed, second.attributes["perdure.attempt"]) == (False, 2)


async def _lingers(talk: Talk) -> bool:
    response = await talk.http.get(f"/v1/sessions/{talk.session_id}/attempts")
    running = [each["scope"] for each in response.json()["attempts"] if each["status"] == "running"]
    return running not in ([], ["model"])


async def test_after_the_death_of_a_worker_the_next_attempt_is_in_the_same_trace(
    make_stack: StackFactory, collector: Collector
) -> None:
    stack = observed(make_stack, collector)
    async with stack.talk() as talk:
        caller = Traced(talk, collector)
        await talk.create('call linger {"seconds": 3} then say Hello')
        await until(lambda: _lingers(talk), "the call to run")
        stack.workers[0].kill()
        stack.start_worker()
        await talk.until_boundary()
        lingered = caller.span("execute_tool linger")
        turn = caller.span("invoke_agent boss")

    assert lingered.attributes["perdure.attempt"] == 2
    assert turn.attributes["perdure.outcome"] == "completed"
