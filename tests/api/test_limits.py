"""How much a request may carry."""

import base64
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.api.served import URL, serving


def a_file(size: int, **fields: Any) -> dict[str, Any]:
    return {"type": "file", "mediaType": "a/b", "data": base64.b64encode(b"x" * size).decode(), **fields}


async def test_a_declared_body_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    async with serving(tmp_path, max_body_bytes=1000) as api:
        answer = await api.http.post(URL, content=b"x" * 1001)

    assert answer.status_code == 413
    assert answer.json() == {
        "error": "application/json (1001 bytes) exceeds the 1000-byte upload limit.",
        "ok": False,
        "violations": [{"byteLength": 1001, "kind": "too-large", "limit": 1000, "mediaType": "application/json"}],
    }


async def test_a_body_without_a_length_is_cut_at_the_limit(tmp_path: Path) -> None:
    sent = 0

    async def endless() -> AsyncGenerator[bytes]:
        nonlocal sent
        while sent < 50_000_000:
            sent += 100_000
            yield b"x" * 100_000

    async with serving(tmp_path, max_body_bytes=200_000) as api:
        answer = await api.http.post(URL, content=endless())

    assert answer.status_code == 413


async def test_the_text_of_a_message_and_its_context_counts_together(tmp_path: Path) -> None:
    async with serving(tmp_path, max_message_bytes=10) as api:
        fits = await api.http.post(URL, json={"message": "éé", "clientContext": "123456"})
        answer = await api.http.post(URL, json={"message": "éé", "clientContext": ["123456", "7"]})

    assert fits.status_code == 202
    assert answer.status_code == 413
    assert answer.json() == {
        "error": "text/plain (11 bytes) exceeds the 10-byte upload limit.",
        "ok": False,
        "violations": [{"byteLength": 11, "kind": "too-large", "limit": 10, "mediaType": "text/plain"}],
    }


KEPT: dict[str, dict[str, Any]] = {
    "a schema": {"outputSchema": {"title": "x" * 2_000}},
    "a file's name": {"message": [a_file(1, filename="x" * 2_000)]},
    "a media type": {"message": [a_file(1, mediaType="a/" + "x" * 2_000)]},
    "a URL": {"message": [a_file(1, data="https://x.example/" + "x" * 2_000)]},
    "the head of a data URL": {"message": [a_file(1, data="data:" + "x" * 2_000 + ";base64,AAAA")]},
    "a context": {"clientContext": {"a": "x" * 2_000}},
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
async def test_all_that_is_kept_counts(tmp_path: Path, kept: dict[str, Any]) -> None:
    async with serving(tmp_path, max_message_bytes=1_000) as api:
        answer = await api.http.post(URL, json={"message": "hello", **kept})

    assert answer.status_code == 413
    assert answer.json()["violations"][0]["limit"] == 1_000


@pytest.mark.parametrize("data", ["AAAA" + " " * 2_000, "data:" + "x" * 2_000])
async def test_what_is_no_file_is_refused_whatever_its_size(tmp_path: Path, data: str) -> None:
    async with serving(tmp_path, max_file_bytes=900, max_message_bytes=1_000) as api:
        answer = await api.http.post(URL, json={"message": [a_file(0, data=data)]})

    assert answer.status_code == 400


@pytest.mark.parametrize(
    "many", [{"message": [{"type": "text", "text": "x"}] * 1_001}, {"clientContext": ["x"] * 1_001}]
)
async def test_there_are_not_too_many_pieces(tmp_path: Path, many: dict[str, Any]) -> None:
    async with serving(tmp_path) as api:
        answer = await api.http.post(URL, json={"message": "hello", **many})

    assert (answer.status_code, answer.json()["ok"]) == (400, False)


async def test_a_file_over_the_limit_is_refused_by_its_name(tmp_path: Path) -> None:
    async with serving(tmp_path, max_file_bytes=9) as api:
        fits = await api.http.post(URL, json={"message": [a_file(9)]})
        answer = await api.http.post(URL, json={"message": [a_file(10, filename="a.png"), a_file(11)]})

    assert fits.status_code == 202
    assert answer.status_code == 413
    assert answer.json()["error"] == "a.png (10 bytes) exceeds the 9-byte upload limit."
    assert [violation["byteLength"] for violation in answer.json()["violations"]] == [10, 11]


async def test_the_bytes_behind_a_url_are_not_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, max_file_bytes=9) as api:
        linked = await api.http.post(URL, json={"message": [a_file(0, data="https://x.example/huge.bin")]})
        inlined = await api.http.post(URL, json={"message": [a_file(0, data="data:a/b;base64," + "QUJD" * 4)]})

    assert (linked.status_code, inlined.status_code) == (202, 413)


async def test_a_media_type_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, file_media_types="image/*,application/pdf") as api:
        allowed = await api.http.post(URL, json={"message": [a_file(1, mediaType="image/png")]})
        answer = await api.http.post(URL, json={"message": [a_file(1, mediaType="text/html", filename="a.html")]})

    assert allowed.status_code == 202
    assert answer.status_code == 415
    assert answer.json() == {
        "error": 'a.html has media type "text/html" which is not allowed by this route. '
        "Allowed: image/*, application/pdf.",
        "ok": False,
        "violations": [
            {
                "allowedMediaTypes": ["image/*", "application/pdf"],
                "filename": "a.html",
                "kind": "disallowed-media-type",
                "mediaType": "text/html",
            }
        ],
    }


async def test_a_deployment_without_files_takes_none(tmp_path: Path) -> None:
    async with serving(tmp_path, file_media_types="") as api:
        answer = await api.http.post(URL, json={"message": [a_file(1)]})

    assert answer.status_code == 415
