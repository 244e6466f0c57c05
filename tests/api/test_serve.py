"""The process that serves HTTP."""

import asyncio
import socket
import time
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from api.server import serve
from perdure.errors import Invalid, Misconfigured
from perdure.settings import Settings
from perdure.store.open import open_store
from tests.api.served import URL, serving
from tests.support.processes import PATIENCE, free_port
from tests.support.waiting import until


def settings(directory: Path, port: int, host: str = "127.0.0.1") -> Settings:
    # Nothing listens there: the API must not mind.
    nowhere = f"127.0.0.1:{free_port()}"
    return Settings(data_dir=directory, host=host, port=port, temporal_address=nowhere)


async def migrate(settings: Settings) -> None:
    store = await open_store(settings.database)
    await store.migrate()
    await store.close()


async def test_it_boots_before_temporal_and_stops_at_a_signal(tmp_path: Path) -> None:
    port = free_port()
    await migrate(settings(tmp_path, port))
    stop, ready = asyncio.Event(), asyncio.Event()
    server = asyncio.create_task(serve(settings(tmp_path, port), stop, ready))
    await asyncio.wait_for(ready.wait(), PATIENCE)

    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, verify=False) as http:
        healthy = await http.get("/eve/v1/health")
        described = await http.get("/eve/v1/info")
        started = await http.post(URL, json={"message": "hello"})
        assert started.headers["x-perdure-delayed"] == "true"
    stop.set()
    await asyncio.wait_for(server, PATIENCE)

    assert [answer.status_code for answer in (healthy, described, started)] == [200, 200, 202]
    with pytest.raises(ConnectionRefusedError), closing(socket.socket()) as sock:
        sock.connect(("127.0.0.1", port))


async def test_a_policy_that_clients_could_not_live_with_is_refused_at_the_start(tmp_path: Path) -> None:
    hiding = settings(tmp_path, free_port()).model_copy(update={"stream_exclude": "message.completed"})

    with pytest.raises(Invalid, match=r"PERDURE_STREAM_EXCLUDE: 'message\.completed' has to be shown as it is"):
        await serve(hiding, asyncio.Event())


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(Misconfigured, match=f"Port {port} on 127.0.0.1 is taken"):
            await serve(settings(tmp_path, port), asyncio.Event())


async def test_it_does_not_boot_open_to_the_world(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="PERDURE_API_KEYS"):
        await serve(settings(tmp_path, free_port(), host="0.0.0.0"), asyncio.Event())

    assert not list(tmp_path.iterdir())


@pytest.mark.alone
async def test_open_streams_end_when_the_server_does(tmp_path: Path) -> None:
    async with httpx2.AsyncClient(timeout=PATIENCE, verify=False) as http:
        async with serving(tmp_path) as api:
            session_id = (await api.create())["sessionId"]
            url = f"{api.url}{URL}/{session_id}/stream"
            readers = [asyncio.create_task(http.get(url)) for _ in range(20)]
            await until(lambda: api.broadcasts.readers == 20)
            began = time.perf_counter()
        took = time.perf_counter() - began
        answers = await asyncio.gather(*readers)

    assert took < 5
    assert {answer.text.strip() for answer in answers} == {""}
