"""The parts of a request: the agent and session of its path, the parameters of its query, the limits of its body."""

import functools
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any, TypeAlias
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from perdure.agents.agent import Agent
from perdure.agents.registry import AgentRegistry
from perdure.bounds import quoted
from perdure.errors import Invalid, PerdureError, SessionNotFound, TooLarge, UnsupportedMedia
from perdure.protocol.deliveries import DeliveryBody, FilePart, InputResponse, Principal
from perdure.runtime.deliveries import new_tags
from perdure.runtime.sessions import Sessions
from perdure.session.state import read_turn_number
from perdure.settings import Settings
from perdure.store.engine.rows import stamp
from perdure.store.streams import JSON, media_type
from perdure.store.values import SessionRow
from perdure.telemetry import spans

from .bodies import BodyReader
from .responses import dumps

#: Seconds that a request waits for the result of what it has begun. Then it gets the receipt.
WAIT = 60.0

_KEY_LIMIT = 255

#: Entries of a page: at most, and without a limit of the caller.
_MOST = 200
_FEW = 50

_LONGEST_STAMP = 40
_LONGEST_SEARCH = 200

#: What a path may have as it is.
_PATH = "/:@!$&'()*+,;=~"
_PERCENT_ENCODED = re.compile("%[0-9A-Fa-f]{2}")
#: A message can have a thousand files, each with its own name in the error.
_MOST_VIOLATIONS = 5


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def traced(bodies: BodyReader, method: str, path: str, handler: Handler) -> Handler:
    """The handler in a span of its own, with the memory of the request's body accounted."""

    @functools.wraps(handler)
    async def observed(request: Request) -> Response:
        # The caller's trace, if it has one, continues in the turn that the request causes.
        with spans.http_request(method, path, request.headers) as span, bodies.accounted(request):
            response = await handler(request)
            span.mark({"http.response.status_code": response.status_code})
            return response

    # FastAPI would resolve annotations in the handler's module; ours need no resolution.
    del observed.__wrapped__
    return observed


class Scopes:
    """Resolves the path. The bare prefix starts sessions of the default agent, and serves sessions of all agents."""

    def __init__(self, agents: AgentRegistry, sessions: Sessions) -> None:
        self._agents = agents
        self._sessions = sessions

    def agent(self, request: Request) -> Agent:
        """The agent of the prefix; `AgentNotFound` when no agent of this name is served."""
        name = request.path_params.get("agent")
        return self._agents.default if name is None else self._agents[name]

    async def session(self, request: Request, principal: Principal) -> SessionRow:
        """The session of the path, if it belongs to the caller and to the agent of the prefix."""
        params = request.path_params
        row = await self._sessions.get(known_id(params["session_id"]), principal)
        if params.get("agent") not in (None, row.agent):
            raise SessionNotFound
        return row

    async def member(self, request: Request, principal: Principal) -> SessionRow:
        """The same, or a session whose root belongs to the agent of the prefix: callers of that see its events."""
        row = await self._sessions.get(known_id(request.path_params["session_id"]), principal)
        agent = request.path_params.get("agent")
        if agent in (None, row.agent):
            return row
        if row.root_id is None or (await self._sessions.get(row.root_id, principal)).agent != agent:
            raise SessionNotFound
        return row


def known_id(text: str, missing: type[PerdureError] = SessionNotFound) -> str:
    """The id; `missing` is raised for a text that cannot be an id."""
    if not (text.isascii() and text.isprintable()):
        raise missing
    return text


def own_url(request: Request) -> str:
    """The URL of the request without its query. What the path has decoded is encoded again."""
    # Behind a proxy that ends TLS, the request itself says http, and maybe another host.
    base = request.app.state.public_url or f"{request.url.scheme}://{request.url.netloc}"
    # `request.url` leaves a percent sign and a space as they are: a client would read another path there.
    return f"{base}{quote(request.scope['path'], safe=_PATH)}"


def idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _KEY_LIMIT:
        raise Invalid(f"Expected the Idempotency-Key header to have 1 to {_KEY_LIMIT} characters.")
    return key


def name(field: str, given: str | None) -> str | None:
    if given is not None and not given.isprintable():
        raise Invalid(f"Expected '{field}' to be a name.")
    return given


def one_of(name: str, choices: tuple[Any, ...], given: str | None) -> Any:
    if given is not None and given not in choices:
        raise Invalid(f"Expected '{name}' to be one of {', '.join(choices)}.")
    return given


def between(name: str, given: str | None, least: int, most: int, otherwise: int) -> int:
    if given is None:
        return otherwise
    if not (given.isascii() and given.isdecimal() and len(given) <= len(str(most)) and least <= int(given) <= most):
        raise Invalid(f"Expected '{name}' to be an integer from {least} to {most}.")
    return int(given)


def limit(given: str | None) -> int:
    return between("limit", given, 1, _MOST, _FEW)


def moment(name: str, given: str | None) -> str | None:
    """A time stamp with its time zone, in the form of those that are stored."""
    if given is None:
        return None
    try:
        # A longer text is none, and is not parsed.
        parsed = datetime.fromisoformat(given[:_LONGEST_STAMP])
        if parsed.tzinfo is not None:
            return stamp(parsed.astimezone(UTC))
    except (ValueError, OverflowError):
        pass
    raise Invalid(f"Expected '{name}' to be a time with its time zone, like 2026-01-31T12:00:00Z.")


def words(name: str, given: str | None) -> str | None:
    """What to search for."""
    if given is not None and not 0 < len(given) <= _LONGEST_SEARCH:
        raise Invalid(f"Expected '{name}' to have 1 to {_LONGEST_SEARCH} characters.")
    return given


def turn(given: str | None) -> int | None:
    """A turn by its number or its id: `3` or `turn_3`."""
    if given is None:
        return None
    number = read_turn_number({"turnId": given if given.startswith("turn_") else f"turn_{given}"})
    if number is None:
        raise Invalid(f"Expected 'turn' to name a turn, like turn_3, not {quoted(given)}.")
    return number


def tag(given: Sequence[str]) -> tuple[str, str] | None:
    """A tag by its name and its text: `job:nightly`."""
    if not given:
        return None
    name, colon, text = given[0].partition(":")
    if len(given) > 1 or not colon:
        raise Invalid("Expected 'tag' to be one tag, like job:nightly.")
    [found] = new_tags({name: text}).items()
    return found


def waits_for_result(request: Request) -> bool:
    given = request.query_params.getlist("wait")
    if given not in ([], ["result"]):
        raise Invalid("Expected 'wait' to be 'result'.")
    return bool(given)


def check_json(request: Request) -> None:
    if media_type(request.headers.get("content-type", "")) != JSON:
        raise UnsupportedMedia("Expected a body of the type application/json.")


@dataclass(frozen=True)
class RequestLimits:
    message_bytes: int
    file_bytes: int
    # None: every type. An entry may end in `/*`.
    media_types: tuple[str, ...] | None = None

    @classmethod
    def of(cls, settings: Settings) -> "RequestLimits":
        types = tuple(filter(None, (entry.strip() for entry in settings.file_media_types.split(","))))
        return cls(
            message_bytes=settings.max_message_bytes,
            file_bytes=settings.max_file_bytes,
            media_types=None if "*/*" in types else types,
        )

    def check(self, body: DeliveryBody) -> None:
        """Raise `TooLarge` or `UnsupportedMedia`, with the first few violations and the text of the first one."""
        found = chain((violation for part in _files(body) for violation in self._file(part)), self._text(body))
        violations = list(islice(found, _MOST_VIOLATIONS))
        if not violations:
            return
        first = violations[0]
        error = TooLarge if first["kind"] == "too-large" else UnsupportedMedia
        raise error(_sentence(first), violations=violations)

    def _file(self, part: FilePart) -> list[dict[str, Any]]:
        named = {} if part.filename is None else {"filename": quoted(part.filename)}
        about = {"mediaType": quoted(part.media_type), **named}
        if not self._allows(part.media_type):
            return [{"allowedMediaTypes": list(self.media_types or ()), "kind": "disallowed-media-type", **about}]
        size = known_size(part.data)
        if size is not None and size > self.file_bytes:
            return [{"byteLength": size, "kind": "too-large", "limit": self.file_bytes, **about}]
        return []

    def _allows(self, media_type: str) -> bool:
        if self.media_types is None:
            return True
        wanted = media_type.lower()
        return any(
            wanted.startswith(allowed.lower()[:-1]) if allowed.endswith("/*") else wanted == allowed.lower()
            for allowed in self.media_types
        )

    def _text(self, body: DeliveryBody) -> Iterator[dict[str, Any]]:
        size = sum(len(text.encode()) for text in _texts(body))
        if size > self.message_bytes:
            yield {"byteLength": size, "kind": "too-large", "limit": self.message_bytes, "mediaType": "text/plain"}


def known_size(data: str) -> int | None:
    """The decoded size of base64 text or of a data URL; None for a URL, whose size is not known yet."""
    if data.startswith(("http://", "https://")):
        return None
    if not data.startswith("data:"):
        return _base64_size(data)
    head, comma, payload = data.partition(",")
    if not comma:
        return None
    return _base64_size(payload) if head.endswith(";base64") else _percent_decoded_size(payload)


def _percent_decoded_size(text: str) -> int:
    """The decoded size of percent-encoded text. It is not decoded for this, because that takes a second per 10 MB."""
    return len(text.encode(errors="surrogatepass")) - 2 * sum(1 for _ in _PERCENT_ENCODED.finditer(text))


def _base64_size(text: str) -> int:
    # Invalid characters at the end are stored too, so they count.
    end = text[-8:].rstrip()
    padding = 2 if end.endswith("==") else 1 if end.endswith("=") else 0
    return max(0, len(text) * 3 // 4 - padding)


def _files(body: DeliveryBody) -> list[FilePart]:
    if body.message is None or isinstance(body.message, str):
        return []
    return [part for part in body.message if isinstance(part, FilePart)]


def _texts(body: DeliveryBody) -> list[str]:
    """Everything that is stored of a delivery, except the bytes of its files."""
    texts = list(body.client_context)
    if body.output_schema is not None:
        texts.append(dumps(body.output_schema).decode())
    texts.extend(text for part in _files(body) for text in _file_texts(part))
    texts.extend(text for response in body.input_responses for text in _response_texts(response))
    match body.message:
        case None:
            pass
        case str(message):
            texts.append(message)
        case parts:
            texts.extend(part.text for part in parts if not isinstance(part, FilePart))
    return texts


def _file_texts(part: FilePart) -> list[str]:
    """The texts of a file: its type, its name, and its URL."""
    named = [part.media_type, part.filename or ""]
    if known_size(part.data) is None:
        return [*named, part.data]
    head, comma, _ = part.data.partition(",")
    return [*named, head] if comma and part.data.startswith("data:") else named


def _response_texts(response: InputResponse) -> list[str]:
    values = (response.request_id, response.option_id, response.text, response.reason)
    texts = [text for text in values if text is not None]
    return texts if response.arguments is None else [*texts, dumps(response.arguments).decode()]


def _sentence(violation: dict[str, Any]) -> str:
    what, media_type = violation.get("filename", violation["mediaType"]), violation["mediaType"]
    if violation["kind"] == "too-large":
        return f"{what} ({violation['byteLength']} bytes) exceeds the {violation['limit']}-byte upload limit."
    allowed = violation["allowedMediaTypes"]
    suffix = f" Allowed: {', '.join(allowed)}." if allowed else ""
    return f'{what} has media type "{media_type}" which is not allowed by this route.{suffix}'
