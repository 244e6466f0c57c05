"""Temporal's address accepts connections, and no request is ever answered there."""

import asyncio
import time
from collections.abc import Generator
from pathlib import Path

import httpx2
import pytest

from perdure.dev.supervisor import command
from perdure.runtime.connect import temporal_client
from perdure.settings import Settings
from tests.support import commands
from tests.support.processes import Process, clean_environment, free_port, wait_until
from tests.support.sockets import BlackHole

#: How long callers may wait: the patience of five seconds, and what the rest of a request takes. It is less than that
#: patience twice.
WITHIN = 9.0


@pytest.fixture
def black_hole() -> Generator[BlackHole]:
    with BlackHole() as hole:
        yield hole


@pytest.fixture
def api(tmp_path: Path, black_hole: BlackHole) -> Generator[str]:
    """An API whose Temporal is the black hole."""
    port, flag = free_port(), tmp_path / "api.ready"
    environment = clean_environment() | {
        "PERDURE_DATA_DIR": str(tmp_path / "data"),
        "PERDURE_TEMPORAL_ADDRESS": black_hole.address,
        "PERDURE_PORT": str(port),
    }
    assert commands.perdure("migrate", environment=environment).returncode == 0
    process = Process("api", command("api", "--ready-file", str(flag)), tmp_path / "api.log", environment)
    try:
        wait_until(lambda: flag.exists() or not process.alive, "the API to be ready", 120)
        assert process.alive, process.output
        yield f"http://127.0.0.1:{port}"
    finally:
        process.close()


@pytest.mark.alone
async def test_requests_are_answered_in_time_and_the_process_continues(api: str, black_hole: BlackHole) -> None:
    async with httpx2.AsyncClient(base_url=api, timeout=60, verify=False) as http:
        began = time.monotonic()

        posts = [asyncio.create_task(http.post("/eve/v1/session", json={"message": "hello"})) for _ in range(4)]
        await asyncio.to_thread(wait_until, lambda: black_hole.accepted > 0, "the API to connect to Temporal")
        health = await http.get("/eve/v1/health")
        healthy_after = time.monotonic() - began
        await asyncio.gather(*posts)

        assert time.monotonic() - began < WITHIN
        assert healthy_after < WITHIN / 2
        assert health.status_code == 200


@pytest.mark.alone
async def test_a_client_that_connects_at_once_gives_up_in_time(black_hole: BlackHole) -> None:
    began = time.monotonic()

    with pytest.raises(TimeoutError, match="did not answer within 5 s"):
        await temporal_client(Settings(temporal_address=black_hole.address))

    assert time.monotonic() - began < WITHIN


def test_a_worker_logs_what_it_waits_for_and_can_be_stopped(tmp_path: Path, black_hole: BlackHole) -> None:
    environment = clean_environment() | {
        "PERDURE_DATA_DIR": str(tmp_path / "data"),
        "PERDURE_TEMPORAL_ADDRESS": black_hole.address,
    }
    worker = Process("worker", command("worker"), tmp_path / "worker.log", environment)
    try:
        wait_until(lambda: f"waiting for Temporal at {black_hole.address}" in worker.output, "a word of the worker")

        assert worker.terminate() == 0, worker.output
    finally:
        worker.close()
