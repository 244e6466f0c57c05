"""Real SDKs against a scripted provider over HTTP."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib import import_module
from typing import Any

import pytest
from pydantic_ai.messages import ModelRequest, ThinkingPart, ToolCallPart, ToolReturnPart
from pydantic_ai.tools import ToolDefinition

from perdure.errors import ModelFailed
from perdure.models.base import Delta, Models, Prompt, ReasoningDelta, Reply, TextDelta, ToolInputDelta, UsageSoFar
from tests.support.provider import Provider, serving

NAMES = ["openai-chat:scripted", "openai:gpt-5-scripted", "anthropic:claude-scripted"]
ROLL = ToolDefinition(name="roll", parameters_json_schema={"type": "object", "properties": {}})


@pytest.fixture
async def provider(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Provider]:
    async with serving() as provider:
        for name, value in provider.environment().items():
            monkeypatch.setenv(name, value)
        yield provider


def prompt_of(text: str) -> Prompt:
    return Prompt([ModelRequest.user_text_prompt(text, instructions="Be brief.")], tools=[ROLL])


async def answer(name: str, prompt: Prompt, patience: float = 60.0) -> tuple[list[Delta], Reply]:
    items = [item async for item in Models(silence=patience).model(name).stream(prompt)]
    *deltas, reply = items
    assert isinstance(reply, Reply)
    return [delta for delta in deltas if not isinstance(delta, Reply | UsageSoFar)], reply


async def refused(name: str, prompt: Prompt, patience: float = 60.0) -> ModelFailed:
    with pytest.raises(ModelFailed) as failed:
        await answer(name, prompt, patience)
    return failed.value


@pytest.mark.parametrize("name", NAMES)
async def test_text_arrives_in_deltas_and_whole_at_the_end(provider: Provider, name: str) -> None:
    deltas, reply = await answer(name, prompt_of("say Hello out there"))

    assert [delta for delta in deltas if isinstance(delta, TextDelta)] == [
        TextDelta("Hello "),
        TextDelta("out "),
        TextDelta("there"),
    ]
    assert reply.response.text == "Hello out there"
    assert (reply.finish_reason, reply.usage.input_tokens, reply.usage.output_tokens) == ("stop", 10, 3)


@pytest.mark.parametrize("name", NAMES)
async def test_parallel_calls_arrive_with_their_input(provider: Provider, name: str) -> None:
    deltas, reply = await answer(name, prompt_of('call roll {"a": 1} and roll {"a": 2}'))

    calls = [part for part in reply.response.parts if isinstance(part, ToolCallPart)]
    assert [call.args_as_dict() for call in calls] == [{"a": 1}, {"a": 2}]
    assert reply.finish_reason == "tool-calls"
    streamed = {delta.call_id: delta.text for delta in deltas if isinstance(delta, ToolInputDelta)}
    assert streamed == {calls[0].tool_call_id: '{"a": 1}', calls[1].tool_call_id: '{"a": 2}'}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["number-id", "number-name"])
async def test_ids_and_names_of_calls_are_text_whatever_the_provider_sends(
    provider: Provider, name: str, what: str
) -> None:
    deltas, reply = await answer(name, prompt_of(f"odd {what}"))

    calls = [(part.tool_call_id, part.tool_name) for part in reply.response.tool_calls]
    assert [(delta.call_id, delta.tool) for delta in deltas if isinstance(delta, ToolInputDelta)] == calls
    assert calls[0][what == "number-name"] == "5"
    assert all(isinstance(each, str) for call in calls for each in call)


@pytest.mark.parametrize("name", NAMES)
async def test_reasoning_is_kept_apart_from_text(provider: Provider, name: str) -> None:
    deltas, reply = await answer(name, prompt_of("think Let me see; say Hi"))

    assert ReasoningDelta("Let me see") in deltas
    assert isinstance(reply.response.parts[0], ThinkingPart)


@pytest.mark.parametrize("name", NAMES)
async def test_results_lead_to_the_next_round(provider: Provider, name: str) -> None:
    prompt = prompt_of("call roll {} then say Rolled")
    _, first = await answer(name, prompt)
    result = ToolReturnPart("roll", [6], tool_call_id=first.response.tool_calls[0].tool_call_id)

    _, second = await answer(name, Prompt([*prompt.messages, first.response, ModelRequest([result])], [ROLL]))

    assert second.response.text == "Rolled"


@pytest.mark.parametrize("name", NAMES)
async def test_what_was_thought_is_given_back_with_the_calls_it_led_to(provider: Provider, name: str) -> None:
    prompt = prompt_of("think A roll; call roll {} and roll {} then say Rolled")
    _, first = await answer(name, prompt)
    results = [ToolReturnPart("roll", [6], tool_call_id=call.tool_call_id) for call in first.response.tool_calls]

    _, second = await answer(name, Prompt([*prompt.messages, first.response, ModelRequest(results)], [ROLL]))

    assert second.response.text == "Rolled"
    assert provider.unpaired == []


@pytest.mark.parametrize("name", NAMES)
async def test_too_many_requests_are_transient_and_have_a_retry_time(provider: Provider, name: str) -> None:
    failed = await refused(name, prompt_of("fail 429 times 9 after 7; say hi"))

    assert (failed.transient, failed.retry_after, failed.details) == (True, 7.0, {"statusCode": 429})
    assert len(provider.requests) == 1, "the SDK must not retry by itself"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("status", "transient"), [(408, True), (409, True), (500, True), (503, True), (529, True)])
async def test_what_may_pass_is_transient(provider: Provider, name: str, status: int, transient: bool) -> None:
    failed = await refused(name, prompt_of(f"fail {status} times 9; say hi"))

    assert failed.transient is transient
    assert len(provider.requests) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_what_will_not_pass_is_not_transient(provider: Provider, name: str, status: int) -> None:
    failed = await refused(name, prompt_of(f"fail {status} times 9; say hi"))

    assert not failed.transient
    assert failed.details == {"statusCode": status}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["cut", "stop"])
async def test_an_answer_that_breaks_off_is_transient(provider: Provider, name: str, how: str) -> None:
    failed = await refused(name, prompt_of(f"{how} after 2; say a b c d e"))

    assert failed.transient
    assert failed.__cause__ is not failed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["json", "bytes", "page", "nothing"])
async def test_an_answer_that_came_whole_and_cannot_be_read_is_not_asked_for_again(
    provider: Provider, name: str, what: str
) -> None:
    failed = await refused(name, prompt_of(f"junk {what}"))

    assert failed.message == f"The model {name} sent an answer that makes no sense."
    assert not failed.transient


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("openai-chat:scripted", "server_error"),
        ("openai:gpt-5-scripted", "server_error"),
        ("openai:gpt-5-scripted", "rate_limit_exceeded"),
        ("anthropic:claude-scripted", "overloaded_error"),
        ("anthropic:claude-scripted", "api_error"),
    ],
)
async def test_an_error_inside_the_answer_is_transient(provider: Provider, name: str, error: str) -> None:
    failed = await refused(name, prompt_of(f"break {error}; say a b c"))

    assert failed.transient


@pytest.mark.parametrize(
    ("name", "error"),
    [("openai:gpt-5-scripted", "invalid_prompt"), ("anthropic:claude-scripted", "invalid_request_error")],
)
async def test_a_refusal_inside_the_answer_is_not_transient(provider: Provider, name: str, error: str) -> None:
    failed = await refused(name, prompt_of(f"break {error}; say a b c"))

    assert not failed.transient
    assert "scripted" in (failed.reason or "")
    assert "scripted" not in failed.message.removeprefix(f"The model {name}")


@pytest.mark.parametrize("name", NAMES)
async def test_a_provider_that_hangs_is_given_up(provider: Provider, name: str) -> None:
    failed = await refused(name, prompt_of("hang"), patience=0.2)

    assert failed.transient
    assert "time" in failed.message


async def test_a_refused_connection_is_transient(provider: Provider) -> None:
    await provider.stop()

    failed = await refused(NAMES[0], prompt_of("say hi"))

    assert failed.transient


async def test_closing_the_stream_stops_the_provider(provider: Provider) -> None:
    async with aclosing(Models().model(NAMES[0]).stream(prompt_of("drip 100000 words delay 1"))) as stream:
        await anext(stream)

    async with asyncio.timeout(60):
        while not provider.abandoned:
            await asyncio.sleep(0.01)


async def test_a_missing_key_is_explained_and_not_transient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)

    with pytest.raises(ModelFailed, match="cannot be used") as failed:
        Models().model("openai-chat:scripted")

    assert "OPENAI_API_KEY" in (failed.value.reason or "")
    assert not failed.value.transient


async def test_an_unknown_model_is_explained_and_not_transient() -> None:
    with pytest.raises(ModelFailed, match="nobody:knows") as failed:
        Models().model("nobody:knows")

    assert not failed.value.transient


async def test_unpaired_calls_are_refused_by_the_provider(provider: Provider) -> None:
    prompt = prompt_of("call roll {}")
    _, first = await answer(NAMES[0], prompt)

    failed = await refused(NAMES[0], Prompt([*prompt.messages, first.response, *prompt_of("again").messages]))

    assert failed.details == {"statusCode": 400}


@pytest.mark.parametrize(
    ("name", "resource"),
    [("openai-chat:scripted", "chat.completions.completions"), ("openai:gpt-5-scripted", "responses.responses")],
)
async def test_openais_sdk_is_not_given_the_conversation_to_walk(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, name: str, resource: str
) -> None:
    module = import_module(f"openai.resources.{resource}")
    walk: Any = module.async_maybe_transform
    walked: list[dict[str, Any]] = []

    async def walking(data: dict[str, Any], kind: object) -> Any:
        walked.append(data)
        return await walk(data, kind)

    monkeypatch.setattr(module, "async_maybe_transform", walking)

    await answer(name, prompt_of("say Hello"))

    [given] = walked
    assert not any(given.get(what) for what in ("messages", "input", "tools"))
    assert (provider.requests[0]["said"], provider.requests[0]["tools"]) == ("say Hello", ["roll"])


@pytest.mark.parametrize("said", ["cut after 3; say a b c d e", "stop after 3; say a b c d e", "hang"])
async def test_what_a_provider_has_counted_is_known_although_its_answer_breaks_off(
    provider: Provider, said: str
) -> None:
    known: list[UsageSoFar] = []

    async def read() -> None:
        async for item in Models(silence=0.5).model("anthropic:claude-scripted").stream(prompt_of(said)):
            known.extend([item] if isinstance(item, UsageSoFar) else [])

    with pytest.raises(ModelFailed):
        await read()

    # Anthropic counts the input in its first event, if there is one.
    assert [each.usage.input_tokens for each in known[-1:]] == ([] if said == "hang" else [10])
