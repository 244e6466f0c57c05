"""Programs that wait for all kinds of work at once, and whose driver is lost meanwhile."""

from typing import Any

import pytest

from perdure.runtime.drivers.client import DriverClient
from perdure.session.state import Rebuild
from tests.remote.fake import Fake
from tests.support.plugin import StackFactory
from tests.support.processes import free_port
from tests.support.stack import Stack
from tests.support.talk import Talk, text, types

from .test_sessions import approve, of_type, program, requests_in

DONE: list[dict[str, Any]] = [
    {"type": "message.completed", "data": {"message": "From away"}},
    {"type": "session.completed"},
]
PORT = free_port()


@pytest.fixture(scope="module", params=["child", "inline"])
def stack(module_stack: StackFactory, request: pytest.FixtureRequest) -> Stack:
    environment = {"PERDURE_TURNS": request.param, "REMOTE_URL": f"http://127.0.0.1:{PORT}"}
    return module_stack(provider=True, agents="tests.code_mode.agents:agents", environment=environment)


async def create(talk: Talk, message: str) -> None:
    created = (await talk.http.post("/agents/mixed/eve/v1/session", json={"message": message})).json()
    talk.session_id, talk.token, talk.cursor = created["sessionId"], created["continuationToken"], 0


ALL = program(
    "import asyncio",
    'got = await asyncio.gather(away(message="say Hi"), clerk(message="say Near"), pay(1), where())',
    'got + [await away(message="say Again"), await clerk(message="say Again")]',
)


async def rebuild(stack: Stack, talk: Talk) -> None:
    """The driver is lost, and begins again from the store."""
    client = await stack.client()
    await client.get_workflow_handle(talk.session_id).terminate("lost")
    await DriverClient(client, stack.settings.task_queue).rebuild(talk.session_id, Rebuild(reason="WORKFLOW_LOST"))
    await talk.until("session.rebuilt")


@pytest.mark.parametrize("lost", [False, True], ids=["", "rebuilt"])
async def test_a_program_waits_for_other_servers_agents_people_and_pools_at_once(stack: Stack, lost: bool) -> None:
    gpu = stack.start_worker({"PERDURE_POOLS": "gpu", "OPENAI_API_KEY": ""})
    async with Fake(port=PORT, events=DONE) as fake, stack.talk() as talk:
        await create(talk, ALL)
        (request,) = requests_in(events := await talk.until_boundary())
        if lost:
            await rebuild(stack, talk)
        await talk.send(inputResponses=approve(request))
        events += await talk.until_boundary()
    gpu.kill()

    assert text(events) == f'Results: ["From away","Near","paid 1","process {gpu.pid}","From away","Again"]'
    assert len(of_type(events, "subagent.called")) == len(of_type(events, "subagent.completed")) == 4
    assert len({each.headers["idempotency-key"] for each in fake.starts}) == len(fake.starts) == 2


async def test_to_cancel_a_program_that_waits_for_everything(stack: Stack) -> None:
    async with Fake(port=PORT, cancel_status=200, cancel={"status": "accepted"}) as fake, stack.talk() as talk:
        calls = 'away(message="say Hi"), clerk(message="drip 900 words delay 50"), pay(1)'
        await create(talk, program("import asyncio", f"await asyncio.gather({calls})"))
        await talk.until_boundary()
        fake.events = [{"type": "session.failed", "data": {}}]
        assert (await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")).is_success
        events = await talk.until_boundary()

        assert types(events)[-2:] == ["turn.cancelled", "session.waiting"]
        assert len(of_type(events, "action.result")) == 3
        assert await talk.say("say Still here") == "Still here"
