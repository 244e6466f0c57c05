"""Only `perdure migrate` changes a schema: a new process must not take it away from those that still run."""

import sqlite3
import subprocess
from pathlib import Path

import pytest

from perdure.dev.supervisor import command
from tests.support import given
from tests.support.processes import clean_environment, free_port
from tests.support.stack import TemporalServer


def run(directory: Path, temporal: TemporalServer, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {
        **clean_environment(),
        "PERDURE_DATA_DIR": str(directory),
        "PERDURE_TEMPORAL_ADDRESS": temporal.address,
        "PERDURE_PORT": str(free_port()),
    }
    part, *options = words
    return subprocess.run(
        command(part, *options), env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def tables(directory: Path) -> list[str]:
    connection = sqlite3.connect(directory / "perdure.db")
    try:
        return [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    finally:
        connection.close()


def declare(directory: Path, version: int, compatible: int) -> None:
    connection = sqlite3.connect(directory / "perdure.db", isolation_level=None)
    try:
        connection.execute("UPDATE perdure_schema SET version = ?, compatible = ?", (version, compatible))
    finally:
        connection.close()


@pytest.mark.parametrize("part", ["worker", "api"])
def test_a_process_does_not_migrate_and_names_the_command_to_run(
    tmp_path: Path, temporal_server: TemporalServer, part: str
) -> None:
    (tmp_path / "perdure.db").touch()

    ended = run(tmp_path, temporal_server, part)

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"perdure: The database has schema version 0; this code needs {given.SCHEMA}. Run `perdure migrate` first."
    )
    assert tables(tmp_path) == []


@pytest.mark.parametrize("part", ["worker", "api"])
def test_a_process_that_is_too_old_for_the_schema_says_so(
    tmp_path: Path, temporal_server: TemporalServer, part: str
) -> None:
    run(tmp_path, temporal_server, "migrate")
    declare(tmp_path, version=99, compatible=98)

    ended = run(tmp_path, temporal_server, part)

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "perdure: The database has schema version 99, which needs code that knows 98; "
        f"this one knows {given.SCHEMA}. Upgrade Perdure."
    )


def test_an_older_migrate_leaves_a_newer_schema_alone_and_says_so(
    tmp_path: Path, temporal_server: TemporalServer
) -> None:
    run(tmp_path, temporal_server, "migrate")
    declare(tmp_path, version=99, compatible=3)

    ended = run(tmp_path, temporal_server, "migrate")

    assert ended.returncode == 0
    assert ended.stdout.startswith("The store is up to date.\n")
    assert f"newer than the {given.SCHEMA} of this code, which can work with it. Nothing was changed." in ended.stderr
