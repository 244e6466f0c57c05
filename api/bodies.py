"""Bodies of requests: read within bounds of size and time, and parsed into what they ask for."""

import asyncio
import base64
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias, TypeVar, cast

import orjson
from starlette.requests import Request

from perdure.agents import output_schema
from perdure.bounds import DEEPEST, deeper_than, more_than, quoted
from perdure.errors import Invalid, InvalidJson, TooLarge, Unavailable, UnknownLane
from perdure.protocol.deliveries import (
    MAIN,
    QUEUE_MODES,
    DeliveryBody,
    FilePart,
    InputResponse,
    Message,
    Mode,
    Principal,
    QueueMode,
    TextPart,
)
from perdure.protocol.wire import JsonObject
from perdure.runtime.deliveries import new_tags
from perdure.session.queue import read_mode

from .callbacks import check_callback

Fields: TypeAlias = dict[str, Any]
T = TypeVar("T")

#: Larger bodies are parsed in a thread, and count against the shared limit of all large bodies.
LARGE = 262_144
#: The most values in a body. The parser holds the GIL, and a value costs 50 to 1000 times its bytes.
MOST_VALUES = 100_000
#: Greater than the number of any turn or step.
_LARGEST_NUMBER = 2**53
#: How many bodies of the greatest size all requests together may hold at once.
_AT_ONCE = 2
_THREADS = 2


@dataclass(frozen=True)
class AnyJson:
    """A body that may be any JSON value, also null."""

    value: Any = field(repr=False)


class BodyReader:
    """Reads the bodies of one API as JSON objects."""

    def __init__(self, limit: int, *, room: int | None = None) -> None:
        """`limit` is in bytes for one body, `room` for all large bodies that are in use at once."""
        self._limit = limit
        self._room = room if room is not None else _AT_ONCE * limit
        self._held = 0
        # A pool of its own, so that other threaded work does not wait for bodies.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="perdure-body")

    @contextmanager
    def accounted(self, request: Request) -> Generator[None]:
        """Release the room of the request's body when the request ends."""
        request.state.body_bytes = 0
        try:
            yield
        finally:
            self._held -= request.state.body_bytes

    async def read(self, request: Request, parse: Callable[[Fields], T], *, optional: bool = False) -> T:
        """The parsed body. Raises `TooLarge` before more than the limit is stored."""
        raw = await self._bytes(request)
        if optional and not raw.strip():
            return parse({})
        if len(raw) <= LARGE:
            return parse(_fields(raw))
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: parse(_fields(raw)))

    async def read_raw(self, request: Request, parse: Callable[[bytes], T], *, counted: bool) -> T:
        """What `parse` makes of the body, which need not be JSON. `counted`: it is, so its values are counted."""
        raw = await self._bytes(request, counted=counted)
        if len(raw) <= LARGE:
            return parse(raw)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: parse(raw))

    async def read_json(self, request: Request) -> "AnyJson | None":
        """The body, which may be any JSON value; None without one. `InvalidJson` when it is no JSON."""
        raw = await self._bytes(request)
        if not raw.strip():
            return None

        def parse() -> AnyJson:
            try:
                return AnyJson(orjson.loads(raw))
            except orjson.JSONDecodeError as error:
                raise InvalidJson(explained=str(error)) from None

        if len(raw) <= LARGE:
            return parse()
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse)

    async def _bytes(self, request: Request, *, counted: bool = True) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit:
            raise body_too_large(int(declared), self._limit)
        body, values = bytearray(), ValueCount()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limit:
                raise body_too_large(len(body), self._limit)
            if counted:
                values.add(chunk)
            if values.count > MOST_VALUES:
                about = {"limit": MOST_VALUES, "mediaType": "application/json", "values": values.count}
                violations = [{"kind": "too-many-values", **about}]
                raise TooLarge(f"application/json holds more than {MOST_VALUES} values.", violations=violations)
            self._take(request, max(0, len(body) - LARGE))
        return bytes(body)

    def _take(self, request: Request, size: int) -> None:
        """Reserve `size` bytes of the room for this request."""
        more = size - request.state.body_bytes
        if self._held + more > self._room:
            raise Unavailable(f"Large bodies hold {self._held} bytes already.")
        self._held += more
        request.state.body_bytes = size


class ValueCount:
    """Counts the values of a JSON text, piece by piece and without parsing: an upper bound."""

    def __init__(self) -> None:
        self.count = 1
        self._in_string = False
        self._rest = b""

    def add(self, piece: bytes) -> None:
        piece = self._rest + piece
        # An escape must not be split between two pieces.
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._rest = b"\\" if backslashes % 2 else b""
        piece = piece[: len(piece) - len(self._rest)]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[1 if self._in_string else 0 :: 2])
        self.count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        self._in_string ^= len(parts) % 2 == 0


def _fields(raw: bytes) -> Fields:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise InvalidJson from None
    if isinstance(value, list):
        # The contract accepts an array as an object without fields.
        return {}
    if not isinstance(value, dict):
        raise Invalid("Expected a JSON object.")
    return cast("Fields", value)


def body_too_large(size: int, limit: int) -> TooLarge:
    violation = {"byteLength": size, "kind": "too-large", "limit": limit, "mediaType": "application/json"}
    return TooLarge(f"application/json ({size} bytes) exceeds the {limit}-byte upload limit.", violations=[violation])


_ABSENT: Any = object()
#: A session has only a few open requests.
_MOST_RESPONSES = 200
#: Of a message, or of a context. Each part becomes a value in every request to the model, however short it is.
_MOST_PARTS = 1_000
#: The values of changed arguments, all levels together. Validating them can take a hundred microseconds for each, and
#: blocks the event loop.
_MOST_ARGUMENTS = 20_000
_RESPONSE = {"requestId", "optionId", "text"}
# Beyond the contract: an approval may change the arguments, and any answer may say why.
_RESPONSE_EXTENSIONS = {"arguments", "reason"}
_INTERNAL_SCHEMES = ("eve-url:", "eve-sandbox:", "eve-attachment:")


@dataclass(frozen=True)
class CreateBody:
    delivery: DeliveryBody
    mode: Mode
    deadline: datetime | None = None
    idle_seconds: float | None = None
    queue_mode: QueueMode | None = None
    tags: dict[str, str] = field(default_factory=dict[str, str])
    callback: JsonObject | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ContinueBody:
    delivery: DeliveryBody
    token: str
    queue_mode: QueueMode | None
    lane: str = MAIN


# The contract fixes the order of the checks: a body with several faults must be refused for the first one.


def parse_create(fields: Fields, principal: Principal) -> CreateBody:
    message = _message(fields.get("message", _ABSENT))
    context = _client_context(fields.get("clientContext", _ABSENT))
    callback = check_callback(fields["callback"]) if "callback" in fields else None
    # What a message does and what a session is have no name in common.
    queue_mode = read_mode(fields.get("mode"))
    mode = "conversation" if queue_mode else _mode(fields.get("mode", _ABSENT))
    schema = _output_schema(fields.get("outputSchema", _ABSENT))
    if message is None:
        raise Invalid("Missing or empty 'message' field.")
    delivery = DeliveryBody(message=message, client_context=context, output_schema=schema, principal=principal)
    deadline, idle_seconds = _deadline(fields.get("deadline")), _idle_seconds(fields.get("idleSeconds"))
    check_lane(fields)
    tags = new_tags(read_tags(fields.get("tags")))
    return CreateBody(delivery, mode, deadline, idle_seconds, queue_mode, tags, callback)


def parse_continue(fields: Fields, principal: Principal) -> ContinueBody:
    token = fields.get("continuationToken")
    if not isinstance(token, str) or not token:
        raise Invalid("Missing or empty 'continuationToken' field.")
    message = _message(fields.get("message", _ABSENT))
    responses = _input_responses(fields.get("inputResponses", _ABSENT))
    context = _client_context(fields.get("clientContext", _ABSENT))
    schema = _output_schema(fields.get("outputSchema", _ABSENT))
    if message is None and not responses:
        raise Invalid("Expected a non-empty 'message', a non-empty 'inputResponses' array, or both.")
    coalesce = fields.get("coalesce", False)
    if not isinstance(coalesce, bool):
        raise Invalid("Expected 'coalesce' to be a boolean.")
    queue_mode = parse_queue_mode(fields)
    if coalesce and queue_mode not in (None, "collect"):
        raise Invalid("Expected either 'coalesce' or another 'mode' than 'collect'.")
    lane = parse_lane(fields)
    delivery = DeliveryBody(
        message=message,
        client_context=context,
        input_responses=responses,
        output_schema=schema,
        principal=principal,
    )
    return ContinueBody(delivery, token, "collect" if coalesce else queue_mode, lane)


def parse_queue_mode(fields: Fields) -> QueueMode | None:
    """What the message does while its session is busy."""
    name = fields.get("mode")
    mode = read_mode(name)
    if name is not None and mode is None:
        raise Invalid(f"Expected 'mode' to be one of {', '.join(QUEUE_MODES)}.")
    return mode


def parse_lane(fields: Fields) -> str:
    """The lane of its session that reads the message."""
    lane = fields.get("lane", MAIN)
    if not isinstance(lane, str):
        raise Invalid("Expected 'lane' to be a text.")
    return lane


def check_lane(fields: Fields) -> None:
    """Refuse another lane where there is only the first one, or the delivery has one already."""
    if parse_lane(fields) != MAIN:
        raise UnknownLane(f"Here the lane is '{MAIN}': a session begins with it, and no message changes its lane.")


def parse_message(fields: Fields) -> Message | None:
    return _message(fields.get("message", _ABSENT))


def _message(value: Any) -> Message | None:
    if value is _ABSENT:
        return None
    if isinstance(value, str):
        return value or None
    if not isinstance(value, list):
        raise Invalid("Expected 'message' to be a string or an array of text/file parts.")
    parts = cast("list[Any]", value)
    if len(parts) > _MOST_PARTS:
        raise Invalid(f"Expected at most {_MOST_PARTS} parts in 'message'.")
    return tuple(_part(part) for part in parts) or None


def _part(value: Any) -> TextPart | FilePart:
    if not isinstance(value, dict | list):
        raise Invalid("Expected each message part to be an object.")
    part: Fields = cast("Fields", value) if isinstance(value, dict) else {}
    match part.get("type", _ABSENT):
        case "text":
            return _text_part(part)
        case "file":
            return _file_part(part)
        case other:
            raise Invalid(f"Unsupported message part type \"{_as_javascript(other)}\". Use 'text' or 'file'.")


def _text_part(part: Fields) -> TextPart:
    text = part.get("text")
    if not isinstance(text, str) or not text:
        raise Invalid("Text parts require a non-empty 'text' string.")
    return TextPart(text=text)


def _is_readable(data: str) -> bool:
    if data.startswith(("http://", "https://")):
        return True
    head, comma, payload = data.partition(",")
    if data.startswith("data:") and not head.endswith(";base64"):
        return bool(comma)
    try:
        base64.b64decode(payload if data.startswith("data:") else data, validate=True)
    except ValueError:
        return False
    return True


def _file_part(part: Fields) -> FilePart:
    media_type, data, filename = part.get("mediaType"), part.get("data"), part.get("filename")
    if not isinstance(media_type, str) or not media_type:
        raise Invalid("File parts require a non-empty 'mediaType' string.")
    if not isinstance(data, str):
        raise Invalid("File parts require a 'data' string (base64, data URL, or URL).")
    if data.startswith(_INTERNAL_SCHEMES):
        raise Invalid("File part 'data' must not use a framework-internal ref scheme.")
    if not _is_readable(data):
        raise Invalid("File part 'data' is neither valid base64, nor a data URL, nor an http(s) URL.")
    named = filename if isinstance(filename, str) and filename else None
    return FilePart(media_type=media_type, data=data, filename=named)


def _as_javascript(value: Any) -> str:
    """The value as JavaScript writes it in a message."""
    if value is _ABSENT:
        return "undefined"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, dict | list):
        return "[object Object]" if isinstance(value, dict) else ""
    return orjson.dumps(value).decode()


def _client_context(value: Any) -> tuple[str, ...]:
    if value is _ABSENT or value in ("", []):
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        entries = tuple(cast("list[Any]", value))
        if len(entries) > _MOST_PARTS:
            raise Invalid(f"Expected at most {_MOST_PARTS} 'clientContext' entries.")
        if not all(isinstance(entry, str) and entry for entry in entries):
            raise Invalid("Expected 'clientContext' array entries to be non-empty strings.")
        return entries
    if not isinstance(value, dict):
        raise Invalid("Expected 'clientContext' to be a string, string array, or JSON object.")
    if deeper_than(value, DEEPEST):
        raise Invalid("Expected 'clientContext' to be a JSON-serializable object.")
    return (orjson.dumps(value).decode(),)


def _mode(value: Any) -> Mode:
    if value is _ABSENT:
        return "conversation"
    if value not in ("conversation", "task"):
        raise Invalid("Expected 'mode' to be either 'conversation' or 'task'.")
    return value


def _deadline(value: Any) -> datetime | None:
    if value is None:
        return None
    try:
        deadline = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise Invalid("Expected 'deadline' to be a time in ISO 8601, with its time zone.") from None
    if deadline.tzinfo is None:
        raise Invalid("Expected 'deadline' to be a time in ISO 8601, with its time zone.")
    return deadline


def _idle_seconds(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise Invalid("Expected 'idleSeconds' to be a number.")
    return value


def _output_schema(value: Any) -> JsonObject | None:
    if value is _ABSENT:
        return None
    if not isinstance(value, dict) or deeper_than(value, DEEPEST):
        raise Invalid("Expected 'outputSchema' to be a JSON-serializable object.")
    schema = cast("JsonObject", value)
    if problem := output_schema.problem(schema):
        raise Invalid(f"The 'outputSchema' cannot be used: {problem}.")
    return schema


def _input_responses(value: Any) -> tuple[InputResponse, ...]:
    if value is _ABSENT:
        return ()
    if not isinstance(value, list) or not value:
        raise Invalid("Expected 'inputResponses' to be a non-empty array.")
    entries = cast("list[Any]", value)
    if len(entries) > _MOST_RESPONSES:
        raise Invalid(f"Expected at most {_MOST_RESPONSES} 'inputResponses'.")
    return tuple(_input_response(entry) for entry in entries)


def _input_response(value: Any) -> InputResponse:
    fields: Fields = cast("Fields", value) if isinstance(value, dict) else {}
    closed = "requestId" in fields and fields.keys() <= _RESPONSE | _RESPONSE_EXTENSIONS
    if not closed or not all(isinstance(fields[name], str) for name in fields.keys() - {"arguments"}):
        raise Invalid("Expected every 'inputResponses' entry to match the HITL response schema.")
    return _response(fields["requestId"], fields)


def parse_answer(request_id: str, fields: Fields) -> InputResponse:
    """The body of an answer to one request. An empty answer is refused, because it would be a denial."""
    # Any answer except `approve` is a denial, which cannot be undone. So a misspelled field must not be ignored.
    if unknown := sorted(fields.keys() - _RESPONSE - _RESPONSE_EXTENSIONS):
        known = "'optionId', 'text', 'arguments' and 'reason'"
        raise Invalid(f"Unknown field {_as_javascript(unknown[0])!r}; an answer has {known}.")
    if fields.get("optionId") is None and fields.get("text") is None:
        raise Invalid("Expected an 'optionId' ('approve' or 'deny' for an approval) or a 'text'.")
    for name in ("optionId", "text", "reason"):
        if not isinstance(fields.get(name, ""), str):
            raise Invalid(f"Expected '{name}' to be a string.")
    return _response(request_id, fields)


def _response(request_id: str, fields: Fields) -> InputResponse:
    return InputResponse(
        request_id=request_id,
        option_id=fields.get("optionId"),
        text=fields.get("text"),
        arguments=_arguments(fields["arguments"]) if "arguments" in fields else None,
        reason=fields.get("reason"),
    )


def _arguments(value: Any) -> JsonObject:
    if not isinstance(value, dict) or deeper_than(value, DEEPEST):
        raise Invalid("Expected 'arguments' to be a JSON object.")
    if more_than(value, _MOST_ARGUMENTS):
        raise Invalid(f"Expected 'arguments' to hold at most {_MOST_ARGUMENTS} values.")
    return cast("JsonObject", value)


def read_tags(value: Any) -> dict[str, Any]:
    """The tags as they were given; null is a tag that is taken away. Names and texts are checked where they are set."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Invalid("Expected 'tags' to be an object of texts.")
    return cast("dict[str, Any]", value)
