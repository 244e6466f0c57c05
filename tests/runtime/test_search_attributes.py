"""What Temporal's UI can search sessions by, and clusters that do not know it."""

import logging
from collections.abc import Generator
from pathlib import Path
from uuid import uuid4

import pytest
from temporalio.client import Client

from perdure.cli import operator
from perdure.dev import temporal_server as temporal_server_module
from perdure.protocol.deliveries import Lineage
from perdure.runtime import connect
from perdure.runtime.connect import register_search_attributes, temporal_client
from perdure.runtime.drivers.client import DriverClient
from perdure.session.state import ParentRef, Rebuild, SessionState
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.values import NewSession
from tests.support import given
from tests.support.stack import TemporalServer, free_port
from tests.support.waiting import until

LOST = Rebuild(reason="WORKFLOW_LOST")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[TemporalServer]:
    """A server that knows no search attribute of ours."""
    with monkeypatch.context() as patched:
        patched.setattr(temporal_server_module, "SEARCH_ATTRIBUTES", ())
        server = TemporalServer(tmp_path)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
async def client(bare: TemporalServer) -> Client:
    return await temporal_client(settings(bare.address))


def settings(address: str) -> Settings:
    return Settings(temporal_address=address)


def state(session_id: str, root: str | None = None) -> SessionState:
    parent = None if root is None else ParentRef(session_id=root, action="a", root_session_id=root)
    return SessionState(session_id=session_id, agent="clerk", token_hash="now", parent=parent)


async def found(client: Client, query: str, *session_ids: str) -> None:
    """Wait until Temporal lists exactly these: its list is some milliseconds old."""

    async def listed() -> bool:
        return {each.id async for each in client.list_workflows(query)} == set(session_ids)

    await until(listed, f"{session_ids} by {query}")


async def test_a_family_is_found_by_its_root_and_by_its_agents(temporal_server: TemporalServer) -> None:
    client = await temporal_client(settings(temporal_server.address))
    driver = DriverClient(client, f"queue-{uuid4()}")
    root, child = f"ses_{uuid4()}", f"ses_{uuid4()}"

    await driver.start(state(root))
    await driver.start(state(child, root))

    await found(client, f"PerdureRoot = '{root}'", root, child)
    await found(client, f"PerdureRoot = '{root}' AND PerdureAgent = 'clerk'", root, child)
    await found(client, f"PerdureRoot = '{child}'")
    await found(client, f"PerdureParent = '{root}'", child)


async def test_a_lane_is_found_by_the_session_that_it_belongs_to(temporal_server: TemporalServer) -> None:
    client = await temporal_client(settings(temporal_server.address))
    driver = DriverClient(client, f"queue-{uuid4()}")
    main, lane = f"ses_{uuid4()}", f"ses_{uuid4()}"

    await driver.start(state(main))
    await driver.start(state(lane), lane_of=main)

    await found(client, f"PerdureParent = '{main}'", lane)


async def test_a_cluster_of_an_older_version_knows_those_of_that_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(temporal_server_module, "SEARCH_ATTRIBUTES", ("PerdureAgent", "PerdureRoot"))
        server = TemporalServer(tmp_path)
    try:
        client = await temporal_client(settings(server.address))
        driver = DriverClient(client, "queue")
        with caplog.at_level(logging.WARNING):
            await driver.start(state("ses_root"))
            for number in range(2):
                await driver.start(state(f"ses_{number}", "ses_root"))

        await found(client, "PerdureRoot = 'ses_root' AND PerdureAgent = 'clerk'", "ses_root", "ses_0", "ses_1")
    finally:
        server.close()

    assert len(caplog.records) == 1
    assert "PerdureParent" in caplog.text


async def test_a_driver_that_is_rebuilt_is_found_as_before(temporal_server: TemporalServer, store: Store) -> None:
    client = await temporal_client(settings(temporal_server.address))
    driver = DriverClient(client, f"queue-{uuid4()}")
    root, child = f"ses_{uuid4()}", f"ses_{uuid4()}"
    lineage = Lineage(session_id=root, root_session_id=root, turn=0, step=0, call_id="c", name="clerk", depth=1)
    await store.create_session(given.session(root))
    await store.create_session(
        NewSession(child, "clerk", "task", child, given.ADA, parent=lineage.model_dump(mode="json"))
    )

    for session_id in (root, child):
        await driver.rebuild(session_id, LOST, unattended=True, of=await store.session(session_id))

    await found(client, f"PerdureRoot = '{root}'", root, child)
    await found(client, f"PerdureParent = '{root}'", child)


async def test_a_cluster_without_them_runs_sessions_and_is_asked_again_later(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = DriverClient(client, "queue")

    with caplog.at_level(logging.WARNING):
        for number in range(3):
            await driver.start(state(f"ses_{number}"))

    assert await driver.status("ses_2") is not None
    assert [record.name for record in caplog.records] == ["perdure.temporal"]
    assert "perdure migrate" in caplog.text
    await register_search_attributes(client)
    await driver.start(state("ses_3"))
    # The pause is over.
    monkeypatch.setattr(connect, "monotonic", lambda: 1e12)

    async def known() -> bool:
        # Parts of the server learn of new attributes some moments later.
        await driver.start(state(f"ses_{uuid4()}", "family"))
        return [each async for each in client.list_workflows("PerdureRoot = 'family'")] != []

    await until(known, "the attributes")


async def test_to_register_them_again_changes_nothing(client: Client) -> None:
    for _ in range(2):
        await register_search_attributes(client)

    await DriverClient(client, "queue").start(state("ses_1"))
    await found(client, "PerdureAgent = 'clerk'", "ses_1")


def test_an_operator_registers_them(bare: TemporalServer) -> None:
    said = operator.register_search_attributes(settings(bare.address))

    assert said == "Temporal knows the search attributes PerdureAgent, PerdureRoot and PerdureParent."


def test_an_operator_hears_that_temporal_does_not_answer() -> None:
    address = f"127.0.0.1:{free_port()}"

    said = operator.register_search_attributes(settings(address))

    assert f"could not be registered at {address} (UNAVAILABLE); sessions run without them." in said
