"""Requests whose older messages are encoded already are the same, byte for byte, as those that the library makes."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from openai import AsyncAzureOpenAI
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openrouter import OpenRouterModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.openrouter import OpenRouterProvider
from pydantic_ai.tools import ToolDefinition

from perdure.models import provider as provider_module
from perdure.models import sent as sent_module
from perdure.models.base import Model, Models, Prompt, Reply
from perdure.models.provider import ProviderModel
from perdure.models.sent import SentMessages
from tests.support.provider import Provider, serving

NAME = "openai-chat:scripted"
ROLL = ToolDefinition(name="roll", parameters_json_schema={"type": "object", "properties": {}})
PIXEL = BinaryContent(b"\x89PNG", media_type="image/png")


@pytest.fixture
async def provider(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Provider]:
    async with serving() as provider:
        for name, value in provider.environment().items():
            monkeypatch.setenv(name, value)
        yield provider


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages the library was given at each call."""
    counts: list[int] = []
    request: Any = provider_module.model_request_stream

    def counting(model: object, messages: Sequence[ModelMessage], **options: Any) -> Any:
        counts.append(len(messages))
        return request(model, messages, **options)

    monkeypatch.setattr(provider_module, "model_request_stream", counting)
    return counts


def said(text: str) -> ModelRequest:
    return ModelRequest([UserPromptPart(text)])


def texts(number: int) -> list[ModelMessage]:
    return [said(f"say {number} \u2028 “é” \x1f \x7f 😀"), ModelResponse([TextPart(f"\t{number}\n"), TextPart("")])]


def calls(number: int) -> list[ModelMessage]:
    ids = [f"call_{number}_{which}" for which in "ab"]
    asked = [ToolCallPart("roll", {"é": [1.5, None, True, "ü"]}, ids[0]), ToolCallPart("roll", "{}", ids[1])]
    results: list[Any] = [{"eyes": number, "of": [6.0, "né"]}, "plain"]
    returns = [ToolReturnPart("roll", result, tool_call_id=each) for result, each in zip(results, ids, strict=True)]
    answer = ModelResponse([TextPart("Rolled.")])
    return [said("say x"), ModelResponse([TextPart("I roll."), *asked]), ModelRequest(returns), answer]


def thoughts(number: int) -> list[ModelMessage]:
    return [said(f"say {number}"), ModelResponse([ThinkingPart("Hm.", id="reasoning"), TextPart(f"{number}")])]


def files(number: int) -> list[ModelMessage]:
    seen = UserPromptPart(["look", replace(PIXEL, data=PIXEL.data + bytes([number]))])
    return [ModelRequest([UserPromptPart("context"), seen]), ModelResponse([TextPart("A pixel.")])]


def rejoined(number: int) -> list[ModelMessage]:
    """A turn that failed leaves its message to the next one."""
    return [ModelRequest([UserPromptPart("lost"), UserPromptPart(f"say {number}")]), ModelResponse([TextPart("ok")])]


def mixed(number: int) -> list[ModelMessage]:
    return [texts, calls, files, rejoined][number % 4](number)


def growing(kind: Callable[[int], list[ModelMessage]], young: int = 40, old: int = 46) -> list[Prompt]:
    """The prompts of one conversation in its later turns, which keep what they have sent."""
    sent, history, prompts = SentMessages(), list[ModelMessage](), list[Prompt]()
    for number in range(old):
        if number >= young:
            messages = [*history, ModelRequest([UserPromptPart("say yes")], instructions="Be brief.")]
            prompts.append(Prompt(messages, [ROLL], sent=sent))
        history += kind(number)
    return prompts


async def prepare(model: Model, prompt: Prompt) -> None:
    assert isinstance(model, ProviderModel)
    await model.prepare(prompt)


def unkept(prompt: Prompt) -> Prompt:
    return replace(prompt, sent=SentMessages())


async def bodies(provider: Provider, model: Model, prompts: Sequence[Prompt]) -> list[str]:
    """The digests of the bodies that the provider got."""
    provider.requests.clear()
    for prompt in prompts:
        items = [item async for item in model.stream(prompt)]
        assert isinstance(items[-1], Reply)
    return [request["digest"] for request in provider.requests]


def _never(model: object) -> bool:
    return False


async def library_bodies(
    provider: Provider, prompts: Sequence[Prompt], monkeypatch: pytest.MonkeyPatch, name: str = NAME
) -> list[str]:
    """The same, with all messages mapped by the library and encoded by the SDK."""
    with monkeypatch.context() as patch:
        patch.setattr(provider_module, "can_splice", _never)
        model = Models().model(name)
    return await bodies(provider, model, [unkept(prompt) for prompt in prompts])


@pytest.mark.parametrize("kind", [texts, calls, thoughts, files, rejoined, mixed])
async def test_a_growing_conversation_sends_what_the_library_would(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, kind: Callable[[int], list[ModelMessage]]
) -> None:
    prompts = growing(kind)
    expected = await library_bodies(provider, prompts, monkeypatch)

    found = await bodies(provider, Models().model(NAME), prompts)

    assert found == expected


@pytest.mark.parametrize("kind", [texts, calls, files, rejoined])
async def test_the_library_is_given_the_newer_messages_alone(
    provider: Provider, given: list[int], kind: Callable[[int], list[ModelMessage]]
) -> None:
    prompts, turn = growing(kind), len(kind(0))

    await bodies(provider, Models().model(NAME), prompts)

    # The first request has nothing to go by. The second is made both ways, in order to compare.
    whole = [len(prompt.messages) for prompt in prompts[:2]]
    assert given == [whole[0], turn + 1, whole[1], *[turn + 1] * 4]


@pytest.mark.parametrize("kind", [texts, calls, thoughts, files, rejoined, mixed])
async def test_what_was_prepared_is_sent_as_the_library_would(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, kind: Callable[[int], list[ModelMessage]]
) -> None:
    monkeypatch.setattr(provider_module, "_AT_ONCE", 16)
    prompts, model = growing(kind, young=100, old=102), Models().model(NAME)
    expected = await library_bodies(provider, prompts, monkeypatch)
    provider.requests.clear()

    await prepare(model, replace(prompts[0], messages=prompts[0].messages[:-1]))

    assert provider.requests == []
    assert await bodies(provider, model, prompts) == expected


async def test_only_what_is_new_is_left_to_do_for_a_conversation_that_was_prepared(
    provider: Provider, given: list[int]
) -> None:
    prompts, model = growing(texts, young=300, old=301), Models().model(NAME)
    await prepare(model, replace(prompts[0], messages=prompts[0].messages[:-1]))
    given.clear()

    await bodies(provider, model, prompts)

    assert given == [2]


async def test_a_library_that_maps_by_what_is_around_is_found_out_before_anything_is_sent(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mapping: Any = OpenAIChatModel._map_messages  # pyright: ignore[reportPrivateUsage]

    async def numbered(*args: Any, **options: Any) -> Any:
        items = await mapping(*args, **options)
        return [{**item, "name": f"n{number}"} for number, item in enumerate(items)]

    monkeypatch.setattr(OpenAIChatModel, "_map_messages", numbered)
    prompts, model = growing(texts, young=100, old=102), Models().model(NAME)
    expected = await library_bodies(provider, prompts, monkeypatch)

    await prepare(model, prompts[0])

    assert "in an unknown way" in caplog.text
    assert await bodies(provider, model, prompts) == expected


async def test_thoughts_may_change_how_others_are_mapped_so_the_library_gets_all(
    provider: Provider, given: list[int]
) -> None:
    prompts = growing(thoughts)

    await bodies(provider, Models().model(NAME), prompts)

    assert given == [len(prompt.messages) for prompt in prompts]


async def test_a_short_conversation_keeps_nothing(provider: Provider) -> None:
    prompts = growing(texts, young=3, old=5)

    await bodies(provider, Models().model(NAME), prompts)

    assert prompts[0].sent.sent.encoded == b""


async def test_a_compacted_conversation_begins_anew(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = growing(texts)
    summary = said("<summary> All was said.")
    prompts += [replace(prompt, messages=[summary, *prompt.messages[9:]]) for prompt in prompts]
    expected = await library_bodies(provider, prompts, monkeypatch)

    found = await bodies(provider, Models().model(NAME), prompts)

    assert found == expected


async def test_a_message_that_is_another_object_is_encoded_again(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = growing(texts)
    changed = [
        replace(prompt, messages=[*prompt.messages[:70], said("x"), *prompt.messages[71:]]) for prompt in prompts
    ]
    both = [each for pair in zip(prompts, changed, strict=True) for each in pair]
    expected = await library_bodies(provider, both, monkeypatch)

    found = await bodies(provider, Models().model(NAME), both)

    assert found == expected


async def test_another_model_does_not_take_over_what_one_has_sent(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, names = growing(calls), [NAME, "openai-chat:o1-mini", NAME, "openai:gpt-5-scripted", NAME, NAME]
    expected = [
        (await library_bodies(provider, [prompt], monkeypatch, name))[0]
        for prompt, name in zip(prompts, names, strict=True)
    ]
    models = Models()

    found = [
        (await bodies(provider, models.model(name), [prompt]))[0] for prompt, name in zip(prompts, names, strict=True)
    ]

    assert found == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5, "max_tokens": 99, "extra_headers": {"x-one": "1"}},
        {"extra_body": {"metadata": {"one": "é"}}},
        {"extra_body": {"messages": [{"role": "user", "content": "say yes"}]}},
        {"openai_reasoning_effort": "low"},
        {"openai_cache_instructions": True},
    ],
)
async def test_settings_of_the_agent_go_along(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    prompts = [replace(prompt, settings=settings) for prompt in growing(texts)]
    expected = await library_bodies(provider, prompts, monkeypatch)

    found = await bodies(provider, Models().model(NAME), prompts)

    assert found == expected


async def test_what_exceeds_the_bytes_that_are_kept_is_mapped_each_time(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = growing(mixed)
    expected = await library_bodies(provider, prompts, monkeypatch)
    monkeypatch.setattr(sent_module, "_MOST_BYTES", 15_000)

    found = await bodies(provider, Models().model(NAME), prompts)

    assert found == expected
    assert 0 < len(prompts[0].sent.sent.encoded) <= 15_000


async def test_a_library_that_maps_messages_by_what_is_around_them_is_given_all(
    provider: Provider, given: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mapping: Any = OpenAIChatModel._map_messages  # pyright: ignore[reportPrivateUsage]

    async def numbered(*args: Any, **options: Any) -> Any:
        items = await mapping(*args, **options)
        return [{**item, "name": f"n{number}"} for number, item in enumerate(items)]

    monkeypatch.setattr(OpenAIChatModel, "_map_messages", numbered)
    prompts = growing(texts)
    expected = await library_bodies(provider, prompts, monkeypatch)
    given.clear()

    found = await bodies(provider, Models().model(NAME), prompts)

    assert found == expected
    assert given[-4:] == [len(prompt.messages) for prompt in prompts[-4:]]
    assert "in an unknown way" in caplog.text


@pytest.mark.parametrize(
    "model",
    [
        OpenRouterModel("openai/any", provider=OpenRouterProvider(api_key="k")),
        OpenAIChatModel(
            "any",
            provider=OpenAIProvider(
                openai_client=AsyncAzureOpenAI(api_key="k", azure_endpoint="http://127.0.0.1:1", api_version="1")
            ),
        ),
        OpenAIChatModel("any", provider=OpenAIProvider(api_key="k"), settings={"openai_cache_instructions": True}),  # type: ignore
    ],
)
def test_models_with_a_mapping_a_client_or_settings_of_their_own_are_left_alone(model: OpenAIChatModel) -> None:
    assert not provider_module.can_splice(model)
