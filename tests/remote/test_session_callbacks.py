"""A session that has ended reports to who has started it elsewhere, whatever happens to either of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.remote.fake import Asked, Fake
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.talk import Talk

TOKEN = "a-token-that-is-secret"


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.remote.agents:near")


def callback(fake: Fake) -> dict[str, Any]:
    url = f"{fake.url}/eve/v1/callback/{TOKEN}"
    return {"callId": "call_1", "subagentName": "away", "token": TOKEN, "url": url}


async def reports(fake: Fake, count: int = 1, within: float = 30.0) -> list[Asked]:
    async with asyncio.timeout(within):
        while len(found := fake.of("POST", f"/callback/{TOKEN}")) < count:
            await asyncio.sleep(0.05)
    return found


async def settled(stack: Stack, talk: Talk, within: float = 30.0) -> str:
    store = await stack.store()
    try:
        async with asyncio.timeout(within):
            while not ((known := await store.callback(talk.session_id)) and known.settled):
                await asyncio.sleep(0.05)
        return known.settled
    finally:
        await store.close()


async def test_a_task_that_has_completed_reports_its_output(stack: Stack) -> None:
    async with Fake() as fake, stack.talk() as talk:
        await talk.create("say Done", mode="task", callback=callback(fake))
        (report,) = await reports(fake)

        assert await settled(stack, talk) == "delivered"
    about = {"callId": "call_1", "subagentName": "away", "sessionId": talk.session_id}
    assert report.body == {"kind": "session.completed", "output": "Done", **about}
    assert report.headers["idempotency-key"] == f"callback/{talk.session_id}"
    assert len(fake.asked) == 1


async def test_a_task_that_has_failed_reports_that(stack: Stack) -> None:
    async with Fake() as fake, stack.talk() as talk:
        await talk.create("fail 400", mode="task", callback=callback(fake))
        (report,) = await reports(fake)

    assert report.body["kind"] == "session.failed"
    assert report.body["error"]["code"] == "SESSION_FAILED"


async def test_a_task_that_was_cancelled_reports_that(stack: Stack) -> None:
    async with Fake() as fake, stack.talk() as talk:
        await talk.create("drip 500 words delay 100", mode="task", callback=callback(fake))
        await talk.until("message.appended")
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")
        (report,) = await reports(fake)

    assert report.body["kind"] == "session.failed"


async def test_a_conversation_reports_when_it_is_reset(stack: Stack) -> None:
    async with Fake() as fake, stack.talk() as talk:
        await talk.create("say Hello", callback=callback(fake))
        await talk.until_boundary()
        assert fake.asked == []
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/reset")
        (report,) = await reports(fake)

    assert report.body["kind"] == "session.completed"


async def test_a_session_that_is_deleted_reports_that(stack: Stack) -> None:
    async with Fake() as fake, stack.talk() as talk:
        await talk.create("say Hello", callback=callback(fake))
        await talk.until_boundary()
        await talk.http.delete(f"/v1/sessions/{talk.session_id}")
        (report,) = await reports(fake)

    assert report.body["kind"] == "session.failed"


async def test_a_callback_is_repeated_until_it_is_taken_and_always_with_the_same_key(stack: Stack) -> None:
    async with Fake(callbacks=[500, 302, 404, 202], redirect="http://127.0.0.1:9/") as fake, stack.talk() as talk:
        await talk.create("say Done", mode="task", callback=callback(fake))
        found = await reports(fake, 4, within=60)

        assert await settled(stack, talk) == "delivered"
    assert len({each.headers["idempotency-key"] for each in found}) == 1
    assert all(each.body == found[0].body for each in found)
    assert len(fake.asked) == 4


async def test_a_callback_that_is_refused_is_not_repeated(stack: Stack) -> None:
    async with Fake(callbacks=[410]) as fake, stack.talk() as talk:
        await talk.create("say Done", mode="task", callback=callback(fake))

        assert await settled(stack, talk) == "refused"
    assert len(fake.asked) == 1


async def test_a_session_whose_driver_is_gone_reports_all_the_same(stack: Stack) -> None:
    async with Fake() as fake, stack.talk() as talk:
        await talk.create("say Hello", callback=callback(fake))
        await talk.until_boundary()
        client = await stack.client()
        await client.get_workflow_handle(talk.session_id).terminate()
        (report,) = await reports(fake, within=90)

        assert await settled(stack, talk) == "delivered"
    assert report.body["kind"] == "session.failed"


async def test_a_callback_of_a_dead_worker_is_delivered_by_an_api(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, agents="tests.remote.agents:near")
    async with Fake() as fake, stack.talk() as talk:
        fake.callbacks = [500, 202]
        await talk.create("say Done", mode="task", callback=callback(fake))
        await reports(fake)
        stack.workers[0].kill()
        # If it died before it could note that the try has failed, its lease has to end.
        found = await reports(fake, 2, within=90)

        assert await settled(stack, talk) == "delivered"
    assert found[1].body == found[0].body


async def test_a_callback_in_the_hand_of_a_process_that_dies_is_delivered_by_another(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, agents="tests.remote.agents:near")
    async with Fake() as fake, stack.talk() as talk:
        url = callback(fake)
        blocked = asyncio.Event()
        answer = fake._exchange  # pyright: ignore[reportPrivateUsage]

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not blocked.is_set():
                blocked.set()
                await asyncio.Event().wait()
            await answer(reader, writer)

        fake._exchange = hold  # pyright: ignore[reportPrivateUsage]
        await talk.create("say Done", mode="task", callback=url)
        await asyncio.wait_for(blocked.wait(), 30)
        stack.workers[0].kill()
        await reports(fake, within=90)

        assert await settled(stack, talk) == "delivered"


async def test_the_token_of_a_callback_is_nowhere_after_it_was_delivered(stack: Stack) -> None:
    async with Fake() as fake, stack.talk() as talk:
        await talk.create("say Done", mode="task", callback=callback(fake))
        await reports(fake)
        await settled(stack, talk)
        client = await stack.client()
        history = (await client.get_workflow_handle(talk.session_id).fetch_history()).to_json()
        events = (await talk.http.get(f"/eve/v1/session/{talk.session_id}/stream")).text
        shown = (await talk.http.get(f"/v1/sessions/{talk.session_id}")).text

    logs = "".join(text for _, text in stack.logs())
    assert not any(TOKEN in each for each in (history, events, shown, logs))
    store = await stack.store()
    assert await store.claim_callback(talk.session_id, 1) is None
    await store.close()


async def test_in_production_a_callback_to_this_machine_is_refused(make_stack: StackFactory, tmp_path: Path) -> None:
    key = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"  # of "test"
    stack = make_stack(provider=True, workers=0, environment={"PERDURE_API_KEYS": f"tests={key}"})
    async with Fake() as fake, Talk(stack.url, headers={"x-api-key": "test"}) as talk:
        answer = await talk.http.post("/eve/v1/session", json={"message": "hi", "callback": callback(fake)})

    assert answer.status_code == 400
    assert answer.json()["error"] == (
        "Invalid callback metadata: callback.url: Callback url host must not be a private or reserved address."
    )


@pytest.mark.parametrize("url", ["http://localhost:9", "http://[::1]:9"])
async def test_in_development_this_machine_is_no_foreign_address(stack: Stack, url: str) -> None:
    async with stack.talk() as talk:
        given = {"callId": "c", "subagentName": "s", "token": "t", "url": f"{url}/eve/v1/callback/t"}
        answer = await talk.http.post("/eve/v1/session", json={"message": "say hi", "callback": given})

    assert answer.status_code == 202
