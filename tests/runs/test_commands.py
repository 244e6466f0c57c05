"""The commands about runs, and the example of the guide."""

import json

import pytest

from tests.support import commands
from tests.support.plugin import StackFactory
from tests.support.stack import Stack


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(agents="examples.nightly:everything", apis=0)


def says(stack: Stack, *words: str, ok: bool = True) -> str:
    done = commands.perdure(*words, environment=stack.environment)
    assert (done.returncode == 0) == ok, done.stderr
    return done.stdout if ok else done.stderr


def test_a_run_is_started_listed_and_followed(stack: Stack) -> None:
    result = json.loads(says(stack, "runs", "start", "nightly", "--input", '{"day": "2027-01-31"}', "--wait"))

    assert (result["total"], result["sent"]) == (42, True)
    (line,) = says(stack, "runs", "--status", "completed").splitlines()
    run_id, status, _, name, *_ = line.split()
    assert (status, name) == ("completed", "nightly")
    pretty = says(stack, "logs", run_id)
    assert "info   counted total=42" in pretty
    assert "subagent.called  writer (ses_" in pretty
    assert "run.completed" in pretty
    known = dict(line.split(maxsplit=1) for line in says(stack, "runs", "show", run_id).splitlines())
    assert (known["status"], json.loads(known["result"])) == ("completed", result)
    assert json.loads(known["input"]) == {"day": "2027-01-31"}
    _, *attempts = says(stack, "attempts", run_id).splitlines()
    assert [line.split()[:3] for line in attempts] == [
        ["body", f"#{number}", "succeeded"] for number in range(1, len(attempts) + 1)
    ]
    assert attempts
    told = [json.loads(each) for each in says(stack, "logs", run_id, "--format", "json", "--follow").splitlines()]
    assert [told[0]["type"], told[-1]["type"]] == ["run.started", "run.completed"]
    assert [each["index"] for each in told] == list(range(len(told)))


def test_a_run_that_sleeps_is_cancelled(stack: Stack) -> None:
    given = '{"day": "2027-01-31", "pause": 3600}'
    run_id = says(stack, "runs", "start", "nightly", "--input", given).strip()

    assert "will be stopped" in says(stack, "runs", "cancel", run_id)
    assert "run.cancelled" in says(stack, "logs", run_id, "--follow")
    assert "ended before" in says(stack, "runs", "cancel", run_id)


def test_what_cannot_be_is_refused_in_a_sentence(stack: Stack) -> None:
    assert "No workflow named 'weekly'" in says(stack, "runs", "start", "weekly", ok=False)
    assert "Invalid input for nightly" in says(stack, "runs", "start", "nightly", "--input", "{}", ok=False)
    assert "not JSON" in says(stack, "runs", "start", "nightly", "--input", "{", ok=False)
    assert "knows no run" in says(stack, "logs", "run_unknown", ok=False)
    assert "knows no run" in says(stack, "runs", "show", "run_unknown", ok=False)


def test_operators_repair_and_delete_a_run_as_what_it_is(stack: Stack) -> None:
    says(stack, "runs", "start", "nightly", "--input", '{"day": "2027-01-31"}', "--wait")
    run_id = says(stack, "runs", "--limit", "1").split()[0]

    assert "no turns to go back to" in says(stack, "sessions", "repair", run_id, "--fresh", ok=False)
    assert run_id not in says(stack, "sessions")
    assert "deleted" in says(stack, "sessions", "delete", run_id)
    assert run_id not in says(stack, "runs")
