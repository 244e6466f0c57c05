"""Names of spans, attributes and metrics, in one place.

The `gen_ai.*` conventions are still in development and will change, so their names are in this module only.
A span has ids, names, counts and durations, and never content. Without an SDK all of this costs next to nothing.
"""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import Token
from time import perf_counter

from opentelemetry import context, metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from perdure.protocol.events import Usage
from perdure.protocol.requests import CallRef, Coordinates, TurnRequest

SCOPE = "perdure"

SESSION_ID = "gen_ai.conversation.id"
AGENT = "gen_ai.agent.name"
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
TOKEN_TYPE = "gen_ai.token.type"
TOOL = "gen_ai.tool.name"
CALL_ID = "gen_ai.tool.call.id"
ERROR = "error.type"
TURN = "perdure.turn"
STEP = "perdure.step"
ATTEMPT = "perdure.attempt"
OUTCOME = "perdure.outcome"

_meter = metrics.get_meter(SCOPE)
_turns = _meter.create_counter("perdure.turns", description="Turns that ended, by outcome")
_attention = _meter.create_counter("perdure.attention", description="Sessions that needed attention, by reason")
_steps = _meter.create_counter("perdure.steps", description="Model calls that were recorded")
_calls = _meter.create_counter("perdure.tool_calls", description="Tool calls that were settled, by outcome")
_tokens = _meter.create_histogram("gen_ai.client.token.usage", unit="{token}", description="Tokens of a model call")
_model_seconds = _meter.create_histogram("gen_ai.client.operation.duration", unit="s", description="Model calls")
_tool_seconds = _meter.create_histogram("perdure.tool.duration", unit="s", description="Tool calls")
_request_seconds = _meter.create_histogram("http.server.request.duration", unit="s", description="HTTP requests")
_streams = _meter.create_up_down_counter("perdure.streams.open", description="Event streams being read")


class Spanned:
    """A running span and the attributes for its metrics."""

    def __init__(self, span: Span, attributes: dict[str, AttributeValue]) -> None:
        self._span = span
        self.attributes = attributes

    def mark(self, more: Mapping[str, AttributeValue]) -> None:
        self.attributes.update(more)
        self._span.set_attributes(more)

    def fail(self, code: str) -> None:
        """Mark the span as failed with the error's code, never with its text."""
        self.mark({ERROR: code})
        self._span.set_status(Status(StatusCode.ERROR))


@contextmanager
def turn(request: TurnRequest) -> Generator[None]:
    """The span of a turn, in the trace of the delivery that began it. Safe in a workflow: it reads no clock."""
    attributes: dict[str, AttributeValue] = {
        OPERATION: "invoke_agent",
        SESSION_ID: request.session_id,
        AGENT: request.agent,
        TURN: request.turn,
    }
    parent = propagate.extract({"traceparent": request.traceparent} if request.traceparent else {})
    span = trace.get_tracer(SCOPE).start_span(f"invoke_agent {request.agent}", context=parent, attributes=attributes)
    token = context.attach(trace.set_span_in_context(span, parent))
    try:
        yield
    except GeneratorExit:
        # The workflow was evicted from this worker's cache. The worker that ends the turn ends the span.
        raise
    except BaseException as error:
        span.set_attribute(ERROR, type(error).__name__)
        _end(span, token)
        raise
    _end(span, token)


def _end(span: Span, token: Token[Context]) -> None:
    context.detach(token)
    span.end()


def model_call(at: Coordinates, agent: str, model: str, attempt: int) -> AbstractContextManager[Spanned]:
    """The span of a model call."""
    provider, _, name = model.rpartition(":")
    base: dict[str, AttributeValue] = {OPERATION: "chat", PROVIDER: provider or name, REQUEST_MODEL: name}
    where = _where(at, agent, attempt)
    return _timed(f"chat {name}", SpanKind.CLIENT, {**base, **where}, _model_seconds, keep=base)


def _where(at: Coordinates, agent: str, attempt: int) -> dict[str, AttributeValue]:
    return {SESSION_ID: at.session_id, AGENT: agent, TURN: at.turn, STEP: at.step, ATTEMPT: attempt}


def model_replied(spanned: Spanned, usage: Usage, finish_reason: str) -> None:
    spanned.mark(
        {FINISH_REASONS: [finish_reason], INPUT_TOKENS: usage.input_tokens, OUTPUT_TOKENS: usage.output_tokens}
    )
    base = {key: spanned.attributes[key] for key in (OPERATION, PROVIDER, REQUEST_MODEL)}
    _steps.add(1, base)
    _tokens.record(usage.input_tokens, {**base, TOKEN_TYPE: "input"})
    _tokens.record(usage.output_tokens, {**base, TOKEN_TYPE: "output"})


def tool_call(at: Coordinates, agent: str, call: CallRef, attempt: int) -> AbstractContextManager[Spanned]:
    """The span of a tool call."""
    base: dict[str, AttributeValue] = {OPERATION: "execute_tool", TOOL: call.tool}
    where = {**_where(at, agent, attempt), CALL_ID: call.call_id}
    return _timed(f"execute_tool {call.tool}", SpanKind.INTERNAL, {**base, **where}, _tool_seconds, keep=base)


def tool_settled(tool: str, status: str) -> None:
    _calls.add(1, {TOOL: tool, OUTCOME: status})


def turn_ended(agent: str, outcome: str) -> None:
    _turns.add(1, {AGENT: agent, OUTCOME: outcome})


def needs_attention(reason: str) -> None:
    _attention.add(1, {OUTCOME: reason})


def http_request(method: str, route: str, headers: Mapping[str, str]) -> AbstractContextManager[Spanned]:
    """The span of an HTTP request in the caller's trace. It has the name of the route: a path contains ids."""
    base: dict[str, AttributeValue] = {"http.request.method": method, "http.route": route}
    parent = propagate.extract(headers)
    return _timed(f"{method} {route}", SpanKind.SERVER, base, _request_seconds, keep=base, parent=parent)


@contextmanager
def open_stream() -> Generator[None]:
    _streams.add(1)
    try:
        yield
    finally:
        _streams.add(-1)


@contextmanager
def _timed(
    name: str,
    kind: SpanKind,
    attributes: dict[str, AttributeValue],
    seconds: metrics.Histogram,
    *,
    keep: Mapping[str, AttributeValue],
    parent: Context | None = None,
) -> Generator[Spanned]:
    tracer = trace.get_tracer(SCOPE)
    began = perf_counter()
    # The text of an exception may be content, so the span gets only its type.
    with tracer.start_as_current_span(
        name,
        context=parent,
        kind=kind,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        spanned = Spanned(span, dict(attributes))
        try:
            yield spanned
        except BaseException as error:
            spanned.fail(type(error).__name__)
            raise
        finally:
            failed = {ERROR: spanned.attributes[ERROR]} if ERROR in spanned.attributes else {}
            seconds.record(perf_counter() - began, {**keep, **failed})
