"""Whatever is sent to any route: an answer of 2xx, 4xx or 503, and no other request waits for it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import orjson
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.process import ApiProcess, api_process
from tests.support.examples import at_least

pytestmark = [pytest.mark.alone, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

EXAMPLES = settings(
    max_examples=at_least(30),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)

ROUTES = [
    *(
        (method, prefix + path)
        for prefix in ("", "/agents/clerk", "/agents/{}")
        for method, path in (
            ("GET", "/eve/v1/health"),
            ("GET", "/eve/v1/info"),
            ("POST", "/eve/v1/session"),
            ("POST", "/eve/v1/session/{}"),
            ("POST", "/eve/v1/session/{}/cancel"),
            ("GET", "/eve/v1/session/{}/stream"),
        )
    ),
]
LISTS = [
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/{}"),
    ("GET", "/v1/inputs"),
    ("GET", "/v1/inputs/{}"),
    ("POST", "/v1/inputs/{}"),
]

NAMES = [
    *(
        "message",
        "mode",
        "clientContext",
        "outputSchema",
        "callback",
        "continuationToken",
        "inputResponses",
        "coalesce",
    ),
    *("requestId", "optionId", "text", "arguments", "reason", "turnId", "type", "mediaType", "data", "url", "token"),
]
HEADERS = ["authorization", "x-api-key", "idempotency-key", "traceparent", "baggage", "content-type", "accept", "range"]
QUERY = ["startIndex", "limit", "cursor", "agent", "status", "mode", "kind", "sessionId"]

texts = st.text(max_size=40) | st.sampled_from(
    ["", "\0", "�", "data:,%", "http://[", "task", "text", "file", "approve"]
)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([2**63, -(2**64), 1e308])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | texts, children, max_size=5)
    ),
    max_leaves=20,
)


def deep(depth: int, opening: bytes) -> bytes:
    return opening * depth


def long(size: int, unit: bytes) -> bytes:
    return b'{"message":"' + unit * size + b'"}'


def wide(size: int, unit: bytes) -> bytes:
    return b'{"clientContext":[' + unit * size + b"1]}"


def to_json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return b'{"message": ' + repr(value).encode("utf-8", "replace") + b"}"


escapes = st.sampled_from([b"x", b"%41", b"\\n", b"\\ud800", "é".encode(), b"[],"])
bodies: st.SearchStrategy[bytes] = st.one_of(
    st.binary(max_size=200),
    st.dictionaries(st.sampled_from(NAMES), values, max_size=8).map(to_json),
    st.builds(deep, st.sampled_from([100, 1_100, 90_000]), st.sampled_from([b"[", b'{"a":'])),
    st.builds(long, st.sampled_from([1_000, 300_000]), escapes),
    st.builds(wide, st.sampled_from([10, 99_000, 150_000]), st.sampled_from([b"[],", b"{},", b'"",', b"1e99,"])),
    st.sampled_from([b"1" * 5_000, b"-" + b"9" * 400, b"1e400", b'{"message":1e400}', b"\xff\xfe", b""]),
)
headers = st.dictionaries(
    st.sampled_from(HEADERS),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=60).map(str.strip)
    | st.sampled_from(["Bearer ..", "Bearer e30.e30.", "Basic Og==", "x" * 400, "[" * 5_000]),
    max_size=3,
)
STRANGE = ["[" * 9_000, "W1tb" * 5_000, "W251bGxd", "9" * 4_400, "1e9", "%", "-1", "1" * 17, "\0", ""]
strange = st.sampled_from(STRANGE) | texts
queries = st.dictionaries(st.sampled_from(QUERY), strange, max_size=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ApiProcess]:
    async with api_process(tmp_path_factory.mktemp("api")) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def on_either(request: pytest.FixtureRequest, api: ApiProcess, tmp_path: Path) -> AsyncGenerator[ApiProcess]:
    if request.param == "sqlite":
        yield api
        return
    async with api_process(tmp_path, database=request.getfixturevalue("postgres_url")) as served:
        yield served


@given(
    data=st.data(), route=st.sampled_from(ROUTES) | st.sampled_from(LISTS), headers=headers, query=queries, body=bodies
)
@EXAMPLES
async def test_no_request_breaks_anything(
    on_either: ApiProcess, data: st.DataObject, route: tuple[str, str], headers: dict[str, str], query: Any, body: bytes
) -> None:
    api, (method, path) = on_either, route
    known = await session(api)
    id_of = st.sampled_from([known["sessionId"], "ses_x", "inp_x"]) | texts
    path = path.replace("{}", "\0").replace("\0", quote(data.draw(id_of, label="id"), safe="", errors="replace") or "x")
    if data.draw(st.booleans(), label="with its token") and body.startswith(b'{"'):
        body = b'{"continuationToken":"%s",%s' % (known["continuationToken"].encode(), body[1:])

    with api.watched() as watched:
        status, content = await asyncio.to_thread(asked, api, method, path, headers, query, body)

    assert status < 500 or status == HTTPStatus.SERVICE_UNAVAILABLE, (status, content)
    assert status < 400 or len(content) < 8_192
    assert watched.longest < 1


@pytest.mark.parametrize(("method", "path"), [*ROUTES, *LISTS])
async def test_no_single_parameter_breaks_anything(api: ApiProcess, method: str, path: str) -> None:
    path = path.replace("{}", (await session(api))["sessionId"])

    with api.watched() as watched:
        statuses = {
            (name, value[:10]): (await asyncio.to_thread(asked, api, method, path, {}, {name: value}, b"{}"))[0]
            for name in QUERY
            for value in STRANGE
        }

    assert {what: status for what, status in statuses.items() if status >= 500} == {}
    assert watched.longest < 1


async def session(api: ApiProcess) -> dict[str, str]:
    return (await api.http.post("/eve/v1/session", json={"message": "x"})).json()


def asked(
    api: ApiProcess, method: str, path: str, headers: dict[str, str], query: dict[str, str], body: bytes
) -> tuple[int, bytes]:
    """The status and the answer; of a stream, which does not end, the status alone."""
    with contextlib.closing(HTTPConnection(api.host, api.port, timeout=60)) as connection:
        target = f"{path}?{urlencode(query, errors='replace')}" if query else path
        given = {name: value.encode("latin-1") for name, value in headers.items()}
        connection.request(method, target, body=body if method == "POST" else None, headers=given)
        answer = connection.getresponse()
        streams = path.endswith("/stream") and answer.status == HTTPStatus.OK
        return answer.status, b"" if streams else answer.read()
