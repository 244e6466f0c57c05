"""Real models, through pydantic-ai: `openai:…`, `openai-chat:…`, `anthropic:…` and its other providers."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from copy import copy
from dataclasses import replace
from inspect import signature
from typing import Any, TypeAlias, cast

from openai import AsyncOpenAI, Omit, omit
from openai.resources.chat.completions import AsyncCompletions
from openai.resources.responses import AsyncResponses
from pydantic_ai.direct import model_request_stream
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
    ToolCallPartDelta,
)
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import RequestUsage
from pydantic_core import to_json

from perdure.errors import ModelFailed

from .base import (
    Delta,
    Item,
    Prompt,
    ReasoningDelta,
    Reply,
    TextDelta,
    ToolInputDelta,
    UsageSoFar,
    counted,
    failure,
    finish_reason,
    usage_of,
)
from .sent import Encoded, Mapped, Splice, Splicer, Unlike, content_of, current

_Request: TypeAlias = AbstractAsyncContextManager[StreamedResponse]

#: Messages that are mapped ahead at once: a millisecond or two.
_AT_ONCE = 256
#: The first ones are so few that it costs little to see whether they are mapped alike with others before them.
_FIRST_ENDS = (64, 128)

#: Models without a provider: they never have a finish reason.
_OFFLINE = frozenset({"test", "function"})


class ProviderModel:
    """One model of one provider; `silence` is how many seconds it may send nothing."""

    def __init__(self, name: str, model: Model, *, silence: float) -> None:
        self._name = name
        self._model = model
        self._silence = silence
        # Temporal does the retries: it waits without a worker, and each attempt emits events.
        self._max_retries = None if make_lean(model) else 0
        self._splicer = Splicer() if can_splice(model) else None

    @property
    def context_window(self) -> int | None:
        """The tokens that the model accepts, as the provider library knows them."""
        return self._model.context_window

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Item, None]:
        answered = False
        try:
            async for item in self._stream(prompt):
                answered = True
                yield item
        except ModelFailed:
            raise
        except Exception as error:
            raise failure(self._name, error, asked=True, answered=answered) from error

    async def _stream(self, prompt: Prompt) -> AsyncGenerator[Item, None]:
        calls = _Calls()
        async with AsyncExitStack() as stack:
            answer = await self._open(stack, prompt)
            known = RequestUsage()
            try:
                async for event in answer:
                    if answer.usage != known:
                        known = copy(answer.usage)
                        yield UsageSoFar(counted(known))
                    if isinstance(event, PartStartEvent | PartDeltaEvent):
                        for delta in _deltas(event, calls):
                            yield delta
            except Exception:
                yield UsageSoFar(counted(answer.usage))
                raise
            response = answer.get()
        if self._broken_off(response):
            yield UsageSoFar(usage_of(response))
            raise ModelFailed(f"The model {self._name} broke off its answer.", transient=True)
        response = calls.renamed(response)
        yield Reply(response=response, finish_reason=finish_reason(response), usage=usage_of(response))

    async def prepare(self, prompt: Prompt) -> None:
        """Encode the messages that the conversation will send again, without sending them."""
        if self._splicer is None:
            return

        def request(messages: Sequence[ModelMessage]) -> _Request:
            return self._request(prompt, messages)

        ends = (*_FIRST_ENDS, *range(_AT_ONCE, len(prompt.messages), _AT_ONCE), len(prompt.messages))
        for until in ends:
            messages, has_tools = prompt.messages[:until], bool(prompt.tools)
            splice = self._splicer.splice(prompt.sent, messages, self._settings(prompt), has_tools)
            if splice is None:
                return
            try:
                items = await _mapped(splice, request)
                if not splice.whole and not splice.is_trusted:
                    splice = splice.compared_with(items)
                    items = await _mapped(splice, request)
                splice.put_together(items)
            except Unlike:
                self._splicer.stop()
                return
            # Others have their turn.
            await asyncio.sleep(0)

    async def _open(self, stack: AsyncExitStack, prompt: Prompt) -> StreamedResponse:
        """Send the request. Messages that were sent before are not mapped again, if possible."""

        def request(messages: Sequence[ModelMessage]) -> _Request:
            return self._request(prompt, messages)

        if self._splicer and (
            splice := self._splicer.splice(prompt.sent, prompt.messages, self._settings(prompt), bool(prompt.tools))
        ):
            try:
                if not splice.whole and not splice.is_trusted:
                    splice = splice.compared_with(await _mapped(splice, request))
                with splice.used():
                    return await stack.enter_async_context(request(splice.mapped))
            except Unlike:
                self._splicer.stop()
        return await stack.enter_async_context(request(prompt.messages))

    def _settings(self, prompt: Prompt) -> dict[str, Any]:
        return {"timeout": self._silence, **prompt.settings, "max_retries": self._max_retries}

    def _request(self, prompt: Prompt, messages: Sequence[ModelMessage]) -> _Request:
        return model_request_stream(
            self._model,
            list(messages),
            model_settings=cast("ModelSettings", self._settings(prompt)),
            model_request_parameters=ModelRequestParameters(function_tools=list(prompt.tools)),
        )

    def _broken_off(self, response: ModelResponse) -> bool:
        """Whether the stream ended before the reply did: a partial reply must not be recorded."""
        if response.state == "incomplete":
            return True
        if response.finish_reason is None:
            return self._model.system not in _OFFLINE
        # pydantic-ai invents a reason when this API gave none.
        guessed = response.provider_name == "openai" and "finish_reason" not in (response.provider_details or {})
        return guessed and response.finish_reason != "content_filter"


async def _mapped(splice: Splice, request: Callable[[Sequence[ModelMessage]], _Request]) -> Sequence[Any]:
    """What the library makes of the messages that are new in this request, which is not sent."""
    try:
        with replace(splice, dry=True).used():
            async with request(splice.mapped):
                raise Unlike
    except Mapped as mapped:
        return mapped.items


class _Calls:
    """The calls of one reply, by part. Their ids are text, and unique: some providers send numbers, or repeat one."""

    def __init__(self) -> None:
        self._by_part: dict[int, tuple[str, str]] = {}

    def at(self, index: int, call: ToolCallPart | None = None) -> tuple[str, str]:
        """The id and the tool of the call in this part."""
        if index not in self._by_part and call is not None:
            taken = {call_id for call_id, _ in self._by_part.values()}
            call_id = _text(call.tool_call_id)
            unique = call_id if call_id not in taken else f"{call_id}_{index}"
            self._by_part[index] = (unique, _text(call.tool_name))
        return self._by_part[index]

    def renamed(self, response: ModelResponse) -> ModelResponse:
        for index, part in enumerate(response.parts):
            if isinstance(part, ToolCallPart):
                call: Any = part
                call.tool_call_id, call.tool_name = self.at(index, part)[0], _text(part.tool_name)
        return response


def _deltas(event: PartStartEvent | PartDeltaEvent, calls: _Calls) -> Iterator[Delta]:
    match event:
        case PartStartEvent(part=TextPart(content=text)) | PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
            if text:
                yield TextDelta(text)
        case (
            PartStartEvent(part=ThinkingPart(content=text))
            | PartDeltaEvent(delta=ThinkingPartDelta(content_delta=text))
        ):
            if text:
                yield ReasoningDelta(text)
        case PartStartEvent(index=index, part=ToolCallPart(args=args) as call):
            call_id, tool = calls.at(index, call)
            if args:
                yield ToolInputDelta(call_id, tool, _text(args))
        case PartDeltaEvent(index=index, delta=ToolCallPartDelta(args_delta=args)) if args:
            yield ToolInputDelta(*calls.at(index), _text(args))
        case _:
            return


def _text(value: object) -> str:
    """A value that is declared as text: the SDKs do not check its type."""
    return value if isinstance(value, str) else to_json(value).decode()


class LeanCompletions(AsyncCompletions):
    def __init__(self, client: AsyncOpenAI) -> None:
        super().__init__(client)
        self._post = self._send

    async def create(self, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        send: Any = super().create
        if splice := current():
            options["messages"] = splice.encoded(options["messages"])
        return await send(**_in_extra_body(options, "messages", "tools"), messages=())

    async def _send(self, path: str, *, body: Any = None, options: dict[str, Any], **rest: Any) -> Any:
        """Post the request, with messages that may be encoded already."""
        post: Any = self._client.post
        extra: dict[str, Any] = options.get("extra_json") or {}
        if not isinstance(extra.get("messages"), Encoded):
            return await post(path, body=body, options=options, **rest)
        given: dict[str, Any] = {**body, **extra}
        content = content_of({name: given[name] for name in given if not isinstance(given[name], Omit)})
        # Given beside the content, they would be sent a second time.
        options.pop("extra_json")
        return await post(path, content=content, options=options, **rest)


class LeanResponses(AsyncResponses):
    async def create(self, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        send: Any = super().create
        return await send(**_in_extra_body(options, "input", "tools"))


def make_lean(model: Model) -> bool:
    """Switch off that work, and all retries, in the SDK's client; False when the model has no such client."""
    client: object = getattr(model, "client", None)
    if not isinstance(client, AsyncOpenAI):
        return False
    # Set on the client: as a setting of each request it would create a new client each time, without these changes.
    client.max_retries = 0
    # Both are cached properties: a value in the instance replaces them.
    vars(client.chat)["completions"] = LeanCompletions(client)
    vars(client)["responses"] = LeanResponses(client)
    return True


def can_splice(model: Model) -> bool:
    """Whether messages of this model's requests can be encoded here: subclasses map them in other ways."""
    return (
        type(model) is OpenAIChatModel
        # The client of Azure looks into the body.
        and type(model.client) is AsyncOpenAI
        and not model.settings
        and "content" in signature(AsyncOpenAI.post).parameters
    )


def _in_extra_body(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options, with `names` moved into `extra_body`; existing entries there win."""
    rest = {name: value for name, value in options.items() if name not in names}
    moved = {name: options[name] for name in names if not isinstance(options.get(name, omit), Omit)}
    return {**rest, "extra_body": {**moved, **(options.get("extra_body") or {})}}
