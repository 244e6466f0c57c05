"""Spans and metrics of what Perdure does; `names` has their names.

A span has ids, names, counts and durations. It has content only if the operator has chosen traces as a destination of
it. A metric never has content, nor ids of sessions or users: its labels are declared names, and their number is
bounded. Without an SDK all of this costs next to nothing.
"""

import hashlib
import hmac
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Token
from dataclasses import dataclass, field
from time import perf_counter, time_ns
from typing import Literal, TypeAlias

from opentelemetry import context, metrics, propagate, trace
from opentelemetry._logs import SeverityNumber, get_logger
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from perdure.bounds import quoted
from perdure.protocol.deliveries import Principal
from perdure.protocol.events import Usage
from perdure.protocol.requests import CallRef, Coordinates, TurnRequest, TurnResult

from . import names
from .names import CURRENT, NameSet

Attributes: TypeAlias = dict[str, AttributeValue]
Users: TypeAlias = Literal["off", "hash", "id"]

#: Where content may go. Never into metrics.
Destination: TypeAlias = Literal["traces", "logs"]

#: The most values of one label in a process. Agents, tools and models are declared, so this is for what providers send.
_MOST_VALUES = 200
_OTHER = "_OTHER"
#: The longest name that others give, in characters.
_LONGEST = 200

#: As the conventions advise.
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TURN_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1_800, 3_600)
_TOKENS = (1, 4, 16, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216, 67_108_864)
_CALLS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Choices:
    """What the operator has chosen."""

    sets: tuple[NameSet, ...] = (CURRENT,)
    content: frozenset[Destination] = frozenset()
    #: The longest attribute with content, in bytes.
    content_bytes: int = 16_384
    users: Users = "off"
    #: The key of the hashes of users.
    user_key: bytes = field(default=b"", repr=False)

    def user(self, principal: Principal) -> Attributes:
        match self.users:
            case "off":
                return {}
            case "id":
                return {names.USER_ID: quoted(principal.subject or principal.principal_id, _LONGEST)}
            case "hash":
                digest = hmac.new(self.user_key, f"telemetry|{principal.owner}".encode(), hashlib.sha256)
                return {names.USER_HASH: digest.hexdigest()[:32]}


@dataclass
class TurnCounts:
    """What a turn has called so far."""

    model_calls: int = 0
    tool_calls: int = 0


meter = metrics.get_meter(names.SCOPE)
_turns = meter.create_counter(names.TURNS, description="Turns that ended, by outcome")
_attention = meter.create_counter(names.ATTENTION, description="Sessions that needed attention, by reason")
_steps = meter.create_counter(names.STEPS, description="Model calls that were answered")
_tool_calls = meter.create_counter(names.TOOL_CALLS, description="Tool calls that were settled, by outcome")
_open_streams = meter.create_up_down_counter(names.OPEN_STREAMS, description="Event streams being read")


def in_seconds(name: str, description: str, buckets: tuple[float, ...] = _SECONDS) -> metrics.Histogram:
    return meter.create_histogram(name, unit="s", description=description, explicit_bucket_boundaries_advisory=buckets)


def _tokens(name: str, description: str) -> metrics.Histogram:
    return meter.create_histogram(
        name, unit="{token}", description=description, explicit_bucket_boundaries_advisory=_TOKENS
    )


_request_seconds = in_seconds(names.HTTP_SECONDS, "HTTP requests")


class Measures:
    """The metrics whose names depend on the set."""

    def __init__(self, given: NameSet) -> None:
        self.names = given
        self.model_seconds = in_seconds(given.model_seconds, "Model calls")
        self.first_chunk = in_seconds(given.first_chunk_seconds, "Until the first chunk of a reply")
        self.tool_seconds = in_seconds(given.tool_seconds, "Tool calls")
        self._per_type = _tokens(names.TOKEN_USAGE, "Tokens of a model call")
        self._used = {
            name: meter.create_counter(name, unit="{token}", description="Tokens of model calls")
            for name in (
                names.USED_INPUT,
                names.USED_OUTPUT,
                names.USED_CACHE_READ,
                names.USED_CACHE_WRITE,
                names.USED_REASONING,
            )
        }
        self._input = _tokens(names.CALL_INPUT, "Input tokens of a model call")
        self._output = _tokens(names.CALL_OUTPUT, "Output tokens of a model call")
        self._invocation = in_seconds(names.INVOCATION_SECONDS, "Turns", _TURN_SECONDS)
        self._calls = {
            name: meter.create_histogram(
                name, unit="{call}", description="Calls of a turn", explicit_bucket_boundaries_advisory=_CALLS
            )
            for name in (names.INVOCATION_MODEL_CALLS, names.INVOCATION_TOOL_CALLS)
        }

    def used(self, usage: Usage, reasoning: int, labels: Attributes) -> None:
        if self.names.one_token_histogram:
            self._per_type.record(usage.input_tokens, {**labels, names.TOKEN_TYPE: "input"})
            self._per_type.record(usage.output_tokens, {**labels, names.TOKEN_TYPE: "output"})
            return
        counts = {
            names.USED_INPUT: usage.input_tokens,
            names.USED_OUTPUT: usage.output_tokens,
            names.USED_CACHE_READ: usage.cache_read_tokens,
            names.USED_CACHE_WRITE: usage.cache_write_tokens,
            names.USED_REASONING: reasoning,
        }
        for name, count in counts.items():
            # Providers do not say of what kind the tokens are.
            self._used[name].add(count, {**labels, names.TOKEN_MODALITY: "unknown"})
        self._input.record(usage.input_tokens, labels)
        self._output.record(usage.output_tokens, labels)

    def invoked(self, seconds: float, counts: "TurnCounts", labels: Attributes) -> None:
        if not self.names.invocations:
            return
        self._invocation.record(seconds, labels)
        named = {names.AGENT: labels[names.AGENT]}
        self._calls[names.INVOCATION_MODEL_CALLS].record(counts.model_calls, named)
        self._calls[names.INVOCATION_TOOL_CALLS].record(counts.tool_calls, named)


class Chosen:
    """The choices of this process, with the metrics that belong to them."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.measures = tuple(Measures(each) for each in choices.sets)
        self._values: dict[str, set[str]] = {}

    def bounded(self, labels: Mapping[str, AttributeValue]) -> Attributes:
        """The labels; a value beyond the bound of its label becomes `_OTHER`."""
        return {name: self._bounded(name, value) if isinstance(value, str) else value for name, value in labels.items()}

    def _bounded(self, name: str, value: str) -> str:
        known = self._values.setdefault(name, set())
        if value not in known:
            if len(known) >= _MOST_VALUES:
                return _OTHER
            known.add(value)
        return value


_chosen = [Chosen(Choices())]


def choose(choices: Choices) -> None:
    """Emit what the operator has chosen, from now on in this process."""
    _chosen[:] = [Chosen(choices)]


def chosen() -> Chosen:
    return _chosen[0]


class Spanned:
    """A running span and the attributes for its metrics."""

    def __init__(self, span: Span, attributes: Attributes) -> None:
        self._span = span
        self.attributes = attributes
        self.began = perf_counter()

    def mark(self, more: Mapping[str, AttributeValue]) -> None:
        self.attributes.update(more)
        self._span.set_attributes(more)

    def fail(self, code: str) -> None:
        """Mark the span as failed with the error's code, never with its text."""
        self.mark({names.ERROR: code})
        self._span.set_status(Status(StatusCode.ERROR))

    def show(self, event: str, content: Mapping[str, str]) -> None:
        """Give content to the destinations that the operator has chosen for it."""
        for destination in chosen().choices.content:
            match destination:
                case "traces":
                    self._span.set_attributes(content)
                case "logs":
                    get_logger(names.SCOPE).emit(
                        timestamp=time_ns(),
                        context=trace.set_span_in_context(self._span),
                        severity_number=SeverityNumber.INFO,
                        event_name=event,
                        attributes={**self.attributes, **content},
                    )

    def labels(self, *named: str) -> Attributes:
        return chosen().bounded({name: self.attributes[name] for name in named if name in self.attributes})


# --- turns --------------------------------------------------------------------------------------------------


@dataclass
class InvokedTurn:
    """A turn that runs in a workflow."""

    span: Span
    began: float
    counts: TurnCounts
    labels: Attributes = field(default_factory=dict[str, AttributeValue])

    def ended(self, result: TurnResult) -> None:
        if result.failure:
            self.failed(result.failure.code)
        self.became("cancelled" if result.cancelled else "failed" if result.failure else _outcome_of(result))

    def became(self, outcome: str) -> None:
        self.labels[names.OUTCOME] = outcome
        self.span.set_attribute(names.OUTCOME, outcome)

    def failed(self, code: str) -> None:
        self.labels[names.ERROR] = code
        self.span.set_attribute(names.ERROR, code)
        self.span.set_status(Status(StatusCode.ERROR))


def _outcome_of(result: TurnResult) -> str:
    if result.awaited is not None:
        return "dispatched"
    if result.silent:
        return "silent"
    return "parked" if result.open else "completed"


@contextmanager
def turn(
    request: TurnRequest, counts: TurnCounts, now: Callable[[], float], replays: Callable[[], bool]
) -> Generator[InvokedTurn]:
    """The span of a turn, in the trace of the delivery that began it.

    Safe in a workflow: `now` is its clock, and while it replays nothing is measured a second time.
    """
    attributes: Attributes = {
        names.OPERATION: "invoke_agent",
        names.CONVERSATION_ID: request.session_id,
        names.SESSION_ID: request.root_session_id or request.session_id,
        names.AGENT: request.agent,
        names.TURN: request.turn,
    }
    parent = propagate.extract({"traceparent": request.traceparent} if request.traceparent else {})
    tracer = trace.get_tracer(names.SCOPE)
    span = tracer.start_span(f"invoke_agent {request.agent}", context=parent, attributes=attributes)
    token = context.attach(trace.set_span_in_context(span, parent))
    turned = InvokedTurn(span, now(), counts)
    try:
        yield turned
    except GeneratorExit:
        # The workflow was evicted from this worker's cache. The worker that ends the turn ends the span.
        raise
    except BaseException as error:
        turned.failed(type(error).__name__)
        _end(turned, token, now, replays, request.agent)
        raise
    _end(turned, token, now, replays, request.agent)


def _end(
    turned: InvokedTurn, token: Token[Context], now: Callable[[], float], replays: Callable[[], bool], agent: str
) -> None:
    context.detach(token)
    turned.span.end()
    if replays():
        return
    labels = chosen().bounded({names.AGENT: agent, **turned.labels})
    for each in chosen().measures:
        each.invoked(max(0.0, now() - turned.began), turned.counts, labels)


def turn_ended(agent: str, outcome: str) -> None:
    _turns.add(1, chosen().bounded({names.AGENT: agent, names.OUTCOME: outcome}))


def needs_attention(reason: str) -> None:
    _attention.add(1, chosen().bounded({names.OUTCOME: reason}))


# --- model calls and tool calls -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What an attempt works at."""

    at: Coordinates
    agent: str
    attempt: int
    #: The session at the top of its family.
    root: str
    #: For whom it works.
    user: Principal

    @property
    def attributes(self) -> Attributes:
        return {
            names.CONVERSATION_ID: self.at.session_id,
            names.SESSION_ID: self.root,
            names.AGENT: self.agent,
            names.TURN: self.at.turn,
            names.STEP: self.at.step,
            names.ATTEMPT: self.attempt,
            **chosen().choices.user(self.user),
        }


_MODEL_LABELS = (names.OPERATION, names.PROVIDER, names.REQUEST_MODEL, names.RESPONSE_MODEL)


class ModelSpan(Spanned):
    """A running model call. What is known of it when it ends is measured, also when it has failed."""

    def __init__(self, spanned: Spanned) -> None:
        super().__init__(spanned._span, spanned.attributes)
        self._first_chunk: float | None = None
        self._usage, self._reasoning = Usage(), 0

    def chunk(self) -> None:
        """The provider has sent something."""
        if self._first_chunk is None:
            self._first_chunk = perf_counter() - self.began
            self.mark({names.FIRST_CHUNK: self._first_chunk})

    def used(self, usage: Usage, reasoning: int = 0) -> None:
        """What the provider has counted so far."""
        self._usage, self._reasoning = usage, reasoning

    def replied(self, model: str | None, response_id: str | None, finish_reason: str) -> None:
        known: Attributes = {names.FINISH_REASONS: [finish_reason]}
        known |= {names.RESPONSE_MODEL: quoted(model, _LONGEST)} if model else {}
        known |= {names.RESPONSE_ID: quoted(response_id, _LONGEST)} if response_id else {}
        self.mark(known)
        _steps.add(1, self.labels(*_MODEL_LABELS[:3]))

    def measure(self) -> None:
        usage = self._usage
        tokens = {names.INPUT_TOKENS: usage.input_tokens, names.OUTPUT_TOKENS: usage.output_tokens}
        tokens |= {names.CACHE_READ_TOKENS: usage.cache_read_tokens, names.REASONING_TOKENS: self._reasoning}
        tokens |= {each.cache_write_tokens: usage.cache_write_tokens for each in chosen().choices.sets}
        self.mark(tokens)
        labels = self.labels(*_MODEL_LABELS)
        for each in chosen().measures:
            each.used(usage, self._reasoning, labels)
            if self._first_chunk is not None:
                each.first_chunk.record(self._first_chunk, labels)


@contextmanager
def model_call(work: Work, model: str) -> Generator[ModelSpan]:
    """The span of a model call."""
    provider, name = _provider_and_model(model)
    base: Attributes = {names.OPERATION: "chat", names.PROVIDER: provider, names.REQUEST_MODEL: name}
    attributes = {**base, names.REQUEST_STREAM: True, **work.attributes}
    seconds = [each.model_seconds for each in chosen().measures]
    with _timed(f"chat {name}", SpanKind.CLIENT, attributes, seconds, keep=_MODEL_LABELS) as spanned:
        asked = ModelSpan(spanned)
        try:
            yield asked
        finally:
            asked.measure()


def _provider_and_model(model: str) -> tuple[str, str]:
    """The provider, as the conventions name it, and the model of a name like `openai:gpt-5`."""
    provider, _, name = model.partition(":")
    return (names.PROVIDERS.get(provider, provider), name) if name else (model, model)


def tool_call(work: Work, call: CallRef) -> AbstractContextManager[Spanned]:
    """The span of a tool call."""
    base: Attributes = {names.OPERATION: "execute_tool", names.TOOL: call.tool, names.TOOL_TYPE: "function"}
    attributes = {**base, **work.attributes, names.CALL_ID: call.call_id}
    seconds = [each.tool_seconds for each in chosen().measures]
    keep = (names.OPERATION, names.TOOL, names.TOOL_TYPE)
    return _timed(f"execute_tool {call.tool}", SpanKind.INTERNAL, attributes, seconds, keep=keep)


def tool_settled(tool: str, status: str) -> None:
    _tool_calls.add(1, chosen().bounded({names.TOOL: tool, names.OUTCOME: status}))


# --- HTTP ---------------------------------------------------------------------------------------------------


def http_request(method: str, route: str, headers: Mapping[str, str]) -> AbstractContextManager[Spanned]:
    """The span of an HTTP request in the caller's trace. It has the name of the route: a path contains ids."""
    base: Attributes = {names.METHOD: method, names.ROUTE: route}
    parent = propagate.extract(headers)
    keep = (names.METHOD, names.ROUTE, names.STATUS_CODE)
    return _timed(f"{method} {route}", SpanKind.SERVER, base, [_request_seconds], keep=keep, parent=parent)


@contextmanager
def open_stream() -> Generator[None]:
    _open_streams.add(1)
    try:
        yield
    finally:
        _open_streams.add(-1)


@contextmanager
def _timed(
    name: str,
    kind: SpanKind,
    attributes: Attributes,
    seconds: Sequence[metrics.Histogram],
    *,
    keep: tuple[str, ...],
    parent: Context | None = None,
) -> Generator[Spanned]:
    """A span, and its duration with the attributes of `keep` and its error."""
    tracer = trace.get_tracer(names.SCOPE)
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
            lasted = perf_counter() - spanned.began
            labels = spanned.labels(*keep, names.ERROR)
            for each in seconds:
                each.record(lasted, labels)
