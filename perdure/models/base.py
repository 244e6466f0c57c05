"""The interface between harness and models: a prompt in, deltas out, and one reply at the end."""

import logging
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from pydantic_ai.messages import FinishReason as ProviderFinishReason
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.models import infer_model
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import RequestUsage

from perdure.agents.agent import DEMO, Agent
from perdure.errors import Misconfigured, ModelFailed, PerdureError
from perdure.protocol.events import FinishReason, Usage

from .failures import failure
from .sent import SentMessages

log = logging.getLogger("perdure.model")


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


async def with_model_errors(stream: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """The stream; an unexpected error of the model becomes a `ModelFailed` that is not retried, because of its cost."""
    async with aclosing(stream):
        try:
            async for item in stream:
                yield item
        except PerdureError:
            raise
        except Exception as error:
            log.error("a model raised an unexpected error: %s", type(error).__name__)
            raise ModelFailed(f"The model failed ({type(error).__name__}).") from error


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
                # pydantic-ai's own advice includes Python code that does not apply here.
                advice = failed.reason or ""
                if missing := _VARIABLE.search(advice):
                    advice = f"Set {missing[1]}, or let `{DEMO}` answer, which needs no key."
                raise Misconfigured(f"Agent {agent.name!r}: {failed.message} {advice}".rstrip()) from None

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
