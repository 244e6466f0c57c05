"""A PostgreSQL cluster for one run, from the programs on this machine."""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

from perdure.dev.supervisor import Part
from perdure.errors import Invalid

from .stack import free_port, supervised

# Who runs the server when we are root: PostgreSQL refuses to be root.
_STAND_IN = "postgres"


@contextlib.asynccontextmanager
async def cluster(directory: Path) -> AsyncGenerator[str]:
    """The address of an empty database."""
    data, port = directory / "postgres", free_port()
    become = _become(directory)
    arguments = ["-D", str(data), "-U", "bench", "-A", "trust", "-E", "UTF8", "--no-sync"]
    await _run(*become, _program("initdb"), *arguments)
    server = [_program("postgres"), "-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-k", ""]
    url = f"postgresql://bench@127.0.0.1:{port}/postgres"
    async with supervised(directory / "postgres-logs") as supervisor:
        await supervisor.start(Part("postgres", [*become, *server], lambda _: _answers(url), shown=False))
        yield url


def version() -> str:
    said = subprocess.run([_program("postgres"), "--version"], capture_output=True, text=True, check=True, timeout=20)
    return said.stdout.strip()


def _become(directory: Path) -> list[str]:
    if os.geteuid() != 0:
        return []
    # The other user must get to its data through ours.
    directory.chmod(0o755)
    home = directory / "postgres"
    home.mkdir()
    shutil.chown(home, _STAND_IN)
    return ["setpriv", f"--reuid={_STAND_IN}", f"--regid={_STAND_IN}", "--clear-groups"]


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        newest = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
        if not newest:
            raise Invalid(f"There is no `{name}`: install PostgreSQL.")
        found = str(newest[-1])
    return found


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise Invalid(f"{command[0]} failed: {said.decode()[-500:]}")


async def _answers(url: str) -> None:
    import psycopg

    while True:
        try:
            async with await psycopg.AsyncConnection.connect(url, connect_timeout=2):
                return
        except psycopg.OperationalError:
            await asyncio.sleep(0.05)
