"""Requests and streams over HTTP: who calls, what is tried again, and how much is read."""

import asyncio
import json
import random
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import AsyncGeneratorType
from typing import Any, TypeVar, cast
from urllib.parse import quote

import httpx2

from .errors import UNREACHABLE, UNREADABLE, ClientError
from .events import Json

#: A key or token, or what gives the one of the moment: it is asked before each request.
Key = str | Callable[[], str] | None
_T = TypeVar("_T")

#: Bytes of a response that are read: of an error, of anything else, and of one line of a stream.
_MOST_OF_ERROR = 65_536
_MOST = 256 * 1_048_576
_LONGEST_LINE = 64 * 1_048_576
#: Characters of an error that is no JSON.
_LONGEST_TEXT = 500
#: Seconds between two tries, when the API does not say: doubled each time.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_CONNECT = 10.0
_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
#: The client waits longer than the API holds a request (`Prefer: wait`, `?wait=result`).
_READ = 75.0
#: Seconds that a response takes at most, however steadily it comes, and one that is an error.
_WHOLE = 600.0
_WHOLE_ERROR = 10.0


@dataclass(frozen=True)
class Answer:
    """A response that is no error."""

    value: Any
    headers: Mapping[str, str]

    @property
    def object(self) -> Json:
        """The value, which is an object in all our routes. What answers may be another program."""
        value: object = self.value
        if not isinstance(value, dict):
            raise ClientError("The response cannot be read: it is no object.", code=UNREADABLE)
        return cast("Json", value)

    @property
    def replayed(self) -> bool:
        """Whether the request was answered before: this is the first response to it."""
        return self.headers.get("idempotency-replayed") == "true"


@dataclass(frozen=True)
class Tries:
    """How often a request may be made."""

    #: Whether it may be made more than once at all.
    again: bool = True
    #: So often at least, however long it takes.
    least: int = 1
    #: The seconds between two of them, when the API does not say; None: longer each time.
    pause: float | None = None


ONCE = Tries(again=False)


class Transport:
    """One API: its address, who calls it, and the connections to it."""

    def __init__(
        self, host: str, key: Key, headers: Mapping[str, str] | None, *, patience: float, silence: float, verify: Any
    ) -> None:
        url = _address(host)
        #: Without credentials: it may be shown.
        self.host = str(url).rstrip("/")
        self._key = key
        self._headers = _checked(dict(headers or {}))
        self._patience = patience
        self._silence = silence
        # The certificates of all authorities take longer to read than a request, and http needs none.
        self._http = httpx2.AsyncClient(
            verify=verify if url.scheme == "https" else False,
            timeout=httpx2.Timeout(_READ, connect=_CONNECT, pool=None),
            limits=httpx2.Limits(max_connections=None),
            # A proxy of the environment is for other machines: it may not know this one, and would get the key.
            trust_env=url.host not in _THIS_MACHINE,
        )
        self._readings: weakref.WeakSet[AsyncGeneratorType[Any, None]] = weakref.WeakSet()

    async def close(self) -> None:
        # What is left in its middle ends here, from the outside in: a loop that ends closes all generators at once, and
        # complains of each that is inside of another one.
        for each in list(self._readings):
            # Another task waits for it, which fails when its connection is closed.
            if not each.ag_running:
                await each.aclose()
        await self._http.aclose()

    def ending(self, reading: AsyncGenerator[_T]) -> AsyncGenerator[_T]:
        """The same, which ends with this transport at the latest."""
        if isinstance(reading, AsyncGeneratorType):
            self._readings.add(reading)
        return reading

    async def get(self, path: str, params: Mapping[str, Any] | None = None, tries: Tries | None = None) -> Json:
        return (await self.send("GET", path, params=params, tries=tries)).object

    async def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tries: Tries | None = None,
        anonymous: bool = False,
    ) -> Answer:
        """Make a request, again while the API cannot take it. A POST without a key is made once.

        `anonymous`: without credentials, for whoever may be there.
        """
        content = None if body is None else _encoded(body)
        more = {**({"idempotency-key": key} if key else {}), **(headers or {})}
        if content is not None:
            more["content-type"] = "application/json"

        async def once() -> Answer:
            async with self._response(method, path, params, more, content, _READ, anonymous=anonymous) as response:
                raw = await _bounded(response, _MOST, _WHOLE, within=True)
                return Answer(_decoded(raw), response.headers)

        safe = method in ("GET", "HEAD") or key is not None
        try:
            return await self._tried(once, tries or (Tries() if safe else ONCE))
        except ClientError as error:
            error.key = key
            raise

    @asynccontextmanager
    async def lines(self, path: str, params: Mapping[str, Any]) -> AsyncGenerator[AsyncGenerator[bytes]]:
        """The lines of a stream as they come. Blank ones too: they say that the API lives.

        Fails with `unreachable` when nothing comes for longer than an API that lives is silent.
        """
        async with self._response("GET", path, params, {}, None, self._silence) as response:
            if response.headers.get("content-type", "").startswith("text/html"):
                raise ClientError(f"{self.host} answers with a page, not with events.", code="not_a_stream")
            yield _lines(response)

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        content: bytes | None,
        read: float,
        *,
        anonymous: bool = False,
    ) -> AsyncGenerator[httpx2.Response]:
        """The response with its body unread; `ClientError` when it is an error, or there is none."""
        secret = "" if anonymous else self._secret()
        known = {} if anonymous else self._headers
        sent = _checked({**known, **({"authorization": f"Bearer {secret}"} if secret else {}), **headers})
        given = {name: value for name, value in (params or {}).items() if value is not None}
        timeout = httpx2.Timeout(_READ, connect=_CONNECT, read=read, pool=None)
        try:
            async with self._http.stream(
                method, f"{self.host}{path}", params=given, headers=sent, content=content, timeout=timeout
            ) as response:
                if not response.is_success:
                    raw = await _bounded(response, _MOST_OF_ERROR, _WHOLE_ERROR, within=False)
                    raise self._refusal(response, raw, secret)
                yield response
        except (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, httpx2.InvalidURL):
            # What these say may quote a header.
            raise ClientError("This request cannot be sent.", code="invalid") from None
        except httpx2.RequestError as error:
            # Without a cause: it holds the request, whose headers have the key.
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ClientError(
                f"{self.host} cannot be reached: {self._public(what, secret)}", code=UNREACHABLE
            ) from None

    async def _tried(self, once: Callable[[], Awaitable[_T]], tries: Tries) -> _T:
        began, count = time.monotonic(), 0
        while True:
            count += 1
            try:
                return await once()
            except ClientError as error:
                pause = error.retry_after if error.retry_after is not None else tries.pause
                pause = backoff(count) if pause is None else pause
                late = time.monotonic() - began + pause > self._patience
                # However often it may be tried: not after a pause that nobody waits for.
                spent = count >= tries.least or (error.retry_after or 0.0) > self._patience
                if not (tries.again and error.passing) or (late and spent):
                    raise
            await asyncio.sleep(pause)

    def _secret(self) -> str:
        return (self._key() if callable(self._key) else self._key) or ""

    def _refusal(self, response: httpx2.Response, raw: bytes, secret: str) -> ClientError:
        """The error of the API, in either of its forms; of something before it, what it says."""
        status, code = response.status_code, None
        text = self._public(raw.decode(errors="replace").strip(), secret)
        details: Json = {}
        try:
            body: object = json.loads(text)
        except (ValueError, RecursionError):
            body = None
        if isinstance(body, dict):
            details = dict(cast("Json", body))
            error: object = details.pop("error", None)
            if isinstance(error, dict):
                fields = cast("Json", error)
                text, code = str(fields.get("message") or ""), fields.get("type")
            else:
                text = error if isinstance(error, str) else str(details.get("message") or "")
                code = details.pop("code", None)
            details.pop("ok", None)
        elif "html" in response.headers.get("content-type", "") or not text.isprintable():
            text = ""
        return ClientError(
            text[:_LONGEST_TEXT] or f"The server answered {status}.",
            status=status,
            code=code if isinstance(code, str) else None,
            details=details,
            retry_after=_retry_after(response.headers.get("retry-after")),
        )

    def _public(self, text: str, secret: str) -> str:
        """The text without our key, should something have quoted it."""
        for each in (secret, *self._headers.values()):
            if len(each) >= 8:
                text = text.replace(each, "[…]")
        return text


def text_in(found: Json, name: str) -> str:
    """A text that a response must have."""
    value = found.get(name)
    if not isinstance(value, str):
        raise ClientError(f"The response cannot be read: it has no {name!r}.", code=UNREADABLE)
    return value


def list_in(found: Json, name: str) -> list[Any]:
    """A list that a response must have."""
    value: object = found.get(name)
    if not isinstance(value, list):
        raise ClientError(f"The response cannot be read: it has no list of {name}.", code=UNREADABLE)
    return cast("list[Any]", value)


def segment(text: str) -> str:
    """An id or a name as a part of a path: whatever it has in it, it is one part."""
    if text in ("", ".", ".."):
        raise ClientError("An id or a name is missing.", code="invalid")
    return quote(text, safe="")


def own_key(given: str | None) -> str:
    """The `Idempotency-Key` of a request: made once, so that all tries have the same."""
    return given or f"py-{uuid.uuid4().hex}"


def backoff(count: int) -> float:
    """The pause after so many tries; not the same for all who lost the API at the same moment."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(count - 1, 10)) * random.uniform(0.5, 1.0)


def _address(host: str) -> httpx2.URL:
    try:
        url = httpx2.URL(host)
    except (httpx2.InvalidURL, TypeError):
        raise ClientError("The host is not a URL.", code="invalid") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ClientError("The host must be a URL with http:// or https://.", code="invalid")
    if url.userinfo:
        raise ClientError("Give credentials as the key or as headers, not in the URL.", code="invalid")
    return url.copy_with(query=None, fragment=None)


def _checked(headers: dict[str, str]) -> dict[str, str]:
    """The headers, if they can be sent. The libraries below quote the value of one that cannot."""
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise ClientError(f"The header {name!r} cannot be sent: it must be printable ASCII.", code="invalid")
    return headers


def _encoded(body: Any) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ClientError(f"This is no JSON that can be sent: {error}", code="invalid") from None


def _decoded(raw: bytes) -> Any:
    if not raw.strip():
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise ClientError("The response cannot be read: it is no JSON.", code=UNREADABLE) from None


async def _bounded(response: httpx2.Response, most: int, seconds: float, *, within: bool) -> bytes:
    """The body. With `within` one that is longer, or takes longer, is an error; otherwise its beginning is enough."""
    read = bytearray()
    try:
        # The timeouts of a request are those of each read.
        async with asyncio.timeout(seconds):
            async for chunk in response.aiter_bytes():
                read += chunk
                if len(read) > most:
                    break
    except TimeoutError:
        if within:
            raise ClientError(f"The response has not ended after {seconds:g} s.", code=UNREACHABLE) from None
    if within and len(read) > most:
        raise ClientError(f"The response has more than {most} bytes.", code="too_large")
    return bytes(read[:most])


async def _lines(response: httpx2.Response) -> AsyncGenerator[bytes]:
    """Whole lines. What follows the last line end was cut off, unless it can be read."""
    read = bytearray()
    async for chunk in response.aiter_bytes():
        # Only what is new may have a line end, or the time would grow with the square of a long line.
        start, searched = 0, len(read)
        read += chunk
        while (end := read.find(b"\n", max(start, searched))) >= 0:
            yield bytes(read[start:end])
            start = end + 1
        del read[:start]
        if len(read) > _LONGEST_LINE:
            raise ClientError(f"A line of the stream has more than {_LONGEST_LINE} bytes.", code="too_large")
    try:
        json.loads(read)
    except (ValueError, RecursionError):
        return
    yield bytes(read)


def _retry_after(given: str | None) -> float | None:
    """The seconds of the header, which may also name a time."""
    if given is None:
        return None
    try:
        seconds = float(given) if given.strip().isdecimal() else parsedate_to_datetime(given).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, seconds)
