"""Sessions that an operator creates: forks and imports have the bounds that their agent declares."""

import asyncio
from pathlib import Path

import pytest

from perdure import Agent, AgentRegistry, Limits
from perdure.cli import operator
from perdure.errors import AgentNotFound
from perdure.protocol.deliveries import Bounds
from perdure.runtime.forks import export_session
from perdure.settings import Settings
from perdure.store.open import open_store
from perdure.store.values import SessionQuery
from perdure.testing import ScriptedModel
from tests.support.lab import SESSION, Lab

AGENTS = AgentRegistry([Agent("tester", limits=Limits(session_seconds=60.0, idle_seconds=30.0))])
#: A list, as a module has it.
LISTED = list(AGENTS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The export of a session that is in a store beside it; no workflow runs, and Temporal is away."""

    async def exported() -> bytes:
        store = await open_store(f"sqlite:///{tmp_path / 'perdure.db'}")
        await store.migrate()
        it = Lab(store, AGENTS["tester"], ScriptedModel(["zero"]), "conversation", Settings(agents=""))
        await it.model(await it.deliver("m0"))
        lines = [line async for line in export_session(store, SESSION)]
        await store.close()
        return b"".join(lines)

    path = tmp_path / "export.jsonl"
    path.write_bytes(asyncio.run(exported()))
    return path


def settings(file: Path, agents: str) -> Settings:
    return Settings(agents=agents, data_dir=file.parent, temporal_address="127.0.0.1:1")


def bounds(file: Path) -> dict[str, Bounds | None]:
    """Of each session in the store."""

    async def read() -> dict[str, Bounds | None]:
        store = await open_store(f"sqlite:///{file.parent / 'perdure.db'}")
        found = (await store.sessions(SessionQuery())).sessions
        await store.close()
        return {row.session_id: row.bounds for row in found}

    return asyncio.run(read())


def test_an_import_and_a_fork_have_the_bounds_of_their_agent(file: Path) -> None:
    known = settings(file, f"{__name__}:LISTED")

    imported, _ = operator.import_(known, file, None, again=False)
    forked, _ = operator.fork(known, SESSION, "0")

    for session_id in (imported, forked):
        given = bounds(file)[session_id]
        assert given is not None
        assert given.deadline is not None
        assert given.idle_seconds == 30.0


def test_a_session_whose_agent_is_not_known_here_is_not_created(file: Path) -> None:
    unknown = settings(file, "perdure.agents.demo:agent")

    with pytest.raises(AgentNotFound, match=r"'tester' is known here.*PERDURE_AGENTS"):
        operator.import_(unknown, file, None, again=False)
    with pytest.raises(AgentNotFound, match="PERDURE_AGENTS"):
        operator.fork(unknown, SESSION, "0")

    assert list(bounds(file)) == [SESSION]
