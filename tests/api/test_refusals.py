"""Every request that is refused, in the contract's own words."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from tests.api.served import URL, Api, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Api]:
    """One server for all: a refused request leaves nothing behind."""
    async with serving(tmp_path_factory.mktemp("api")) as served:
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
