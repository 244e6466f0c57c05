"""Bodies that cost much to read: they are refused, or read without holding others up."""

import asyncio
import base64
from pathlib import Path
from typing import cast

import httpx2
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.bodies import LARGE, MOST_VALUES, ValueCount
from tests.api.asking import Waiting
from tests.api.process import ApiProcess, api_process
from tests.api.served import URL, Api, serving

#: Seconds that no other request waits longer than.
HELD_UP = 1.0

#: How each body begins, what it repeats and how often. They are made when they are sent: each process of the tests
#: reads this file, and held 300 MB of them.
TOO_MANY = {
    "arrays": (b"[", b"[],", 19_000_000, b"1]"),
    "objects": (b'{"message":"x","clientContext":[', b'{"a":1},', 7_000_000, b"1]}"),
    "numbers": (b"[", b"1,", 30_000_000, b"1]"),
    "quotes": (b"[", b'"",', 19_000_000, b"1]"),
}


async def posted(directory: Path, body: bytes) -> tuple[httpx2.Response, float]:
    """The answer, and how many seconds others waited for theirs."""
    async with api_process(directory) as api:
        return await watched_post(api, URL, body)


async def watched_post(api: ApiProcess, path: str, body: bytes) -> tuple[httpx2.Response, float]:
    """The same; a noisy machine only makes it worse, so the best try counts."""
    tries: list[float] = []
    while True:
        with api.watched() as watched:
            answer = await api.http.post(path, content=body)
        tries.append(watched.longest)
        if min(tries) < HELD_UP / 2 or len(tries) == 3:
            return answer, min(tries)


@pytest.mark.alone
@pytest.mark.parametrize("shape", TOO_MANY)
async def test_a_body_of_very_many_values_is_refused_and_delays_no_other(tmp_path: Path, shape: str) -> None:
    start, value, times, end = TOO_MANY[shape]
    answer, longest = await posted(tmp_path, start + value * times + end)

    assert answer.status_code == 413
    assert answer.json()["error"] == "application/json holds more than 100000 values."
    assert answer.json()["violations"][0]["kind"] == "too-many-values"
    assert longest < HELD_UP


@pytest.mark.alone
@pytest.mark.parametrize("quoted", [False, True])
async def test_a_large_file_delays_no_other(tmp_path: Path, quoted: bool) -> None:
    data = "data:a/b," + "%41" * 20_000_000 if quoted else base64.b64encode(b"x" * 26_000_000).decode()
    part = {"type": "file", "mediaType": "a/b", "data": data}

    answer, longest = await posted(tmp_path, orjson.dumps({"message": [part]}))

    assert answer.status_code == 202
    assert longest < HELD_UP


async def test_a_message_of_commas_and_brackets_is_text(api: Api) -> None:
    answer = await api.http.post(URL, json={"message": ',[{"\\' * (MOST_VALUES // 2), "clientContext": "[" * LARGE})

    assert answer.status_code == 202


@pytest.mark.alone
@pytest.mark.parametrize(
    ("many", "why"),
    [(15_000, "14985 more problems"), (90_000, "Expected 'arguments' to hold at most 20000 values.")],
)
async def test_arguments_that_do_not_fit_delay_no_other(tmp_path: Path, many: int, why: str) -> None:
    async with api_process(tmp_path) as api:
        session = await api.http.post(f"/agents/bursar{URL}", json={"message": "hi"})
        await Waiting(cast("Api", api), session.json()).ask("r")
        changed = {"amount": 1, **{f"unknown-{number}": number for number in range(many)}}
        body = orjson.dumps({"optionId": "approve", "arguments": changed})
        answer, longest = await watched_post(api, "/v1/inputs/r", body)

    assert answer.status_code == 400
    assert answer.json()["error"].endswith(why)
    assert len(answer.content) < 2_000
    assert longest < HELD_UP / 2


async def test_large_bodies_share_a_room(tmp_path: Path) -> None:
    part = {"type": "file", "mediaType": "a/b", "data": "QUJD" * 200_000}

    async with serving(tmp_path, max_body_bytes=1_000_000) as api:
        posts = [api.http.post(URL, json={"message": [part]}) for _ in range(8)]
        answers = await asyncio.gather(*posts)
        later = await api.http.post(URL, json={"message": [part]})

    assert {answer.status_code for answer in answers} <= {202, 503}
    # What one body held was given back.
    assert later.status_code == 202


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(alphabet='a"\\,[{é\n'),
    lambda children: st.lists(children) | st.dictionaries(st.text(alphabet='a"\\,['), children),
    max_leaves=30,
)


@given(value=JSON, size=st.integers(1, 7))
def test_values_are_counted_wherever_the_text_is_cut(value: object, size: int) -> None:
    text = orjson.dumps(value)
    count = ValueCount()

    for start in range(0, len(text), size):
        count.add(text[start : start + size])

    assert values_in(value) <= count.count <= 2 * values_in(value)


def values_in(value: object) -> int:
    match value:
        case dict():
            return 1 + sum(map(values_in, value.values()))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case list():
            return 1 + sum(map(values_in, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case _:
            return 1
