"""A namespace that does not exist is distinguished from a session that does not, and stops a process at its start."""

import asyncio
import subprocess
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.cli import serve
from perdure.dev.supervisor import command
from perdure.dev.temporal_server import binary
from perdure.errors import Misconfigured, NoDriver, Unavailable
from perdure.protocol import names
from perdure.runtime.connect import namespace_missing, temporal_client
from perdure.runtime.drivers.client import DriverClient
from perdure.settings import Settings
from tests.support import commands
from tests.support.processes import Process, clean_environment, free_port, wait_until
from tests.support.stack import TemporalServer

Call = Callable[[Client], Awaitable[object]]


async def signal(client: Client) -> object:
    return await client.get_workflow_handle("ses_1").signal(names.DELIVER, {})


async def describe(client: Client) -> object:
    return await client.get_workflow_handle("ses_1").describe()


async def start(client: Client) -> object:
    return await client.start_workflow(names.SESSION_WORKFLOW, {}, id="ses_1", task_queue="nobody-sessions")


@pytest.fixture
def nowhere(temporal_server: TemporalServer) -> Settings:
    """A namespace that was never created."""
    return Settings(temporal_address=temporal_server.address, temporal_namespace=f"nowhere-{uuid.uuid4().hex[:8]}")


@pytest.mark.parametrize("call", [signal, describe, start])
async def test_a_missing_namespace_is_recognised(nowhere: Settings, call: Call) -> None:
    with pytest.raises(RPCError) as failed:
        await call(await temporal_client(nowhere))

    assert namespace_missing(failed.value)


@pytest.mark.parametrize("ask", ["deliver", "cancel", "describe", "status"])
async def test_without_its_namespace_temporal_is_away_and_no_session_ends(nowhere: Settings, ask: str) -> None:
    """A process that took it for the end of the session would refuse what people have agreed to."""
    driver = DriverClient(await temporal_client(nowhere), "nobody")
    asked: dict[str, Callable[[], Awaitable[object]]] = {
        "deliver": lambda: driver.deliver("ses_1", {"id": "dlv_1", "tokenHash": "now"}),
        "cancel": lambda: driver.cancel("ses_1", "turn_0"),
        "describe": lambda: driver.describe("ses_1"),
        "status": lambda: driver.status("ses_1"),
    }

    with pytest.raises(Unavailable) as away:
        await asked[ask]()

    assert not isinstance(away.value, NoDriver)


@pytest.mark.parametrize("call", [signal, describe])
async def test_a_missing_workflow_is_not_a_missing_namespace(temporal_server: TemporalServer, call: Call) -> None:
    client = await temporal_client(Settings(temporal_address=temporal_server.address))

    with pytest.raises(RPCError) as failed:
        await call(client)

    assert not namespace_missing(failed.value)


@pytest.mark.parametrize("wait", [serve.answered, serve.ready_or_absent])
async def test_a_namespace_that_is_never_created_ends_the_wait(
    nowhere: Settings,
    wait: Callable[..., Awaitable[bool]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A server that is slow to answer here is not absent.
    monkeypatch.setattr(serve, "_FIRST_ANSWER_SECONDS", 60.0)

    with pytest.raises(Misconfigured, match=rf"{nowhere.temporal_namespace}.*PERDURE_TEMPORAL_NAMESPACE"):
        await wait(nowhere, asyncio.Event(), patience=0.2)

    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"no namespace '{nowhere.temporal_namespace}'" in warning.message


async def test_an_api_does_not_wait_for_an_absent_temporal() -> None:
    absent = Settings(temporal_address=f"127.0.0.1:{free_port()}")

    assert await asyncio.wait_for(serve.ready_or_absent(absent, asyncio.Event()), 60)


@pytest.mark.parametrize("part", ["worker", "api"])
def test_a_process_waits_for_its_namespace_to_be_created(tmp_path: Path, nowhere: Settings, part: str) -> None:
    ready = tmp_path / "ready"
    environment = {
        **clean_environment(),
        "PERDURE_DATA_DIR": str(tmp_path),
        "PERDURE_TEMPORAL_ADDRESS": nowhere.temporal_address,
        "PERDURE_TEMPORAL_NAMESPACE": nowhere.temporal_namespace,
        "PERDURE_PORT": str(free_port()),
    }
    assert commands.perdure("migrate", environment=environment).returncode == 0
    process = Process(part, command(part, "--ready-file", str(ready)), tmp_path / f"{part}.log", environment)
    try:
        wait_until(lambda: "has no namespace" in process.output or not process.alive, "the process to say so", 60)
        assert process.alive, process.output
        assert not ready.exists()

        create(nowhere)

        wait_until(lambda: ready.exists() or not process.alive, "the process to be ready", 60)
        assert process.alive, process.output
    finally:
        process.close()


def create(settings: Settings) -> None:
    words = [binary(), "operator", "namespace", "create", "-n", settings.temporal_namespace]
    words += ["--address", settings.temporal_address]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
