"""What an operator does with sessions whose workflow somebody has ended, and with workflows of others."""

import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import WorkflowExecutionStatus
from temporalio.common import WorkflowIDReusePolicy
from temporalio.worker import Worker

from perdure.protocol import names
from perdure.runtime.connect import temporal_client
from perdure.runtime.drivers.client import DriverClient
from perdure.settings import Settings
from perdure.store.open import open_store
from tests.support import commands, given
from tests.support.plugin import StackFactory
from tests.support.stack import Stack, TemporalServer
from tests.support.talk import Talk
from tests.support.waiting import until


@pytest.fixture
def stack(make_stack: StackFactory, temporal_server: TemporalServer) -> Stack:
    return make_stack(temporal=temporal_server)


@pytest.fixture
async def talk(stack: Stack) -> AsyncGenerator[Talk]:
    """A session whose workflow is gone, and no API that would do something about it."""
    async with stack.talk() as talk:
        await talk.say("one")
        await talk.say("two")
        stack.apis[0].kill()
        await (await stack.client()).get_workflow_handle(talk.session_id).terminate(reason="enough")
        yield talk


@workflow.defn(sandboxed=False)
class Nothing:
    @workflow.run
    async def run(self) -> None:
        pass


async def complete(stack: Stack, session_id: str) -> None:
    """Have Temporal say that the session's workflow has completed."""
    client = await stack.client()
    async with Worker(client, task_queue="nothing", workflows=[Nothing]):
        await client.execute_workflow(
            Nothing.run, id=session_id, task_queue="nothing", id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE
        )


def repair(stack: Stack, talk: Talk, *how: str) -> str:
    done = commands.perdure("sessions", "repair", talk.session_id, *how, environment=stack.environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def says(stack: Stack, talk: Talk, message: str) -> str:
    """What the session answers to a caller of another API."""
    stack.start_api()
    async with stack.talk(1) as later:
        later.session_id, later.token, later.cursor = talk.session_id, talk.token, talk.cursor
        return await later.say(message)


@pytest.mark.parametrize("how", [("--restore", "turn_0"), ("--fresh",)], ids=["restore", "fresh"])
async def test_a_session_continues_that_is_restored_after_its_workflow_was_terminated(
    stack: Stack, talk: Talk, how: tuple[str, ...]
) -> None:
    assert "It continues from there" in repair(stack, talk, *how)

    assert await says(stack, talk, "three") == "You said: three"


async def test_a_session_continues_that_is_restored_though_temporal_has_completed_it(stack: Stack, talk: Talk) -> None:
    await complete(stack, talk.session_id)

    assert "an operator has to decide" in repair(stack, talk, "--retry")
    assert "It continues from there" in repair(stack, talk, "--fresh")

    assert await says(stack, talk, "three") == "You said: three"


async def test_a_retry_of_a_terminated_session_says_that_it_ends(stack: Stack, talk: Talk) -> None:
    assert (
        repair(stack, talk, "--retry") == f"{talk.session_id}: it had no workflow (WORKFLOW_TERMINATED); it is ended.\n"
    )

    store = await open_store(stack.settings.database)

    async def ended() -> bool:
        row = await store.session(talk.session_id)
        return row is not None and row.ended

    await until(ended, "the end of the session")
    await store.close()


async def test_a_retry_of_a_healthy_session_promises_nothing(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say("one")

        assert repair(stack, talk, "--retry").startswith("It needs no attention; ")
        assert await talk.say("two") == "You said: two"


async def test_workflows_of_another_store_are_not_ended_though_one_belongs_to_this_store(
    tmp_path: Path, temporal_server: TemporalServer
) -> None:
    environment = {
        "PERDURE_DATA_DIR": str(tmp_path),
        "PERDURE_TEMPORAL_ADDRESS": temporal_server.address,
        "PERDURE_TASK_QUEUE": f"shared-{uuid.uuid4().hex}",
    }
    settings = Settings(
        data_dir=tmp_path,
        temporal_address=temporal_server.address,
        task_queue=environment["PERDURE_TASK_QUEUE"],
    )
    mine, *others = (f"ses_{uuid.uuid4().hex}" for _ in range(3))
    store = await open_store(settings.database)
    await store.migrate()
    await store.create_session(replace(given.session(mine), title="\x1b]0;mine\x07 \x9b2J ü"))
    await store.commit(given.ending(session_id=mine))
    await store.close()
    client = await temporal_client(settings)
    driver = DriverClient(client, settings.task_queue)
    for each in (mine, *others):
        await client.start_workflow(
            names.SESSION_WORKFLOW, id=each, task_queue=names.queue(settings.task_queue, names.SESSIONS_QUEUE)
        )

    async def all_listed() -> bool:
        return len([each async for each in driver.running()]) == 3

    await until(all_listed, "Temporal's list")
    refused = commands.perdure("sessions", "reconcile", "--end-orphans", environment=environment)
    after = [await driver.status(each) for each in (mine, *others)]
    ended = commands.perdure("sessions", "reconcile", "--end-orphans", "--yes", environment=environment)

    assert (refused.returncode, "is it the right one?" in refused.stderr) == (1, True)
    assert after == [WorkflowExecutionStatus.RUNNING] * 3
    assert ended.returncode == 0, ended.stderr
    assert [await driver.status(each) for each in others] == [WorkflowExecutionStatus.TERMINATED] * 2
    # What a caller has written reaches the terminal as text.
    listed = commands.perdure("sessions", environment=environment).stdout
    assert listed.endswith("\\u001b]0;mine\\u0007 \\u009b2J ü\n")
