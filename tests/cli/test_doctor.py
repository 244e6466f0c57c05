"""`perdure doctor`: what is wrong, in time, and without a trace.

Its probes have time limits: a test that needs one of them to end well has the machine to itself.
"""

import contextlib
import json
import re
import subprocess
import time
from pathlib import Path

import pytest

from perdure.dev.supervisor import command
from tests.support import commands
from tests.support.plugin import StackFactory
from tests.support.processes import clean_environment, free_port
from tests.support.sockets import BlackHole
from tests.support.stack import Stack

Found = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack()


def report(*words: str, environment: dict[str, str], folder: Path | None = None) -> tuple[int, Found]:
    """Run it as a user does: the exit code, and the findings by probe."""
    done = subprocess.run(
        command("doctor", "--json", *words),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    found: Found = {}
    for line in done.stdout.splitlines():
        each = json.loads(line)
        found.setdefault(each["probe"], []).append(each)
    assert found, done.stderr
    return done.returncode, found


def statuses(found: Found) -> dict[str, str]:
    """The worst of each probe."""
    order = ["ok", "warn", "fail"]
    return {probe: max((each["status"] for each in listed), key=order.index) for probe, listed in found.items()}


@pytest.mark.alone
def test_a_deployment_that_is_well_has_nothing_to_mend(stack: Stack) -> None:
    port = stack.api_urls[0].rpartition(":")[2]

    code, found = report(environment={**clean_environment(), **stack.environment, "PERDURE_PORT": port})

    assert code == 0, found
    assert {probe: status for probe, status in statuses(found).items() if status == "fail"} == {}
    assert found["ports"][0]["message"] == f"An API of Perdure answers on 127.0.0.1:{port}."
    assert "namespace default" in found["temporal"][0]["message"]
    assert "schema has version" in found["store"][0]["message"]
    [served] = found["workers"]
    kinds = ("sessions", "turns", "runs", "models", "tools", "bodies")
    assert all(f"-{kind}" in served["message"] for kind in kinds)
    assert served["status"] == "ok"
    assert {"search", "retention", "builds", "clock", "agents", "versions", "keys", "settings", "folder"} <= set(found)


@pytest.mark.alone
def test_queues_without_a_worker_are_named(stack: Stack) -> None:
    elsewhere = {**clean_environment(), **stack.environment, "PERDURE_TASK_QUEUE": "nobody"}

    code, found = report(environment=elsewhere)

    assert code == 0
    assert "Nobody works for nobody-sessions, nobody-turns" in found["workers"][0]["message"]
    assert found["workers"][0]["status"] == "warn"


@pytest.mark.alone
def test_an_empty_folder_is_no_failure_and_stays_empty(tmp_path: Path) -> None:
    environment = clean_environment() | {"PERDURE_PORT": str(free_port()), "HOME": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    (tmp_path / "mine.py").write_text('from perdure import Agent\nagent = Agent(name="mine")\n')

    code, found = report("--agents", "mine:agent", environment=environment, folder=tmp_path)

    assert code == 0, found
    assert statuses(found)["store"] == "warn"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_a_store_is_opened_and_not_migrated(tmp_path: Path) -> None:
    database = tmp_path / "perdure.db"
    import sqlite3

    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE perdure_schema (application TEXT, version INTEGER)")
        connection.execute("INSERT INTO perdure_schema VALUES ('perdure', 1)")
        connection.commit()

    code, found = report(environment={**clean_environment(), "PERDURE_DATA_DIR": str(tmp_path)})

    assert code == 1
    assert "schema version 1" in found["store"][0]["message"]
    assert "perdure migrate" in found["store"][0]["todo"]
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT version FROM perdure_schema").fetchall() == [(1,)]
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)


@pytest.mark.alone
def test_it_ends_in_time_whatever_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    with BlackHole() as temporal, BlackHole() as postgres, BlackHole() as api:
        environment = {
            **clean_environment(),
            "PERDURE_TEMPORAL_ADDRESS": temporal.address,
            "PERDURE_DATABASE_URL": f"postgresql://user:hidden-password@{postgres.address}/sessions",
            "PERDURE_SECRET": "hidden-secret",
            "PERDURE_PORT": api.address.rpartition(":")[2],
        }
        began = time.monotonic()

        done = commands_of("--agents", "slow:agent", "--call", environment=environment, folder=tmp_path)

        took = time.monotonic() - began

    assert done.returncode == 1
    assert took < 15
    assert done.stdout.count("FAIL") >= 4
    assert "slow:agent was not loaded in time" in done.stdout
    assert "hidden" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def commands_of(*words: str, environment: dict[str, str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command("doctor", *words), env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.alone
def test_a_provider_that_does_not_answer_is_said(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'from perdure import Agent\nagent = Agent(name="mine", model="openai-chat:gpt-x")\n'
    )
    with BlackHole() as provider:
        environment = {
            **clean_environment(),
            "OPENAI_API_KEY": "hidden-key",
            "OPENAI_BASE_URL": f"http://{provider.address}/v1",
        }

        done = commands_of("--agents", "mine:agent", "--call", environment=environment, folder=tmp_path)

    assert done.returncode == 1
    # The call, or on a busy machine the process that makes it.
    assert re.search(r"FAIL  model +(openai-chat:gpt-x did not answer|No model answered) within", done.stdout)
    assert "Set: OPENAI_API_KEY." in done.stdout
    assert "hidden" not in done.stdout + done.stderr


@pytest.mark.alone
def test_a_model_is_called_only_when_asked_for(tmp_path: Path) -> None:
    environment = clean_environment()

    _, without = report(environment=environment, folder=tmp_path)
    _, called = report("--call", environment=environment, folder=tmp_path)

    assert "model" not in without
    assert "demo answers" in called["model"][0]["message"]


def test_a_misspelt_variable_names_the_setting() -> None:
    environment = {**clean_environment(), "PERDURE_TEMPORAL_ADRESS": "x", "PERDURE_COLOUR_OF_HAIR": "red"}

    done = commands.perdure("doctor", "--json", environment=environment)
    found = {each["message"]: each["todo"] for each in map(json.loads, done.stdout.splitlines())}

    misspelt = "PERDURE_TEMPORAL_ADRESS is not a setting, and changes nothing."
    assert found[misspelt] == "Did you mean PERDURE_TEMPORAL_ADDRESS?"
    assert any(message.startswith("PERDURE_COLOUR_OF_HAIR is not a setting") for message in found)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"PERDURE_MODEL": "anthropic:claude"}, "ANTHROPIC_API_KEY is not set"),
        ({"PERDURE_DATABASE_URL": "postgresql://127.0.0.1:1/x"}, "PERDURE_SECRET is not set"),
        ({"PERDURE_HOST": "0.0.0.0"}, "knows no caller"),
        ({"PERDURE_DEPLOYMENT": "shop"}, "belong together"),
        ({"PERDURE_TEMPORAL_ADDRESS": "127.0.0.1:1"}, "Temporal at 127.0.0.1:1 does not answer"),
        pytest.param({"PERDURE_AGENTS": "no_such:agent"}, "There is no module 'no_such'", marks=pytest.mark.alone),
        ({"PERDURE_DATABASE_URL": "mysql://x"}, "No store is known for mysql"),
    ],
)
def test_what_would_not_work_is_a_failure(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    code, found = report(environment={**clean_environment(), **variables}, folder=tmp_path)

    assert code == 1
    assert [
        each for listed in found.values() for each in listed if each["status"] == "fail" and said in each["message"]
    ]


def test_a_postgres_store_is_looked_at(postgres_url: str) -> None:
    environment = {**clean_environment(), "PERDURE_DATABASE_URL": postgres_url, "PERDURE_SECRET": "x"}

    _, found = report(environment=environment)

    assert "schema has version" in found["store"][0]["message"] or "perdure migrate" in found["store"][0]["todo"]


@pytest.mark.parametrize("password", ["hidden#word", "hidden/word", "hid@hidden", "hidden%zz"])
def test_a_password_that_is_not_encoded_is_not_shown(tmp_path: Path, password: str) -> None:
    environment = {
        **clean_environment(),
        "PERDURE_DATABASE_URL": f"postgresql://user:{password}@127.0.0.1:1/sessions",
        "PERDURE_SECRET": "x",
    }

    done = commands_of(environment=environment, folder=tmp_path)

    assert "FAIL  store" in done.stdout
    assert "Report this" not in done.stdout
    assert "hid" not in done.stdout + done.stderr


def test_a_folder_that_cannot_be_a_folder_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    code, found = report("--data-dir", str(tmp_path / "file" / "data"), environment=clean_environment())

    assert (code, found["folder"][0]["status"]) == (1, "fail")


def test_other_users_in_the_folder_are_warned_of(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    _, found = report("--data-dir", str(tmp_path), environment=clean_environment())

    assert found["folder"][0]["todo"] == f"chmod 700 {tmp_path}"
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_person_reads_what_to_do(tmp_path: Path) -> None:
    done = commands_of(environment={**clean_environment(), "PERDURE_AGENTS": "x"}, folder=tmp_path)

    assert "FAIL  agents" in done.stdout
    assert "→ Mend it: a worker would not start." in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1].endswith("to look at.")
