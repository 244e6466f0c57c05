"""The examples do with the built-in demo model what their first lines say."""

import asyncio
import json
import re
from types import ModuleType

import pytest

from examples import long_job, newsroom, reports
from perdure import SessionQuery
from tests.support.plugin import StackFactory
from tests.support.processes import PATIENCE
from tests.support.stack import Stack
from tests.support.talk import Json, Talk, text
from tests.support.waiting import until


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(agents="examples.newsroom:agent,examples.reports:agent")


async def test_the_newsroom_shows_a_family_and_asks_at_its_root(stack: Stack) -> None:
    async with stack.talk() as talk:
        answer = await talk.http.post("/eve/v1/session", json=documented(newsroom))
        session_id = answer.json()["sessionId"]
        asked = await until_boundary(talk, session_id)
        (request,) = (await talk.http.get("/v1/inputs", params={"agent": "writer"})).json()["inputs"]
        await talk.http.post(f"/v1/inputs/{request['requestId']}", json={"optionId": "approve"})
        done = await until_boundary(talk, session_id)
        tree = (await talk.http.get(f"/v1/sessions/{session_id}/tree")).json()

    assert asked[-3]["type"] == "input.requested"
    assert request["tool"] == "publish"
    assert "Published" in text(done)
    assert [(each["name"], each["status"]) for each in tree["children"]] == [
        ("researcher", "completed"),
        ("writer", "completed"),
    ]
    assert newsroom.ARCHIVE["tea"] in text(done)


async def test_a_report_is_made_by_a_program_that_the_message_brings(stack: Stack) -> None:
    async with stack.talk() as talk:
        answer = await talk.http.post("/agents/reports/eve/v1/session", json=documented(reports))
        session_id = answer.json()["sessionId"]
        events = await until_boundary(talk, session_id)

    (found,) = [event["data"]["result"] for event in events if event["type"] == "action.result"]
    (asked,) = [event["data"]["requests"] for event in events if event["type"] == "input.requested"]
    assert found["toolName"] == "find_orders"
    assert asked[0]["prompt"] == "Remind Ada of 120.00"


async def test_a_long_job_goes_on_where_its_worker_was_killed(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make_stack(apis=0, agents="examples.long_job:agent")
    for name, value in stack.environment.items():
        if name.startswith("PERDURE_"):
            monkeypatch.setenv(name, value)
    job = asyncio.ensure_future(long_job.report("tea", seconds=2))
    store = await stack.store()

    async def results() -> list[Json]:
        page = await store.sessions(SessionQuery())
        events = [event for row in page.sessions for event in await store.events(row.session_id)]
        return [(event.data or {})["result"] for event in events if event.type == "action.result"]

    async def half_way() -> bool:
        return len(await results()) >= 4

    await until(half_way, "half of the job to be done")
    stack.workers[0].kill()
    stack.start_worker()
    async with asyncio.timeout(3 * PATIENCE):
        assert await job == long_job.Report(best="Darjeeling", why="It has 9 of 10.")
        assert await long_job.report("tea", seconds=2) == await job

    called = [each["toolName"] for each in await results() if each["toolName"] != "final_output"]
    tasting = ["taste", "planning_update_step"]
    assert called == ["planning_setup_plan", *tasting * 3, "planning_update_step"]
    assert len((await store.sessions(SessionQuery())).sessions) == 1
    await store.close()


def documented(example: ModuleType) -> Json:
    """The body of the request in the example's first lines."""
    found = re.search(r"\{\"message\": .*\}", example.__doc__ or "")
    assert found is not None
    return json.loads(found[0])


async def until_boundary(talk: Talk, session_id: str) -> list[Json]:
    if talk.session_id != session_id:
        talk.session_id, talk.cursor = session_id, 0
    return await talk.until_boundary()
