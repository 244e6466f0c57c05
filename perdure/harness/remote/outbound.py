"""Requests to other servers: the address is checked and pinned, time and size have limits, redirects are refused."""

import asyncio
import ipaddress
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import httpx2

if TYPE_CHECKING:
    from pydantic_ai._ssrf import ResolvedUrl

#: Which addresses are allowed beside public ones: none, those of this machine, or all private ones. Never those at
#: which clouds serve credentials.
Reach: TypeAlias = Literal["public", "loopback", "private"]

_CONNECT_SECONDS = 5.0
#: Seconds for the look at an address when a session is created: a name that does not resolve by then may do so later.
_LOOK_UP_SECONDS = 2.0
#: Pieces of a body after which other work has its turn: a few milliseconds.
_PIECES = 100


class Unreachable(Exception):
    """The server was not reached, or has not answered in time. The text has no address."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str] = field(repr=False)
    #: At most as much as was allowed; the rest is not read.
    body: bytes = field(repr=False)

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (408, 425, 429) or self.status >= 500


@dataclass(frozen=True)
class Lines:
    """What has come of a stream within the time."""

    status: int
    lines: list[bytes] = field(repr=False)
    #: Whether a line was longer than all that is read at once.
    too_long: bool = False


async def is_allowed(url: str, reach: Reach) -> bool:
    """Whether the address may be used as far as is known: one that cannot be resolved now is looked at again later."""
    # Imported here because it imports pydantic-ai, which an API process rarely needs.
    from pydantic_ai._ssrf import extract_host_and_port, resolve_hostname

    try:
        async with asyncio.timeout(_LOOK_UP_SECONDS):
            await resolve_hostname(extract_host_and_port(url)[0])
            await _resolved(url, reach)
    except (TimeoutError, ValueError, UnicodeError) as error:
        return not isinstance(error, _Forbidden)
    return True


class _Forbidden(ValueError):
    """The address is not allowed."""


async def _resolved(url: str, reach: Reach) -> "ResolvedUrl":
    """The address to connect to: it was checked, and the name is not resolved again."""
    from pydantic_ai._ssrf import extract_host_and_port, is_private_ip, resolve_hostname, validate_and_resolve_url

    hostname, *_ = extract_host_and_port(url)
    await resolve_hostname(hostname)
    try:
        resolved = await validate_and_resolve_url(url, allow_local=reach != "public")
    except ValueError as forbidden:
        raise _Forbidden(str(forbidden)) from None
    if hostname == "localhost":
        # It is often the address of version 6 first, where few servers listen.
        resolved = replace(resolved, resolved_ip="127.0.0.1")
    address = ipaddress.ip_address(resolved.resolved_ip.partition("%")[0])
    if reach == "loopback" and is_private_ip(resolved.resolved_ip) and not address.is_loopback:
        raise _Forbidden("a private address")
    return resolved


class Outbound:
    """Sends requests. Each has a connection of its own, because its address was checked for it alone."""

    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str], *, reach: Reach, seconds: float, most: int = 65_536
    ) -> Answer:
        """The answer, with at most `most` bytes of its body; raises `Unreachable`."""
        async with self._answered("POST", url, headers, reach, seconds, body) as response:
            content = bytearray()
            async for piece in _pieces(response):
                content += piece
                if len(content) >= most:
                    break
            return Answer(response.status_code, response.headers, bytes(content[:most]))

    async def lines(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        reach: Reach,
        seconds: float,
        most: int,
        is_last: Callable[[bytes], bool],
    ) -> Lines:
        """The complete lines that come within so many seconds and bytes, up to the last one of the stream."""
        status, lines, rest, size = 0, list[bytes](), list[bytes](), 0
        try:
            async with self._answered("GET", url, headers, reach, seconds) as response:
                status = response.status_code
                async for piece in _pieces(response):
                    size += len(piece)
                    *complete, last = piece.split(b"\n")
                    if complete:
                        # Joined once: a line may come in a million pieces.
                        complete[0], rest = b"".join([*rest, complete[0]]), []
                    rest.append(last)
                    lines += complete
                    if size >= most or any(map(is_last, complete)):
                        break
        except Unreachable:
            # A stream that goes on is no failure.
            if not status:
                raise
        return Lines(status, lines, too_long=not lines and size >= most)

    @asynccontextmanager
    async def _answered(
        self, method: str, url: str, headers: Mapping[str, str], reach: Reach, seconds: float, body: bytes | None = None
    ) -> AsyncGenerator[httpx2.Response]:
        from pydantic_ai._ssrf import build_url_with_ip

        try:
            async with asyncio.timeout(seconds):
                resolved = await _resolved(url, reach)
                default = 443 if resolved.is_https else 80
                named = f"[{resolved.hostname}]" if ":" in resolved.hostname else resolved.hostname
                host = named if resolved.port == default else f"{named}:{resolved.port}"
                request = httpx2.Request(
                    method,
                    build_url_with_ip(resolved),
                    # Compressed answers could be of any size.
                    headers={**headers, "host": host, "accept-encoding": "identity"},
                    content=body,
                    extensions={
                        **({"sni_hostname": resolved.hostname} if resolved.is_https else {}),
                        "timeout": httpx2.Timeout(seconds, connect=_CONNECT_SECONDS).as_dict(),
                    },
                )
                # No proxy: it would resolve the name again.
                async with httpx2.AsyncClient(trust_env=False, follow_redirects=False) as client:
                    response = await client.send(request, stream=True)
                    try:
                        yield response
                    finally:
                        await response.aclose()
        except TimeoutError:
            raise Unreachable("The server has not answered in time.") from None
        except _Forbidden:
            raise Unreachable("The address of the server is not allowed.") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, ValueError, OSError):
            raise Unreachable("The server could not be reached.") from None


async def _pieces(response: httpx2.Response) -> AsyncGenerator[bytes]:
    """The body as it comes. What was read at once may hold many tiny pieces, and others have their turn meanwhile."""
    number = 0
    async for piece in response.aiter_raw():
        yield piece
        number += 1
        if number % _PIECES == 0:
            await asyncio.sleep(0)
