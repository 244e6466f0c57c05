"""`perdure plan`, `perdure checkpoints` and `perdure rollback`."""

import json

import pytest

from tests.support import commands
from tests.support.plugin import StackFactory
from tests.support.stack import Stack

SET_UP = 'call planning_setup_plan {"objective": "Ship it", "initial_steps": ["build", "send"]}'
DONE = 'call planning_update_step {"step_id": %d, "status": "%s"}'


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.runtime.planned:planner")


def said(stack: Stack, *words: str) -> list[str]:
    done = commands.perdure(*words, environment=stack.environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


async def test_a_person_and_a_program_see_how_far_a_session_is_and_take_it_back(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say("say one")
        none = said(stack, "plan", talk.session_id), said(stack, "plan", talk.session_id, "--json")
        nothing = said(stack, "checkpoints", talk.session_id)
        await talk.say(f"{SET_UP} then {DONE % (1, 'done')} then {DONE % (2, 'in_progress')} then say half")
        half = said(stack, "plan", talk.session_id)
        await talk.say(f"{DONE % (2, 'done')} then say done")
        [done] = said(stack, "plan", talk.session_id, "--json")
        table = said(stack, "checkpoints", talk.session_id)
        objects = [json.loads(line) for line in said(stack, "checkpoints", talk.session_id, "--json")]
        rolled = said(stack, "rollback", talk.session_id, objects[-1]["checkpointId"], "--include-logs")
        back = said(stack, "plan", talk.session_id)
        forked = said(stack, "sessions", "fork", talk.session_id, "--checkpoint", objects[-1]["checkpointId"])
        begins = said(stack, "plan", forked[0].split()[-1])

    assert none == (["The session has no plan."], ["null"])
    assert nothing == []
    assert half == ["Ship it (active, 1 of 2 done)", "✓ 1  build", "… 2  send"]
    assert json.loads(done)["status"] == "completed"
    assert table[0].split() == ["checkpoint", "number", "taken", "turn", "step", "bytes", "plan", "step", "name"]
    assert [line.split()[:2] for line in table[1:]] == [[each["checkpointId"], str(each["number"])] for each in objects]
    assert [each["planStep"] for each in objects] == [2, 1]
    assert objects[-1]["checkpointId"] in rolled[0]
    assert back == ["Ship it (active, 1 of 2 done)", "✓ 1  build", "  2  send"]
    assert begins == ["Ship it (active, 1 of 2 done)", "✓ 1  build", "  2  send"]


@pytest.mark.parametrize("places", [(), ("--turn", "0", "--checkpoint", "chk_1")])
def test_a_fork_has_one_place(stack: Stack, places: tuple[str, ...]) -> None:
    refused = commands.perdure("sessions", "fork", "ses_1", *places, environment=stack.environment)

    assert (refused.returncode, "Name the place of the fork" in refused.stderr) == (1, True)


def test_what_is_not_there_is_said(stack: Stack) -> None:
    for words in (("plan", "ses_none"), ("checkpoints", "ses_none"), ("rollback", "ses_none", "chk_none")):
        done = commands.perdure(*words, environment=stack.environment)

        assert done.returncode == 1
        assert "ses_none" in done.stderr
