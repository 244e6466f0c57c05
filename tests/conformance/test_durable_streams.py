"""The published conformance suite of Durable Streams, unmodified, against the streams that callers write."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from perdure.runtime.streams.written import StreamSweeper
from tests.api.served import Api, serving
from tests.conformance.npm import node_with

pytestmark = pytest.mark.conformance

FOLDER = Path(__file__).parent / "durable_streams"

#: Of the 338 tests, 6 are about subscriptions, which no server has to offer; the suite skips them by itself.
PASSED = 332

#: Seconds that a read waits, so that the suite does not wait half a minute each time.
LONG_POLL = 1.5


async def test_every_test_of_the_suite_passes(tmp_path: Path) -> None:
    async with serving(tmp_path, streams="on", long_poll_seconds=LONG_POLL) as api:
        report = await suite(api, tmp_path)

    assert failures(report) == []
    assert report["numPassedTests"] == PASSED


@pytest.mark.slow
@pytest.mark.postgres
async def test_every_test_of_the_suite_passes_over_postgres(tmp_path: Path, postgres_url: str) -> None:
    async with serving(tmp_path, streams="on", long_poll_seconds=LONG_POLL, database=postgres_url) as api:
        report = await suite(api, tmp_path)

    assert failures(report) == []
    assert report["numPassedTests"] == PASSED


async def suite(api: Api, directory: Path) -> dict[str, Any]:
    """What the suite reports of this API."""
    node, report = node_with(FOLDER), directory / "report.json"
    command = [node, "node_modules/vitest/vitest.mjs", "run", "--testTimeout", "45000", "--reporter", "json"]
    async with StreamSweeper(api.store.streams).running():
        process = await asyncio.create_subprocess_exec(
            *(*command, "--outputFile", str(report)),
            cwd=FOLDER,
            env={**os.environ, "STREAMS_URL": api.url, "STREAMS_LONG_POLL_MS": str(int(LONG_POLL * 1000))},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    assert report.exists(), output.decode()
    return json.loads(report.read_text())


def failures(report: dict[str, Any]) -> list[str]:
    """The tests that did not pass, with what they say."""
    tests = [test for file in report["testResults"] for test in file["assertionResults"]]
    return [f"{each['fullName']}: {each['failureMessages']}" for each in tests if each["status"] == "failed"]
