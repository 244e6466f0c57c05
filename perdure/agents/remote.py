"""The declaration of an agent on another server."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

from perdure.errors import InvalidDeclaration
from perdure.protocol.wire import JsonObject

from .agent import LONGEST_TIME, NAME
from .approval import result_of, takes
from .output_schema import problem

#: Headers of each request, or a function that returns them: it is called before each request, so they may expire.
Headers: TypeAlias = Mapping[str, str] | Callable[[], Mapping[str, str] | Awaitable[Mapping[str, str]]]
#: A bearer token, or a function that returns one.
Auth: TypeAlias = str | Callable[[], str | Awaitable[str]]

#: A day.
_LONGEST_TASK = 86_400.0
#: Headers that Perdure sets itself.
_TAKEN = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection", "idempotency-key"})


@dataclass(frozen=True)
class RemoteAgent:
    """An agent on a server that speaks the same protocol. In `Agent(subagents=[…])` it is a tool of its name.

    `headers` and `auth` are secrets: they stay in the memory of the workers.
    """

    name: str
    #: Of the server; `path` is added to it.
    url: str
    description: str | None = None
    headers: Headers | None = field(default=None, repr=False)
    auth: Auth | None = field(default=None, repr=False)
    path: str = "/eve/v1/session"
    #: The JSON schema of each result, unless a call brings one.
    output_schema: JsonObject | None = None
    #: Seconds after which a task that has not ended counts as failed.
    timeout: float = _LONGEST_TASK

    def __post_init__(self) -> None:
        if not (isinstance(cast(object, self.name), str) and NAME.fullmatch(self.name)):
            raise InvalidDeclaration(
                f"The name {self.name!r} of a remote agent will not do: use lowercase letters, digits, '-' and '_'."
            )
        if wrong := _wrong(self):
            raise InvalidDeclaration(f"Remote agent {self.name!r}: {wrong}.")

    @property
    def sessions_url(self) -> str:
        """Where sessions are started; the routes of a session are below it."""
        return self.url.rstrip("/") + "/" + self.path.strip("/")

    async def request_headers(self) -> dict[str, str]:
        """The author's headers for one request."""
        given: Mapping[str, str] = {} if self.headers is None else await _now(self.headers)
        headers = {str(name): str(value) for name, value in given.items()}
        if self.auth is not None:
            headers["authorization"] = f"Bearer {await _now(self.auth)}"
        return {name: value for name, value in headers.items() if name.lower() not in _TAKEN}


async def _now(given: Any) -> Any:
    return await result_of(given) if callable(given) else given


def _wrong(agent: RemoteAgent) -> str | None:
    fields: Mapping[str, object] = vars(agent)
    url, path, headers, auth, timeout = (fields[each] for each in ("url", "path", "headers", "auth", "timeout"))
    if not _is_base(url):
        # Without its value: somebody may have put a password into it.
        return "url is the http(s) address of a server, without credentials, a query or a fragment"
    if not (isinstance(path, str) and path.startswith("/") and path.isprintable() and not set("?# ") & set(path)):
        return "path is the path of its sessions, '/eve/v1/session' for one"
    if not (headers is None or isinstance(headers, Mapping) or (callable(headers) and takes(headers))):
        return "headers are a dict, or a function without parameters that returns one"
    if not (auth is None or isinstance(auth, str) or (callable(auth) and takes(auth))):
        return "auth is a bearer token, or a function without parameters that returns one"
    if isinstance(timeout, bool) or not (isinstance(timeout, int | float) and 0 < timeout <= LONGEST_TIME):
        return f"timeout is a number of seconds above 0, not {timeout!r}"
    if agent.output_schema is not None and (found := problem(agent.output_schema)):
        return f"the output schema cannot be used: {found}"
    return None


def _is_base(url: object) -> bool:
    if not isinstance(url, str) or any(map(str.isspace, url)):
        return False
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    plain = parts.username is None and parts.password is None and not parts.query and not parts.fragment
    return usable and plain and parts.scheme in ("http", "https")
