"""`perdure attempts` and `perdure leases`: who works at what."""

import json

import pytest

from tests.support import commands
from tests.support.plugin import StackFactory
from tests.support.stack import Stack


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.conformance.agents:concierge")


async def test_a_person_and_a_program_read_who_has_worked_at_what(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("say one")
        await talk.until_boundary()
        await talk.send("fail 400")
        await talk.until_boundary()
        session_id = talk.session_id

    table = commands.perdure("attempts", session_id, environment=stack.environment).stdout.splitlines()
    only = commands.perdure("attempts", session_id, "--turn", "1", environment=stack.environment).stdout.splitlines()
    objects = commands.perdure("attempts", session_id, "--json", environment=stack.environment).stdout.splitlines()

    assert [line.split()[:5] for line in table] == [
        ["turn", "step", "scope", "attempt", "status"],
        ["turn_0", "0", "model", "#1", "succeeded"],
        ["turn_1", "0", "model", "#1", "failed"],
    ]
    assert "MODEL_CALL_FAILED: The model" in table[2]
    assert len(only) == 2
    host, process, build = json.loads(objects[0])["worker"].rsplit(":", 2)
    assert host
    assert int(process) > 0
    assert build == "unversioned"


def test_an_unknown_session_is_said(stack: Stack) -> None:
    done = commands.perdure("attempts", "ses_none", environment=stack.environment)

    assert done.returncode != 0
    assert "ses_none" in done.stderr


def test_nothing_is_listed_while_nobody_works(stack: Stack) -> None:
    done = commands.perdure("leases", environment=stack.environment)

    assert (done.returncode, done.stdout) == (0, "")


async def test_a_person_and_a_program_read_what_happened_when(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.create("fail 503 once; say one")
        await talk.until_boundary()
        session_id = talk.session_id

    table = commands.perdure("timeline", session_id, environment=stack.environment).stdout.splitlines()
    objects = commands.perdure("timeline", session_id, "--json", environment=stack.environment).stdout.splitlines()
    found = [json.loads(line) for line in objects]

    beside = [each["type"] for each in found if "index" not in each]
    assert beside == [
        "delivery.queued",
        "delivery.claimed",
        "attempt.started",
        "attempt.ended",
        "step.retrying",
        "attempt.started",
        "attempt.ended",
    ]
    assert len(table) == len(found) + 1
    # What is in no log is indented.
    retried = next(line for line in table if "step.retrying" in line)
    assert "    step.retrying" in retried
    assert "reason MODEL_CALL_FAILED" in retried
    assert [line.split()[2] for line in table if "step.superseded" in line] == ["step.superseded"]
