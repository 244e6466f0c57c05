"""Runs whose processes die: no step that runs at most once is done twice, and finished steps are never done again."""

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from perdure.runtime.deliveries import reference
from perdure.runtime.drivers.client import DriverClient
from perdure.runtime.runs import Runs
from perdure.runtime.signals import Signals
from perdure.session.state import SessionState
from tests.support import commands
from tests.support.ledger import Ledger, running_ledger
from tests.support.plugin import StackFactory
from tests.support.processes import wait_until
from tests.support.stack import Stack
from tests.support.waiting import until

pytestmark = pytest.mark.chaos

Json = dict[str, Any]

#: Where a worker dies, how often the effect of that step happens, and what the run has of it.
POINTS = {
    "run_before_intent": (1, "step-1 of {}"),
    "run_after_intent": (0, "unknown"),
    "run_after_effect": (1, "unknown"),
    "run_before_settle": (1, "unknown"),
    "run_after_settle": (1, "step-1 of {}"),
}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Generator[Ledger]:
    with running_ledger(tmp_path_factory.mktemp("ledger")) as ledger:
        yield ledger


@pytest.fixture
def stack(make_stack: StackFactory, ledger: Ledger) -> Stack:
    return make_stack(
        workers=0, provider=True, agents="tests.runs.declared:agents", environment={"LEDGER_URL": ledger.url}
    )


def caller(stack: Stack, api: int = 0, **options: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=stack.api_urls[api], timeout=90, verify=False, **options)


async def record(http: httpx2.AsyncClient, run_id: str) -> Json:
    answer = await http.get(f"/runs/{run_id}?meta")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def until_record(http: httpx2.AsyncClient, run_id: str, **wanted: Any) -> Json:
    async def found() -> bool:
        known = await record(http, run_id)
        return all(known.get(name) == value for name, value in wanted.items())

    await until(found, f"{run_id} to have {wanted}")
    return await record(http, run_id)


async def until_waiting(http: httpx2.AsyncClient, run_id: str) -> None:
    async def waits() -> bool:
        return "waitingFor" in await record(http, run_id)

    await until(waits, "the run to wait")


@pytest.mark.parametrize("point", POINTS)
async def test_a_worker_dies_at_a_step(stack: Stack, ledger: Ledger, tmp_path: Path, point: str) -> None:
    times, told = POINTS[point]
    # The second step of the run.
    once = tmp_path / "once"
    dying = {"PERDURE_KILL_POINT": f"{point}:2", "PERDURE_KILL_ONCE_FILE": str(once)}
    worker = stack.start_worker(dying)
    async with caller(stack) as http:
        run_id = (await http.post("/workflows/nightly", json={"note": point})).json()["runId"]
        await asyncio.to_thread(wait_until, lambda: not worker.alive, "the worker to die")
        stack.start_worker()
        over = await until_record(http, run_id, status="completed")

    assert over["result"]["done"] == [f"step-0 of {point}", told.format(point), f"step-2 of {point}"]
    effects = [len(ledger.of_call(f"step-{number}", point)) for number in range(3)]
    assert effects == [1, times, 1]


@pytest.mark.parametrize("point", ["run_before_end", "run_after_end"])
async def test_a_worker_dies_at_the_end(stack: Stack, ledger: Ledger, tmp_path: Path, point: str) -> None:
    worker = stack.start_worker({"PERDURE_KILL_POINT": point, "PERDURE_KILL_ONCE_FILE": str(tmp_path / "once")})
    async with caller(stack) as http:
        run_id = (await http.post("/workflows/nightly", json={"note": point})).json()["runId"]
        await asyncio.to_thread(wait_until, lambda: not worker.alive, "the worker to die")
        stack.start_worker()
        await until_record(http, run_id, status="completed")
    client = await stack.client()
    await client.get_workflow_handle(run_id).result()

    assert [len(ledger.of_call(f"step-{number}", point)) for number in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "body", "result"),
    [
        ("sleeper", {"note": "slept", "seconds": 4}, ["before of slept", "after of slept"]),
        ("prompter", {"note": "drip 40 words delay 100"}, None),
    ],
)
async def test_a_run_that_waits_outlives_its_worker(
    stack: Stack, ledger: Ledger, name: str, body: Json, result: Any
) -> None:
    stack.start_worker()
    async with caller(stack) as http:
        run_id = (await http.post(f"/workflows/{name}", json=body)).json()["runId"]
        await until_waiting(http, run_id)
        stack.workers[-1].kill()
        stack.start_worker()
        over = await until_record(http, run_id, status="completed")

    assert len(ledger.of_call("before", body["note"])) == 1
    assert over["result"] == result if result else over["result"]


async def test_a_question_is_answered_while_no_worker_runs(stack: Stack) -> None:
    worker = stack.start_worker()
    async with caller(stack) as http:
        run_id = (await http.post("/workflows/asker")).json()["runId"]
        await until_waiting(http, run_id)
        worker.kill()
        (request,) = (await http.get("/v1/inputs", params={"sessionId": run_id})).json()["inputs"]
        assert (await http.post(f"/v1/inputs/{request['requestId']}", json={"optionId": "red"})).is_success
        stack.start_worker()
        assert (await until_record(http, run_id, status="completed"))["result"] == "red it is"


async def test_a_worker_that_is_stopped_leaves_a_run_between_two_of_its_steps(stack: Stack) -> None:
    worker = stack.start_worker()
    async with caller(stack) as http:
        # More steps than a worker does while it stops.
        run_id = (await http.post("/workflows/steady", json={"count": 24, "seconds": 0.6})).json()["runId"]
        events = await stack.store()
        try:
            await until(lambda: events.index_of(run_id, "session/run/step/0"), "the first step")
        finally:
            await events.close()
        await asyncio.to_thread(worker.terminate)
        stack.start_worker()
        over = await until_record(http, run_id, status="completed")

    assert (over["result"], over["attempts"]) == (24, 2)


async def test_who_waits_for_the_result_gets_it_although_the_worker_dies(stack: Stack, ledger: Ledger) -> None:
    worker = stack.start_worker()
    async with caller(stack) as http:
        waiting = asyncio.create_task(http.post("/workflows/gated?wait=result", json={"note": "gate-1"}))
        await until(lambda: ledger.reached("gate-1"), "the step")
        worker.kill()
        ledger.open("gate-1")
        stack.start_worker()
        answer = await waiting

    assert (answer.status_code, answer.json()["result"]) == (200, "passed")


async def test_an_api_that_dies_before_it_starts_the_workflow_leaves_a_run_that_starts(stack: Stack) -> None:
    stack.start_worker()
    store = await stack.store()
    try:
        client = await stack.client()
        # A process that dies between the row and the start: it writes, and starts nothing.
        driver = DriverClient(client, stack.settings.task_queue)

        class Dead(Signals):
            async def start_run(self, session: Any) -> bool:
                return False

        started = await Runs(store, Dead(store, driver)).start("nightly", {"note": "unstarted"})
    finally:
        await store.close()
    async with caller(stack) as http:
        await until_record(http, started.run_id, status="completed")


async def mistake(stack: Stack, run_id: str) -> None:
    """Take the run for a session, as the sweeper and the reconciler of a build do that knows no runs."""
    store = await stack.store()
    try:
        row = await store.session(run_id)
        waiting = await store.unread(run_id)
    finally:
        await store.close()
    assert row is not None
    state = SessionState(
        session_id=run_id, agent=row.agent, mode="task", capabilities=row.capabilities, token_hash=f"run/{run_id}"
    )
    driver = DriverClient(await stack.client(), stack.settings.task_queue)
    await driver.start(state)
    for each in waiting:
        await driver.deliver(run_id, reference(each))


async def test_an_unstarted_run_that_an_older_api_took_for_a_session_runs(stack: Stack, ledger: Ledger) -> None:
    stack.start_worker()
    store = await stack.store()
    try:
        driver = DriverClient(await stack.client(), stack.settings.task_queue)

        class Dead(Signals):
            async def start_run(self, session: Any) -> bool:
                return False

        run_id = (await Runs(store, Dead(store, driver)).start("nightly", {"note": "mistaken"})).run_id
    finally:
        await store.close()
    await mistake(stack, run_id)
    async with caller(stack) as http:
        await until_record(http, run_id, status="completed")
    assert len(ledger.of_call("step-0", "mistaken")) == 1


async def test_a_lost_run_that_an_older_api_took_for_a_session_goes_on(stack: Stack, ledger: Ledger) -> None:
    stack.start_worker()
    driver = DriverClient(await stack.client(), stack.settings.task_queue)
    async with caller(stack) as http:
        body = {"note": "mistaken too", "seconds": 3}
        run_id = (await http.post("/workflows/sleeper", json=body)).json()["runId"]
        await until_waiting(http, run_id)
        await driver.delete(run_id)

        async def is_gone() -> bool:
            return await driver.status(run_id) is None

        await until(is_gone, "the workflow to be deleted")
        await mistake(stack, run_id)
        over = await until_record(http, run_id, status="completed")
    assert over["result"] == ["before of mistaken too", "after of mistaken too"]
    assert len(ledger.of_call("before", "mistaken too")) == 1


async def test_a_cancel_whose_signal_was_lost_stops_the_run(stack: Stack) -> None:
    stack.start_worker()
    store = await stack.store()
    async with caller(stack) as http:
        run_id = (await http.post("/workflows/sleeper", json={"seconds": 3600})).json()["runId"]
        await until_waiting(http, run_id)
        try:
            driver = DriverClient(await stack.client(), stack.settings.task_queue)

            class Dead(Signals):
                async def cancel(self, request: Any) -> bool:
                    return False

            assert await Runs(store, Dead(store, driver)).cancel(run_id)
        finally:
            await store.close()
        over = await until_record(http, run_id, status="errored")
    assert over["error"]["name"] == "RunCancelled"


async def test_a_step_in_the_middle_of_its_work_is_cancelled(stack: Stack, ledger: Ledger) -> None:
    stack.start_worker()
    async with caller(stack) as http:
        run_id = (await http.post("/workflows/gated", json={"note": "gate-2"})).json()["runId"]
        await until(lambda: ledger.reached("gate-2"), "the step")
        assert (await http.post(f"/runs/{run_id}/cancel")).status_code == 202
        over = await until_record(http, run_id, status="errored")
        ledger.open("gate-2")
    assert over["error"]["name"] == "RunCancelled"


async def test_a_lost_workflow_is_started_again(stack: Stack, ledger: Ledger) -> None:
    stack.start_worker()
    async with caller(stack) as http:
        body = {"note": "lost", "seconds": 1}
        stack.workers[-1].kill()
        run_id = (await http.post("/workflows/sleeper", json=body)).json()["runId"]
        client = await stack.client()
        # As after a restore of Temporal from a backup: it knows no such workflow.
        driver = DriverClient(client, stack.settings.task_queue)
        await driver.delete(run_id)
        stack.start_worker()
        over = await until_record(http, run_id, status="completed")
    assert over["result"] == ["before of lost", "after of lost"]
    assert len(ledger.of_call("before", "lost")) == 1


async def test_code_that_makes_other_steps_parks_the_run_until_it_is_mended(stack: Stack) -> None:
    stack.start_worker({"STEP_NAME": "old", "SLEEP": "2"})
    async with caller(stack) as http:
        run_id = (await http.post("/workflows/diverging")).json()["runId"]
        await until_waiting(http, run_id)
        stack.workers[-1].kill()
        stack.start_worker({"STEP_NAME": "new", "SLEEP": "2"})
        await until_record(http, run_id, attention="RUN_DIVERGED")
        assert (await record(http, run_id))["status"] == "active"
        told = commands.perdure("logs", run_id, environment=stack.environment).stdout
        assert "RUN_DIVERGED: Call 0 of the function is step/new now; the run has recorded step/old." in told
        stack.workers[-1].kill()
        stack.start_worker({"STEP_NAME": "old", "SLEEP": "2"})
        over = await until_record(http, run_id, status="completed")
    assert (over["result"], over.get("attention")) == ("old", None)


async def test_a_run_that_no_worker_serves_waits_for_one(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, workers=0, agents="tests.runs.declared:agents")
    stack.start_worker({"PERDURE_AGENTS": "tests.runs.declared:clerk"})
    async with caller(stack) as http:
        run_id = (await http.post("/workflows/nightly", json={"note": "unserved"})).json()["runId"]
        await until_record(http, run_id, attention="RUN_GONE")
        stack.workers[-1].kill()
        stack.start_worker()
        await until_record(http, run_id, status="completed")


async def test_the_record_of_a_run_outlives_its_code(make_stack: StackFactory) -> None:
    stack = make_stack(provider=True, agents="tests.runs.declared:agents")
    async with caller(stack) as http:
        run_id = (await http.post("/workflows/nightly", json={"note": "old"})).json()["runId"]
        over = await until_record(http, run_id, status="completed")
    stack.start_api({"PERDURE_AGENTS": "tests.runs.declared:clerk"})
    async with httpx2.AsyncClient(base_url=stack.api_urls[-1], timeout=90) as later:
        assert await record(later, run_id) == over
        assert (await later.get(f"/runs/{run_id}")).json()[-1]["type"] == "run_end"
        assert (await later.post("/workflows/nightly", json={"note": "new"})).status_code == 404


async def test_strangers_learn_nothing_of_a_run(make_stack: StackFactory) -> None:
    keys = "ada=" + _hash("a") + ",bob=" + _hash("b")
    stack = make_stack(provider=True, agents="tests.runs.declared:agents", environment={"PERDURE_API_KEYS": keys})
    async with caller(stack, headers={"x-api-key": "a"}) as ada, caller(stack, headers={"x-api-key": "b"}) as bob:
        run_id = (await ada.post("/workflows/nightly", json={"note": "hers"})).json()["runId"]
        await until_record(ada, run_id, status="completed")
        unknown = run_id[:-4] + "ZZZZ"
        for path, method in (("/runs/{}?meta", "GET"), ("/runs/{}", "GET"), ("/runs/{}/cancel", "POST")):
            answers = [await bob.request(method, path.format(each)) for each in (run_id, unknown)]
            assert [each.status_code for each in answers] == [404, 404]
            assert answers[0].content == answers[1].content
        assert (await bob.get("/runs")).json() == {"runs": []}
        assert [each["runId"] for each in (await ada.get("/runs")).json()["runs"]] == [run_id]
        assert (await caller(stack).get(f"/runs/{run_id}?meta")).status_code == 401


async def test_a_question_is_answered_by_those_whom_the_run_names(make_stack: StackFactory) -> None:
    keys = "ada=" + _hash("a") + ",bob=" + _hash("b")
    stack = make_stack(provider=True, agents="tests.runs.declared:agents", environment={"PERDURE_API_KEYS": keys})
    async with caller(stack, headers={"x-api-key": "a"}) as ada, caller(stack, headers={"x-api-key": "b"}) as bob:
        run_id = (await ada.post("/workflows/paying")).json()["runId"]

        async def asked() -> list[dict[str, Any]]:
            return (await bob.get("/v1/inputs")).json()["inputs"]

        await until(asked, "the question to be asked")
        (request,) = await asked()
        url = f"/v1/inputs/{request['requestId']}"
        refused = await ada.post(url, json={"optionId": "yes"})
        answered = await bob.post(url, json={"optionId": "no"})
        record = await until_record(ada, run_id, status="completed")

    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden_responder")
    assert answered.status_code == 200
    assert record["result"] == "no"


def _hash(key: str) -> str:
    import hashlib

    return hashlib.sha256(key.encode()).hexdigest()
