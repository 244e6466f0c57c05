"""The stack that other tests use does what they believe it does."""

from pathlib import Path

from tests.support.stack import Stack


async def test_a_session_talks_to_the_scripted_provider_or_the_demo(stack: Stack) -> None:
    async with stack.talk() as talk:
        assert "hello" in await talk.say("hello")


async def test_a_session_survives_a_restart_of_temporal(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        async with stack.talk() as talk:
            await talk.say("before")

            stack.restart_temporal()

            assert "after" in await talk.say("after")


async def test_the_store_and_temporal_are_open_to_the_test(stack: Stack) -> None:
    async with stack.talk() as talk:
        await talk.say("hello")
    store, client = await stack.store(), await stack.client()
    try:
        row = await store.session(talk.session_id)
        workflow = await client.get_workflow_handle(talk.session_id).describe()
    finally:
        await store.close()

    assert row is not None
    assert row.status == "waiting"
    assert workflow.status is not None
    assert workflow.status.name == "RUNNING"
