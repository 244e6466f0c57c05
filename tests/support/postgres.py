"""A private PostgreSQL for the tests: the machine's own binaries, a cluster of its own, gone at the end.

`postgres_url` is the address of a database without data. With `PERDURE_TEST_POSTGRES_URL` the databases are made on
that server instead; its user must be allowed to create them.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from perdure.store.engine.database import migrations
from tests.support.processes import free_port

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "100",
    "shared_buffers": "16MB",
    # The machine is not going to lose its power.
    "fsync": "off",
}

#: Faster, for a server that is never killed: what it has said to be committed may be lost then.
_CARELESS = {"full_page_writes": "off", "synchronous_commit": "off"}


@pytest.fixture(scope="session")
def postgres_server() -> Generator[str, None, None]:
    """The address of a server where the tests may create databases."""
    if url := os.environ.get("PERDURE_TEST_POSTGRES_URL"):
        yield url
        return
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed: no initdb on the PATH or in /usr/lib/postgresql/*/bin")
    cluster = Cluster(binaries)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def postgres_database(postgres_server: str) -> Generator[str, None, None]:
    """The address of one database for all tests of this process: to create one takes longer than most tests."""
    name = f"perdure_{uuid4().hex}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))
        try:
            yield urlunsplit(urlsplit(postgres_server)._replace(path=f"/{name}"))
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest, postgres_database: str) -> Generator[str]:
    """The address of a database without data that no other test uses now. Mostly it has our schema already.

    Tests that change the schema are marked `new_schema`: they, and the next test, get a database without tables.
    """
    new_schema = request.node.get_closest_marker("new_schema") is not None
    with psycopg.connect(postgres_database, autocommit=True) as connection:
        # Processes that an earlier test has killed may still hold locks.
        connection.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        if new_schema or not _has_our_schema(connection):
            _drop_all(connection)
        else:
            # To create the schema again would take longer than most tests.
            connection.execute(DELETE_ALL)
    yield postgres_database
    if new_schema:
        with psycopg.connect(postgres_database, autocommit=True) as connection:
            _drop_all(connection)


def _has_our_schema(connection: psycopg.Connection) -> bool:
    if connection.execute("SELECT to_regclass('perdure_schema')").fetchone() == (None,):
        return False
    return connection.execute("SELECT version FROM perdure_schema").fetchone() == (len(migrations("postgres")),)


def _drop_all(connection: psycopg.Connection) -> None:
    connection.execute("DROP SCHEMA public CASCADE")
    connection.execute("CREATE SCHEMA public")


#: Deletes the data and keeps the schema. To truncate so many small tables would take ten times as long.
DELETE_ALL = """
DO $$
DECLARE name text;
BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'perdure_schema' LOOP
        EXECUTE format('DELETE FROM %I', name);
    END LOOP;
END $$
"""


class Cluster:
    """A PostgreSQL cluster in a temporary directory, on a free loopback port. One that is `durable` may be killed."""

    def __init__(self, binaries: Path, *, durable: bool = False) -> None:
        self._binaries = binaries
        self._settings = _SETTINGS if durable else _SETTINGS | _CARELESS
        self.port = free_port()
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
        self.start_again()
        return f"postgresql://perdure@127.0.0.1:{self.port}/postgres"

    def start_again(self, *, wait: bool = True) -> None:
        """Start the server on the data that are there; without `wait` it may still be recovering."""
        settings = {**self._settings, "port": str(self.port), "unix_socket_directories": str(self._home)}
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        waits = "--wait" if wait else "--no-wait"
        self._run("pg_ctl", "start", waits, "--pgdata", self._data, "--log", self._home / "log", "--options", options)

    def kill(self) -> None:
        """End it as a crash does: it recovers when it starts again."""
        self._run("pg_ctl", "stop", "--wait", "--pgdata", self._data, "--mode=immediate")

    @property
    def running(self) -> bool:
        return (self._data / "postmaster.pid").exists()

    def stop(self) -> None:
        if self.running:
            self.kill()
        shutil.rmtree(self._home)

    def _run(self, binary: str, *arguments: str | Path) -> None:
        # pg_ctl leaves the server behind with our pipes: a file takes its output: no reader waits for their end.
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
                timeout=120,
                check=False,
            )
        if ended.returncode:
            raise RuntimeError(f"{binary} failed: {output.read_text()}")


def find_binaries() -> Path | None:
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
