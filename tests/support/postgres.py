"""A private PostgreSQL for the tests: the machine's own binaries, a cluster of its own, gone at the end.

`postgres_url` is the address of a fresh, empty database. With `PERDURE_TEST_POSTGRES_URL` the databases are made on
that server instead; its user must be allowed to create them.
"""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "listen_addresses": "127.0.0.1",
    "max_connections": "100",
    "shared_buffers": "16MB",
}


@pytest.fixture(scope="session")
def postgres_server() -> Generator[str, None, None]:
    """The address of a server where the tests may create databases."""
    if url := os.environ.get("PERDURE_TEST_POSTGRES_URL"):
        yield url
        return
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed: no initdb on the PATH or in /usr/lib/postgresql/*/bin")
    cluster = Cluster(binaries)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def postgres_url(postgres_server: str) -> Generator[str, None, None]:
    """The address of an empty database that nobody else uses."""
    name = f"perdure_{uuid4().hex}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))
        try:
            yield urlunsplit(urlsplit(postgres_server)._replace(path=f"/{name}"))
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


class Cluster:
    """A PostgreSQL cluster in a temporary directory, on a free loopback port."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._user = _user()
        self._home = Path(tempfile.mkdtemp(prefix="perdure-postgres-"))
        self._data = self._home / "data"
        if self._user is not None:
            os.chown(self._home, self._user.pw_uid, self._user.pw_gid)

    def start(self) -> str:
        self._run(
            "initdb",
            "--pgdata",
            self._data,
            "--username=perdure",
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
        )
        port = _free_port()
        settings = {**_SETTINGS, "port": str(port), "unix_socket_directories": str(self._home)}
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        self._run(
            "pg_ctl", "start", "--wait", "--pgdata", self._data, "--log", self._home / "log", "--options", options
        )
        return f"postgresql://perdure@127.0.0.1:{port}/postgres"

    def stop(self) -> None:
        if (self._data / "postmaster.pid").exists():
            self._run("pg_ctl", "stop", "--wait", "--pgdata", self._data, "--mode=immediate")
        shutil.rmtree(self._home)

    def _run(self, binary: str, *arguments: str | Path) -> None:
        # pg_ctl leaves the server behind with our pipes: a file takes its output, so that nobody waits for their end.
        output = self._home / f"{binary}.out"
        with output.open("wb") as sink:
            ended = subprocess.run(
                [self._binaries / binary, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=self._home,
                user=None if self._user is None else self._user.pw_uid,
                group=None if self._user is None else self._user.pw_gid,
                extra_groups=None if self._user is None else [],
                timeout=60,
                check=False,
            )
        if ended.returncode:
            raise RuntimeError(f"{binary} failed: {output.read_text()}")


def _binaries() -> Path | None:
    on_path = shutil.which("initdb")
    if on_path is not None:
        # Debian links single programs; their siblings stand beside the real one.
        return Path(on_path).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda found: int(found.parts[-3]))
    return installed[-1].parent if installed else None


def _user() -> pwd.struct_passwd | None:
    """Who runs the server: PostgreSQL refuses to be root."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("PostgreSQL does not run as root, and there is no other user to run it")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
