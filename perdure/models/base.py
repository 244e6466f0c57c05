"""The interface between harness and models: a prompt in, deltas out, and one reply at the end, or one failure."""

import logging
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelRequestTimeout,
    UnexpectedModelBehavior,
    UserError,
)
from pydantic_ai.messages import FinishReason as ProviderFinishReason
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.models import infer_model
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import RequestUsage

from perdure.agents.agent import DEMO, Agent
from perdure.bounds import public
from perdure.errors import Misconfigured, ModelFailed, PerdureError
from perdure.protocol.events import FinishReason, Usage
from perdure.telemetry.spans import ModelSpan, chosen

from .sent import SentMessages

log = logging.getLogger("perdure.model")

#: A key in the details of `ModelFailed`: the request could not be encoded, because of its content.
UNSENT = "unsent"

#: How providers that name no code say that a request is larger than the context window.
_TOO_LONG = re.compile(
    r"(?i)context[ _](?:length|window|size)|(?:prompt|input|request|message)s? (?:is|are) too (?:long|large)"
    r"|reduce the length|too many (?:input )?tokens|maximum (?:number of|input) tokens|input token count"
)
_REJECTIONS = frozenset(
    {
        "bio_policy",
        "data_residency_mismatch",
        "empty_image_file",
        "misalignment_policy_violation",
        "unsupported_image_media_type",
    }
)


@dataclass(frozen=True)
class Prompt:
    """The input of one model call. The instructions are in the last request, as pydantic-ai requires."""

    messages: Sequence[ModelMessage]
    tools: Sequence[ToolDefinition] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: What the conversation has sent before.
    sent: SentMessages = field(default_factory=SentMessages, compare=False, repr=False)


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ToolInputDelta:
    call_id: str
    tool: str
    text: str


@dataclass(frozen=True)
class Reply:
    """The complete reply: the last item of the stream, exactly once."""

    response: ModelResponse
    finish_reason: FinishReason
    usage: Usage


@dataclass(frozen=True)
class UsageSoFar:
    """What the provider has counted of this reply so far. It replaces what was counted before."""

    usage: Usage


Delta: TypeAlias = TextDelta | ReasoningDelta | ToolInputDelta
Item: TypeAlias = Delta | UsageSoFar | Reply


class Model(Protocol):
    """Replies to prompts. Failures are `ModelFailed`, with `transient` set."""

    def stream(self, prompt: Prompt) -> AsyncGenerator[Item, None]:
        """Deltas, then one reply. Closing the generator stops the provider.

        A reply that breaks off is paid for as well: its usage is known if a `UsageSoFar` came before.
        """
        ...


async def ask(model: Model, prompt: Prompt, span: ModelSpan) -> AsyncGenerator[Item, None]:
    """The reply, measured in its span.

    An unexpected error of the model becomes a `ModelFailed` that is not retried, because of its cost.
    """
    async with aclosing(model.stream(prompt)) as stream:
        try:
            async for item in stream:
                span.chunk()
                match item:
                    case UsageSoFar():
                        span.used(item.usage)
                    case Reply():
                        _describe(item, prompt, span)
                    case _:
                        pass
                yield item
        except PerdureError:
            raise
        except Exception as error:
            log.error("a model raised an unexpected error: %s", type(error).__name__)
            raise ModelFailed(f"The model failed ({type(error).__name__}).") from error


def _describe(reply: Reply, prompt: Prompt, span: ModelSpan) -> None:
    response, usage = reply.response, reply.response.usage
    details = usage.details
    thoughts = usage.output_reasoning_tokens or details.get("reasoning_tokens") or details.get("thoughts_tokens") or 0
    span.used(reply.usage, _counted(thoughts))
    span.replied(response.model_name, response.provider_response_id, reply.finish_reason)
    if chosen().choices.content:
        from perdure.telemetry.content import show_inference

        show_inference(span, prompt.messages, response)


class ModelSource(Protocol):
    """Gives a step its model."""

    def model(self, name: str) -> Model:
        """`ModelFailed`, not transient, when there is no such model or no key for it."""
        ...


def context_window(models: ModelSource, name: str) -> int | None:
    """How many tokens the model accepts; None if that is not known."""
    try:
        window: object = getattr(models.model(name), "context_window", None)
    except ModelFailed:
        # The model call itself reports that.
        return None
    return window if isinstance(window, int) and window > 0 else None


async def prepare(models: ModelSource, name: str, prompt: Prompt) -> None:
    """Do what can be done for the messages of a conversation before they are sent, if the model can do that."""
    model = models.model(name)
    if isinstance(model, _Preparing):
        await model.prepare(prompt)


@runtime_checkable
class _Preparing(Protocol):
    async def prepare(self, prompt: Prompt) -> None: ...


_MOST_TOKENS = 10**12

_FINISH: dict[ProviderFinishReason, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "content-filter",
    "tool_call": "tool-calls",
    "error": "error",
}


def finish_reason(response: ModelResponse) -> FinishReason:
    """The reason as written on the wire; for a reply with calls it is always `tool-calls`."""
    if response.tool_calls:
        return "tool-calls"
    return _FINISH[response.finish_reason] if response.finish_reason else "other"


def usage_of(response: ModelResponse) -> Usage:
    return counted(response.usage)


def counted(usage: RequestUsage) -> Usage:
    return Usage(
        input_tokens=_counted(usage.input_tokens),
        output_tokens=_counted(usage.output_tokens),
        cache_read_tokens=_counted(usage.cache_read_tokens),
        cache_write_tokens=_counted(usage.cache_write_tokens),
    )


def _counted(tokens: int) -> int:
    """The provider's number within plausible limits: sums of it must fit into a column."""
    return min(max(tokens, 0), _MOST_TOKENS)


#: Seconds between two words of the demo: its answers can be watched, and interrupted.
_DEMO_PACE = 0.02
_VARIABLE = re.compile(r"`([A-Z][A-Z0-9_]+)` environment variable")


class Models:
    """Models by name. Each is created once, because its client keeps connections open."""

    def __init__(self, *, silence: float = 120.0) -> None:
        self._silence = silence
        self._models: dict[str, Model] = {}

    def check(self, agents: Iterable[Agent]) -> None:
        """Raise `Misconfigured` unless every agent has a usable model: a known provider, and its key."""
        for agent in agents:
            try:
                self.model(agent.model or DEMO)
            except ModelFailed as failed:
                raise Misconfigured(f"Agent {agent.name!r}: {failed.message} {failed.reason or ''}".rstrip()) from None

    def model(self, name: str) -> Model:
        if name not in self._models:
            self._models[name] = self._open(name)
        return self._models[name]

    def _open(self, name: str) -> Model:
        # Imported late: both use this module, and the SDKs of providers take a third of a second.
        if name == DEMO:
            from .demo import DemoModel

            return DemoModel(delay=_DEMO_PACE)
        from .provider import ProviderModel

        try:
            return ProviderModel(name, infer_model(name), silence=self._silence)
        except Exception as error:
            raise failure(name, error) from error


def failure(model: str, error: Exception, *, asked: bool = False, answered: bool = False) -> ModelFailed:
    """The failure, and whether a retry can help.

    `asked`: the error occurred during a model call. `answered`: the reply had begun, so it is paid for. During a call
    and before a reply, the content of the request causes every error that neither provider nor connection raised.
    """
    failed = _failure(model, error, asked=asked, answered=answered)
    if _is_too_long(error):
        failed.too_long, failed.transient = True, False
    return failed


def _is_too_long(error: Exception) -> bool:
    """Whether the request is larger than the model's context window."""
    if isinstance(error, ModelContextWindowExceededError):
        return True
    if not isinstance(error, ModelAPIError) or isinstance(error, ModelRateLimitError):
        return False
    status = error.status_code if isinstance(error, ModelHTTPError) else None
    return status == 413 or (status in (None, 400, 422) and bool(_TOO_LONG.search(f"{error.body} {error.message}")))


def _failure(model: str, error: Exception, *, asked: bool, answered: bool) -> ModelFailed:
    unsent: dict[str, Any] = {UNSENT: True} if asked and not answered else {}
    match error:
        case ModelFailed():
            return error
        case ModelHTTPError():
            return _http(model, error)
        case ModelConnectionError() | ModelRequestTimeout():
            late = isinstance(error, ModelRequestTimeout) or "timed out" in str(error).lower()
            what = "did not answer in time" if late else "could not be reached, or broke off its answer"
            return ModelFailed(f"The model {model} {what}.", transient=True, retry_after=error.retry_after)
        case ModelAPIError() if isinstance(error.__cause__, ValueError):
            return _unreadable(model)
        case ModelAPIError():
            # A provider's text about credentials often quotes them.
            private = isinstance(error, ModelAuthenticationError)
            text = None if private else error.body or (error.message if error.provider_error_code else None)
            return ModelFailed(
                f"The model {model} reported an error.",
                transient=not _rejected(error),
                retry_after=error.retry_after,
                reason=_provider_text(text),
            )
        case UnexpectedModelBehavior():
            return _unreadable(model)
        case UserError() | ImportError():
            return ModelFailed(f"The model {model} cannot be used.", reason=_advice(public(str(error))), **unsent)
        case OSError() | TimeoutError():
            return ModelFailed(f"The model {model} could not be reached.", transient=True)
        case _:
            return ModelFailed(f"The model {model} failed ({type(error).__name__}).", transient=False, **unsent)


def _advice(text: str) -> str:
    """What to do, of pydantic-ai's text about a key, a model or a library that is missing.

    Its own advice includes Python code that does not apply here.
    """
    if missing := _VARIABLE.search(text):
        return f"Set {missing[1]}, or let `{DEMO}` answer, which needs no key."
    if text.startswith("Unknown model") and not text.endswith("?"):
        return f"{text}. A model is written `provider:model`: `openai:…` or `anthropic:…`."
    return text


def _rejected(error: ModelAPIError) -> bool:
    """Whether the provider refuses this request, so that a retry cannot help."""
    if isinstance(error, ModelRequestRejectedError | ModelQuotaExceededError):
        return True
    # Codes of OpenAI's Responses API for which pydantic-ai has no category.
    code = error.provider_error_code or ""
    return code in _REJECTIONS or code.startswith(("invalid_", "image_"))


def _unreadable(model: str) -> ModelFailed:
    # The answer was complete, because a broken connection raises other errors. It may be paid for, so a retry would pay
    # again.
    return ModelFailed(f"The model {model} sent an answer that makes no sense.")


def _http(model: str, error: ModelHTTPError) -> ModelFailed:
    status = error.status_code
    transient = (status in (408, 409, 429) or status >= 500) and not isinstance(error, ModelQuotaExceededError)
    # The SDKs honour this header in their retries; Perdure retries instead of them, so it does too.
    if error.provider_retry_hint is not None and not isinstance(error, ModelRateLimitError):
        transient = error.provider_retry_hint
    return ModelFailed(
        f"The model {model} answered {status}.",
        transient=transient,
        retry_after=error.retry_after,
        reason=None if status in (401, 403) else _provider_text(error.body),
        statusCode=status,
    )


def _provider_text(body: object) -> str | None:
    """The error text in the provider's response, if there is one."""
    for _ in range(2):
        if isinstance(body, Mapping):
            known = cast("Mapping[str, Any]", body)
            body = known.get("message") or known.get("error")
    return public(body) if isinstance(body, str) and body else None
