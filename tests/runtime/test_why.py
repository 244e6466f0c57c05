"""Why a session does not move, as its owner is told, and how a deployment is."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from temporalio.client import Client, WorkflowExecutionStatus

from perdure.protocol.deliveries import LOCAL, Bounds, Capabilities
from perdure.runtime.deploys import builds
from perdure.runtime.drivers.client import DriverClient
from perdure.runtime.reports.why import SessionFacts, Task, explain
from perdure.runtime.reports.why import why as why_of
from perdure.store.values import SessionRow
from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.waiting import until

AGENTS = ",".join(
    ("tests.conformance.agents:concierge", "tests.conformance.agents:foreman", "tests.runtime.pooled:agent")
)
NOW = 1_000_000.0


def a_row(**fields: Any) -> SessionRow:
    times = {"created_at": "2026-01-01T00:00:00.000Z", "updated_at": "2026-01-01T00:00:01.000Z"}
    known: dict[str, Any] = {"session_id": "ses_1", "agent": "clerk", "mode": "conversation", "principal": LOCAL}
    known |= {**times, "capabilities": Capabilities(), **fields}
    return SessionRow(**known)


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents=AGENTS)


async def begun(http: httpx2.AsyncClient, message: str, agent: str = "concierge") -> str:
    made = await http.post(f"/agents/{agent}/eve/v1/session", json={"message": message})
    return made.json()["sessionId"]


async def why(http: httpx2.AsyncClient, session_id: str, code: str, words: str = "") -> dict[str, Any]:
    """The answer, once its code is this one, and its sentence has these words."""
    answer: dict[str, Any] = {}

    async def is_so() -> bool:
        nonlocal answer
        answer = (await http.get(f"/v1/sessions/{session_id}/why")).json()
        return answer.get("code") == code and words in answer["sentence"]

    try:
        await until(is_so, code)
    except AssertionError as error:
        error.add_note(f"It was {answer}.")
        raise
    return answer


async def test_a_session_says_that_it_waits_for_a_message(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.api_urls[0]) as http:
        session_id = await begun(http, "say hello")

        answer = await why(http, session_id, "message")

    assert answer["sentence"] == "It waits for the next message."


async def test_a_session_names_the_people_whose_answer_it_waits_for(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.api_urls[0]) as http:
        session_id = await begun(http, 'call pay {"amount": 3}')

        answer = await why(http, session_id, "input")
        shown = (await http.get(f"/v1/sessions/{session_id}")).json()

    assert answer["sentence"] == shown["waitingFor"]
    assert answer["who"] == ["the requester"]
    assert answer["details"] == {"inputs": shown["openInputs"]}


async def test_a_session_whose_child_asks_names_those_who_may_answer(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.api_urls[0]) as http:
        request = 'call cashier {"message": "call pay {\\"amount\\": 3}"}'
        session_id = await begun(http, request, agent="foreman")

        answer = await why(http, session_id, "input")

    assert "Approval of `pay`" in answer["sentence"]


async def test_a_session_says_when_the_next_attempt_at_the_model_begins(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.api_urls[0]) as http:
        session_id = await begun(http, "fail 503 times 4; say hello")

        answer = await why(http, session_id, "retrying")

    assert "of the model call begins at" in answer["sentence"]
    assert answer["until"] > answer["since"]


async def test_a_session_says_that_the_model_replies(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.api_urls[0]) as http:
        session_id = await begun(http, "drip 200 words delay 30")

        answer = await why(http, session_id, "working", "model call")

    assert answer["sentence"] == "It works: the model call."
    assert answer["who"], answer


async def test_a_session_whose_tool_has_no_worker_names_the_queue(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.api_urls[0]) as http:
        session_id = await begun(http, "call where {}", agent="pooled")

        answer = await why(http, session_id, "no_worker")

    assert f"task queue {stack.environment['PERDURE_TASK_QUEUE']}-tools-gpu" in answer["sentence"]
    assert answer["sentence"].startswith("No worker polls the task queue ")
    assert ", where the call of `where` has waited since" in answer["sentence"]


async def test_a_session_that_ends_while_its_workflow_is_looked_at_has_ended_and_lacks_none(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.api_urls[0]) as http:
        body = {"message": "say done", "mode": "task"}
        session_id = (await http.post("/agents/concierge/eve/v1/session", json=body)).json()["sessionId"]
        await why(http, session_id, "ended")
    client, store = await stack.client(), await stack.store()
    drivers = DriverClient(client, stack.settings.task_queue)
    try:
        row = await store.session(session_id)
        assert row is not None
        await until(lambda: has_closed(client, row.session_id))

        # What was read a moment before.
        found = await why_of(store, client, drivers, replace(row, status="running"))
    finally:
        await store.close()

    assert (found.code, found.sentence) == ("ended", "It has ended: completed.")


async def has_closed(client: Client, session_id: str) -> bool:
    described = await client.get_workflow_handle(session_id).describe()
    return described.status != WorkflowExecutionStatus.RUNNING


async def test_a_queue_is_looked_at_once_however_many_calls_wait_in_it(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    look = builds.described_queue

    async def counted(client: Client, queue: str, *others: Any, **more: Any) -> Any:
        looked_at.append(queue)
        return await look(client, queue, *others, **more)

    monkeypatch.setattr(builds, "described_queue", counted)
    client, store = await stack.client(), await stack.store()
    async with httpx2.AsyncClient(base_url=stack.api_urls[0]) as http:
        session_id = await begun(http, "call " + " and ".join(["where {}"] * 20), agent="pooled")
        await why(http, session_id, "no_worker")
    row = await store.session(session_id)
    assert row is not None

    found = await why_of(store, client, DriverClient(client, stack.settings.task_queue), row)

    assert (found.code, len(looked_at)) == ("no_worker", 1)


async def test_without_any_worker_a_new_session_says_so(make_stack: StackFactory) -> None:
    stack = make_stack(workers=0, provider=True, agents=AGENTS)
    async with httpx2.AsyncClient(base_url=stack.api_urls[0]) as http:
        session_id = await begun(http, "say hello")

        answer = await why(http, session_id, "no_worker")
        health = (await http.get("/v1/health")).json()

    assert "where the next decision has waited since" in answer["sentence"]
    assert health["workers"] == []
    assert all(queue["pollers"] == [] for queue in health["queues"])


async def test_the_health_of_a_deployment_names_its_queues_and_workers(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.api_urls[0]) as http:

        async def polled() -> bool:
            queues = (await http.get("/v1/health")).json()["queues"]
            return all(queue["pollers"] for queue in queues if not queue["name"].endswith("-gpu"))

        await until(polled, "pollers of each queue")
        health, again = await asyncio.gather(http.get("/v1/health"), http.get("/v1/health"))

    shown = health.json()
    prefix = stack.environment["PERDURE_TASK_QUEUE"] + "-"
    assert [queue["name"].removeprefix(prefix) for queue in shown["queues"]] == [
        "sessions",
        "turns",
        "models",
        "tools",
        "tools-gpu",
    ]
    assert (shown["store"]["kind"], shown["store"]["ok"], shown["temporal"]["ok"]) == ("sqlite", True, True)
    assert len(shown["workers"]) == 1
    assert shown["workers"][0]["identity"].count(":") == 2
    # Callers that come together share one look.
    assert again.json()["now"] == shown["now"]


@pytest.mark.parametrize(
    ("tasks", "code", "words"),
    [
        ([Task("call_model", "q", "paused", 1, NOW)], "paused", "An operator has paused the model call in Temporal"),
        ([Task("call_tool", "q", "running", 1, NOW - 99, heard=NOW - 61)], "worker_silent", "has been silent since"),
        ([Task("call_tool", "q", "running", 3, NOW - 99, heard=NOW - 1)], "working", "`pay`, attempt 3"),
        ([Task("call_tool", "q", "scheduled", 1, NOW - 9, served=True)], "worker_busy", "All workers are busy"),
        ([Task("call_tool", "q", "scheduled", 1, NOW - 1, served=True)], "working", "the call of `pay`"),
        ([Task("strange", None, "running", 1, NOW, heard=NOW)], "working", "the activity strange"),
        # What is stuck says more than what works beside it.
        (
            [
                Task("call_tool", "q", "running", 1, NOW, heard=NOW),
                Task("call_tool", "q", "scheduled", 1, NOW - 9, served=False),
            ],
            "no_worker",
            "No worker polls the task queue q",
        ),
        (None, "temporal_unreachable", "Temporal does not answer"),
        ([], "working", "between two activities"),
    ],
)
def test_the_reason_that_matters_most_is_told(tasks: list[Task] | None, code: str, words: str) -> None:
    found = explain(SessionFacts(a_row(status="running"), calls=("pay",), tasks=tasks), NOW)

    assert found.code == code
    assert words in found.sentence


@pytest.mark.parametrize(("driver", "words"), [(None, "is missing"), ("terminated", "has ended (terminated)")])
def test_a_session_without_its_workflow_says_so(driver: str | None, words: str) -> None:
    found = explain(SessionFacts(a_row(status="waiting"), tasks=(), driver=driver), NOW)

    assert (found.code, words in found.sentence) == ("no_workflow", True)


@pytest.mark.parametrize(
    ("row", "code", "words"),
    [
        ({"status": "completed"}, "ended", "It has ended: completed."),
        ({"status": "failed", "error": {"code": "MODEL_FAILED"}}, "ended", "failed with MODEL_FAILED."),
        (
            {"status": "running", "attention": {"code": "AGENT_GONE", "message": "no such agent", "since": "then"}},
            "needs_attention",
            "no such agent.",
        ),
    ],
)
def test_what_cannot_move_by_itself_says_so(row: dict[str, Any], code: str, words: str) -> None:
    found = explain(SessionFacts(a_row(**row)), NOW)

    assert (found.code, words in found.sentence) == (code, True)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Pacific/Auckland"])
def test_a_deadline_beyond_all_dates_is_shown_in_every_time_zone(monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        found = explain(SessionFacts(a_row(status="waiting", bounds=Bounds(deadline=1e15))), NOW)
    finally:
        monkeypatch.undo()
        time.tzset()

    assert found.until == "9999-12-31T23:59:59.000Z"
