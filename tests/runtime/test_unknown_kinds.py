"""A delivery that the session's workers cannot read is kept until a build serves that can."""

import sqlite3
from datetime import UTC, datetime, timedelta

import pytest

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryBody, DeliveryRef
from perdure.store.deliveries import NewDelivery
from perdure.store.engine.rows import stamp
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)

#: The driver looks for another build a minute after the delivery was accepted, and again a minute after that.
LOOKS = 150


async def accept_later(stack: Stack, session_id: str, text: str) -> None:
    """Accept a delivery as the API of a newer build does, which was some seconds ago."""
    store = await stack.store()
    try:
        session = await store.session(session_id)
        assert session is not None
        ref = DeliveryRef(id="dlv_later", kind="later", token_hash="", version=2)
        body = DeliveryBody(message=text, principal=session.principal).model_dump(mode="json", exclude_none=True)
        await store.accept(NewDelivery(session_id, ref.id, body, "owner", ref=ref.model_dump(mode="json")))
    finally:
        await store.close()
    with sqlite3.connect(stack.settings.database.removeprefix("sqlite:///")) as connection:
        before = stamp(datetime.now(UTC) - timedelta(seconds=40))
        connection.execute("UPDATE deliveries SET accepted_at = ? WHERE delivery_id = ?", (before, ref.id))
    connection.close()


async def kinds_in_the_inbox(stack: Stack, session_id: str) -> list[str]:
    handle = (await stack.client()).get_workflow_handle(session_id)
    return [each["kind"] for each in (await handle.query(names.DESCRIBE))["inbox"]]


async def until_it_is_kept(stack: Stack, session_id: str) -> None:
    async def kept() -> bool:
        return await kinds_in_the_inbox(stack, session_id) == ["?later"]

    await until(kept, "the driver to keep the delivery")


async def test_it_is_read_once_a_build_serves_that_knows_its_kind(make_stack: StackFactory) -> None:
    stack = make_stack(agents="tests.runtime.served:kept", provider=True)
    async with stack.talk() as talk:
        assert await talk.say("say one") == "one"
        await accept_later(stack, talk.session_id, "say late")
        await until_it_is_kept(stack, talk.session_id)

        # Others overtake it.
        assert await talk.say("say two") == "two"
        before = talk.cursor
        stack.workers[0].kill()
        stack.start_worker({"PERDURE_AGENTS": "tests.runtime.newer:agent"})

        events = await talk.until("session.waiting", before, within=LOOKS)

    assert [event["data"]["message"] for event in events if event["type"] == "message.completed"] == ["late"]
    assert [event["meta"]["deliveryIds"] for event in events if event["type"] == "turn.started"] == [["dlv_later"]]


async def test_a_cancel_is_about_it_and_not_about_the_next_message(make_stack: StackFactory) -> None:
    stack = make_stack(agents="tests.runtime.served:kept", provider=True)
    async with stack.talk() as talk:
        assert await talk.say("say one") == "one"
        before = talk.cursor
        await accept_later(stack, talk.session_id, "say late")
        await until_it_is_kept(stack, talk.session_id)

        cancelled = await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel", json={})
        (refused,) = (await talk.until("delivery.refused", before))[-1:]

        assert cancelled.json()["status"] == "accepted"
        assert (refused["data"]["deliveryId"], refused["data"]["code"]) == ("dlv_later", "turn_cancelled")
        assert await talk.say("say two") == "two"
