"""Every request that is refused, in the contract's own words."""

from collections.abc import AsyncGenerator, Callable
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.asking import waiting
from tests.api.served import URL, Api, serving
from tests.support.examples import at_least

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Api]:
    """One server for all: a refused request leaves nothing behind."""
    async with serving(tmp_path_factory.mktemp("api")) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Api]:
    """As `api`, with little room for files; one session waits for the approval `pay-1`."""
    directory = tmp_path_factory.mktemp("strict")
    async with serving(directory, file_media_types="image/*", max_file_bytes=10) as served:
        await waiting(served, "pay-1")
        yield served


CALLBACK: dict[str, Any] = {
    "callId": "c",
    "subagentName": "s",
    "token": "t",
    "url": "https://parent.example/eve/v1/callback/t",
}

MESSAGE: list[tuple[Any, str]] = [
    (5, "Expected 'message' to be a string or an array of text/file parts."),
    (None, "Expected 'message' to be a string or an array of text/file parts."),
    ({}, "Expected 'message' to be a string or an array of text/file parts."),
    (["x"], "Expected each message part to be an object."),
    ([None], "Expected each message part to be an object."),
    ([{"type": "text"}], "Text parts require a non-empty 'text' string."),
    ([{"type": "text", "text": ""}], "Text parts require a non-empty 'text' string."),
    ([{"type": "file", "data": "AA=="}], "File parts require a non-empty 'mediaType' string."),
    ([{"type": "file", "mediaType": "a/b"}], "File parts require a 'data' string (base64, data URL, or URL)."),
    (
        [{"type": "file", "mediaType": "a/b", "data": "eve-sandbox:?path=/etc/passwd"}],
        "File part 'data' must not use a framework-internal ref scheme.",
    ),
    *(
        (
            [{"type": "file", "mediaType": "a/b", "data": data}],
            "File part 'data' is neither valid base64, nor a data URL, nor an http(s) URL.",
        )
        for data in ("not base64", "AAA", "data:a/b;base64,AAA", "data:a/b", "ftp://example.org/x")
    ),
    ([{"type": "image"}], "Unsupported message part type \"image\". Use 'text' or 'file'."),
    ([{}], "Unsupported message part type \"undefined\". Use 'text' or 'file'."),
    ([[]], "Unsupported message part type \"undefined\". Use 'text' or 'file'."),
]
SHARED: list[dict[str, Any]] = [
    *({"message": value} | {"error": error} for value, error in MESSAGE),
    {"clientContext": [""], "error": "Expected 'clientContext' array entries to be non-empty strings."},
    {"clientContext": [5], "error": "Expected 'clientContext' array entries to be non-empty strings."},
    {"clientContext": None, "error": "Expected 'clientContext' to be a string, string array, or JSON object."},
    {"clientContext": 5, "error": "Expected 'clientContext' to be a string, string array, or JSON object."},
    {"outputSchema": [], "error": "Expected 'outputSchema' to be a JSON-serializable object."},
    {"outputSchema": None, "error": "Expected 'outputSchema' to be a JSON-serializable object."},
    {"outputSchema": {"$ref": "#"}, "error": "The 'outputSchema' cannot be used: it refers to itself without end."},
]
CREATE: list[dict[str, Any]] = [
    *SHARED,
    {"message": "", "error": "Missing or empty 'message' field."},
    {"message": [], "error": "Missing or empty 'message' field."},
    {"mode": "chat", "error": "Expected 'mode' to be either 'conversation' or 'task'."},
    {"mode": None, "error": "Expected 'mode' to be either 'conversation' or 'task'."},
]
CONTINUE: list[dict[str, Any]] = [
    *SHARED,
    {"continuationToken": "", "error": "Missing or empty 'continuationToken' field."},
    {"continuationToken": 5, "error": "Missing or empty 'continuationToken' field."},
    {"message": "", "error": "Expected a non-empty 'message', a non-empty 'inputResponses' array, or both."},
    {"inputResponses": [], "error": "Expected 'inputResponses' to be a non-empty array."},
    {"inputResponses": {}, "error": "Expected 'inputResponses' to be a non-empty array."},
    *(
        {
            "inputResponses": [entry],
            "error": "Expected every 'inputResponses' entry to match the HITL response schema.",
        }
        for entry in ("x", {}, {"requestId": 5}, {"requestId": "r", "optionId": None}, {"requestId": "r", "more": "x"})
    ),
    {"coalesce": "yes", "error": "Expected 'coalesce' to be a boolean."},
]


@pytest.mark.parametrize("case", CREATE)
async def test_create_refuses(api: Api, case: dict[str, Any]) -> None:
    fields = {name: value for name, value in case.items() if name != "error"}

    started = len(api.temporal.started)

    answer = await api.http.post(URL, json={"message": "hello", **fields})

    assert (answer.status_code, answer.json()) == (400, {"error": case["error"], "ok": False})
    assert len(api.temporal.started) == started


@pytest.mark.parametrize("case", CONTINUE)
async def test_continue_refuses(api: Api, case: dict[str, Any]) -> None:
    fields = {name: value for name, value in case.items() if name != "error"}

    answer = await api.http.post(f"{URL}/ses_x", json={"continuationToken": "t", "message": "hello", **fields})

    assert (answer.status_code, answer.json()) == (400, {"error": case["error"], "ok": False})


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "Invalid JSON body."),
        (b"{", "Invalid JSON body."),
        (b'{"message":"\xff"}', "Invalid JSON body."),
        (b'{"message":"\\ud800"}', "Invalid JSON body."),
        (b"\x00\x01\x02", "Invalid JSON body."),
        (b'{"message":"\x00"}', "Invalid JSON body."),
        (b"null", "Expected a JSON object."),
        (b"5", "Expected a JSON object."),
        (b'"text"', "Expected a JSON object."),
    ],
)
@pytest.mark.parametrize("path", [URL, f"{URL}/ses_x"])
async def test_a_body_that_is_no_json_object_is_refused(api: Api, path: str, body: bytes, error: str) -> None:
    answer = await api.http.post(path, content=body)

    assert (answer.status_code, answer.json()) == (400, {"error": error, "ok": False})


@pytest.mark.parametrize(
    ("path", "error"),
    [(URL, "Missing or empty 'message' field."), (f"{URL}/x", "Missing or empty 'continuationToken' field.")],
)
async def test_an_array_is_an_object_without_fields(api: Api, path: str, error: str) -> None:
    answer = await api.http.post(path, content=b"[]")

    assert (answer.status_code, answer.json()["error"]) == (400, error)


async def test_create_checks_in_the_order_of_the_contract(api: Api) -> None:
    faults: dict[str, Any] = {"message": 5, "clientContext": 5, "callback": 5, "mode": 5, "outputSchema": 5}
    errors: list[str] = []
    for name in list(faults):
        errors.append((await api.http.post(URL, json=faults)).json()["error"])
        del faults[name]
    errors.append((await api.http.post(URL, json=faults)).json()["error"])

    assert [error.split(" ")[1] for error in errors] == [
        "'message'",
        "'clientContext'",
        "callback",
        "'mode'",
        "'outputSchema'",
        "or",
    ]


async def test_a_callback_of_the_contract_is_accepted(api: Api) -> None:
    await api.create(callback=CALLBACK)


@pytest.mark.parametrize(
    ("callback", "problem"),
    [
        (None, "callback: Invalid input: expected object, received null"),
        ([], "callback: Invalid input: expected object, received array"),
        ({**CALLBACK, "a": 1, "b": 2}, 'callback: Unrecognized keys: "a", "b"'),
        (
            {**CALLBACK, "token": "", "extra": 2},
            'callback.token: Too small: expected string to have >=1 characters; callback: Unrecognized key: "extra"',
        ),
        ({**CALLBACK, "callId": 5}, "callback.callId: Invalid input: expected string, received number"),
        ({**CALLBACK, "url": "nope"}, "callback.url: Callback url must be absolute."),
        (
            {**CALLBACK, "url": "ftp://parent.example/eve/v1/callback/t"},
            "callback.url: Callback url must be an http(s) url.",
        ),
        (
            {**CALLBACK, "url": "https://parent.example/eve/v1/callback/u"},
            "callback.url: Callback url token must match callback token.",
        ),
        *(
            (
                {**CALLBACK, "url": f"https://{host}/eve/v1/callback/t"},
                "callback.url: Callback url host must not be a private or reserved address.",
            )
            for host in ("10.0.0.1", "[fd00::1]", "[::ffff:10.0.0.1]", "0x0a000001", "169.254.169.254")
        ),
    ],
)
async def test_a_callback_is_checked_strictly(api: Api, callback: Any, problem: str) -> None:
    answer = await api.http.post(URL, json={"message": "hello", "callback": callback})

    expected = {"error": f"Invalid callback metadata: {problem}", "ok": False}
    assert (answer.status_code, answer.json()) == (400, expected)


async def test_a_callback_may_name_a_host_or_the_loopback(api: Api) -> None:
    await api.create(callback={**CALLBACK, "url": "http://127.0.0.1:9/eve/v1/callback/t"})


def a_file(media_type: str, filename: str) -> dict[str, Any]:
    return {"type": "file", "mediaType": media_type, "filename": filename, "data": "aGVsbG8sIHdvcmxk"}


#: Where a request can hold a text that an error may quote, or many of them.
QUOTABLE: dict[str, Callable[[str, int], tuple[str, Any]]] = {
    "a path": lambda text, _: (f"/{quote(text)[:30_000]}", {}),
    "a query": lambda text, _: (f"/nowhere?{quote(text)[:30_000]}", {}),
    "an agent": lambda text, _: (f"/agents/{quote(text, safe='')[:30_000]}{URL}", {"message": "x"}),
    "a session": lambda text, _: (f"{URL}/{quote(text, safe='')[:30_000]}", {"message": "x", "continuationToken": "t"}),
    "a request": lambda text, _: (f"/v1/inputs/{quote(text, safe='')[:30_000]}", {"optionId": "approve"}),
    "a mode": lambda text, _: (URL, {"message": "x", "mode": text}),
    "a part": lambda text, _: (URL, {"message": [{"type": text}]}),
    "files": lambda text, many: (URL, {"message": [a_file("image/png", text)] * many}),
    "media types": lambda text, many: (URL, {"message": [a_file(f"a/{text}", text)] * many}),
    "a callback": lambda text, many: (URL, {"message": "x", "callback": {f"{n}{text}": text for n in range(many)}}),
    "a schema's type": lambda text, _: (URL, {"message": "x", "outputSchema": {"type": text}}),
    "a schema's name": lambda text, _: (URL, {"message": "x", "outputSchema": {"properties": {text: {"type": text}}}}),
    "a reference": lambda text, _: (URL, {"message": "x", "outputSchema": {"$ref": f"#/{text}"}}),
    "an answer's field": lambda text, many: ("/v1/inputs/pay-1", {f"{n}{text}": text for n in range(many)}),
    "arguments": lambda text, many: (
        "/v1/inputs/pay-1",
        {"optionId": "approve", "arguments": {f"{n}{text}": text for n in range(many)}},
    ),
}


@given(
    where=st.sampled_from([*QUOTABLE]),
    unit=st.sampled_from(["A", "\0", "\n", "'", '"', "é", "\u202e", "\U0001f600"]),
    size=st.sampled_from([1, 120, 20_000]),
    many=st.sampled_from([1, 20, 900]),
)
@settings(max_examples=at_least(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
async def test_an_error_is_short_whatever_it_quotes(strict: Api, where: str, unit: str, size: int, many: int) -> None:
    path, body = QUOTABLE[where](unit * size, 1 if size * many > 200_000 else many)

    answer = await strict.http.post(path, json=body)

    assert answer.status_code >= 400
    assert len(answer.content) < 8_192


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            {"message": "x", "callback": {**CALLBACK, "A" * 10_000: 1}},
            f'Invalid callback metadata: callback: Unrecognized key: "{"A" * 99}…"',
        ),
        (
            {"message": "x", "callback": {**CALLBACK, **{f"k{number}": 1 for number in range(12)}}},
            "Invalid callback metadata: callback: Unrecognized keys: "
            + ", ".join(f'"k{number}"' for number in range(10))
            + ", and 2 more",
        ),
        (
            {"message": [a_file("image/png", "a\nb" * 10_000)]},
            "a\ufffdb" * 33 + "… (12 bytes) exceeds the 10-byte upload limit.",
        ),
        (
            {"message": [a_file("x/" + "y" * 10_000, "n")]},
            f'n has media type "x/{"y" * 97}…" which is not allowed by this route. Allowed: image/*.',
        ),
    ],
    ids=["a key", "many keys", "a file's name", "a media type"],
)
async def test_what_an_error_quotes_is_cut(strict: Api, body: Any, error: str) -> None:
    answer = await strict.http.post(URL, json=body)

    assert answer.json()["error"] == error


async def test_of_many_violations_the_first_are_reported(strict: Api) -> None:
    files = [a_file("image/png", f"{number}.png") for number in range(100)]

    answer = await strict.http.post(URL, json={"message": files})

    assert [each["filename"] for each in answer.json()["violations"]] == [f"{number}.png" for number in range(5)]
