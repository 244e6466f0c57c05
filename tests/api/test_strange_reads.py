"""Requests to streams whose parameters, headers and paths are odd: each gets an answer that says what is wrong."""

from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from tests.api.served import Api, serving

STREAM = "/v1/stream/notes"
TEXT = {"content-type": "text/plain"}


@pytest_asyncio.fixture
async def streams(tmp_path: Path) -> AsyncGenerator[Api]:
    async with serving(tmp_path, streams="on") as served:
        await served.http.put(STREAM, headers=TEXT, content=b"a")
        yield served


@pytest.mark.parametrize("tail", ["000000000001" + "9" * 5_000, "1" * 13, "٣", "1\x00"])
async def test_a_tail_that_is_no_number_is_refused(streams: Api, tail: str) -> None:
    answer = await streams.http.get(STREAM, params={"offset": "-1", "tail": tail})

    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request")


async def test_a_time_to_live_that_ends_after_all_years_is_refused(streams: Api) -> None:
    answer = await streams.http.put("/v1/stream/other", headers={**TEXT, "stream-ttl": str(2**53 - 1)})

    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request")


async def test_a_source_that_is_no_url_is_not_found(streams: Api) -> None:
    fork = {**TEXT, "stream-forked-from": "http://[/v1/stream/notes"}

    answer = await streams.http.put("/v1/stream/other", headers=fork)

    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "stream_not_found")


@pytest.mark.parametrize("name", ["a%2541", "a%20b", "a%3Fb", "a%23b", "a;b=c", "%5Ba%5D", "'a'"])
async def test_a_receipt_names_the_url_that_was_asked(streams: Api, name: str) -> None:
    prompted = await streams.http.post(f"/agents/concierge/{name}", json={"message": "hello"})
    created = await streams.http.put(f"/v1/stream/{name}", headers=TEXT)

    for url in (prompted.json()["streamUrl"], prompted.headers["location"], created.headers["location"]):
        parts = urlsplit(url)
        assert (await streams.http.get(url)).status_code == 200, url
        assert (parts.query, parts.fragment) == ("", "")


async def test_a_name_that_cannot_be_one_is_refused(streams: Api) -> None:
    prompted = await streams.http.post("/agents/concierge/ren%C3%A9", json={"message": "hello"})
    created = await streams.http.put("/v1/stream/ren%C3%A9", headers=TEXT)

    assert (prompted.status_code, prompted.json()["error"]["type"]) == (400, "invalid_request")
    assert (created.status_code, created.json()["error"]["type"]) == (400, "invalid_request")


async def test_a_method_that_streams_do_not_have_is_refused_as_other_requests_are(streams: Api) -> None:
    answer = await streams.http.patch(STREAM)

    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD, PUT, POST, DELETE"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["access-control-allow-origin"] == "*"


async def test_a_page_that_somebody_has_written_is_no_page_of_the_api(streams: Api) -> None:
    page = "/v1/stream/page"
    await streams.http.put(page, headers={"content-type": "text/html"}, content=b"<script>steal()</script>")

    answers = [await streams.http.get(page), await streams.http.get(page, params={"offset": "x"})]

    for answer in answers:
        assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_receipts_behind_a_proxy_name_the_public_url(tmp_path: Path) -> None:
    async with serving(tmp_path, streams="on", public_url="https://agents.example.com") as served:
        prompted = await served.http.post("/agents/concierge/a%20b", json={"message": "hello"})
        created = await served.http.put(STREAM, headers=TEXT)

    assert prompted.json()["streamUrl"] == "https://agents.example.com/agents/concierge/a%20b"
    assert created.headers["location"] == f"https://agents.example.com{STREAM}"
