"""Runs over HTTP, with real processes."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest

from tests.support.plugin import StackFactory
from tests.support.stack import Stack
from tests.support.waiting import until

Json = dict[str, Any]


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.runs.declared:agents")


@pytest.fixture
async def http(stack: Stack) -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=stack.url, timeout=90, verify=False) as client:
        yield client


async def record(http: httpx2.AsyncClient, run_id: str) -> Json:
    answer = await http.get(f"/runs/{run_id}?meta")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ended(http: httpx2.AsyncClient, run_id: str) -> Json:
    async def is_over() -> bool:
        return (await record(http, run_id))["status"] != "active"

    await until(is_over, f"the end of {run_id}")
    return await record(http, run_id)


async def result(http: httpx2.AsyncClient, name: str, body: Any = None) -> Any:
    answer = await http.post(f"/workflows/{name}?wait=result", json=body if body is not None else {})
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


async def test_a_run_is_accepted_with_a_receipt_and_has_a_record(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/workflows/nightly", json={"note": "a"})

    receipt = answer.json()
    run_id = receipt["runId"]
    assert answer.status_code == 202
    assert run_id.startswith("run_")
    assert receipt["streamUrl"] == f"{str(http.base_url).rstrip('/')}/runs/{run_id}"
    assert answer.headers["location"] == receipt["streamUrl"]
    assert answer.headers["stream-next-offset"] == receipt["offset"] == "0000000000000000_0000000000000000"
    over = await ended(http, run_id)
    done = [f"step-{number} of a" for number in range(3)]
    assert (over["status"], over["result"], over["isError"]) == ("completed", {"done": done}, False)
    assert over["input"] == over["payload"] == {"note": "a"}
    assert over["durationMs"] >= 0


async def test_a_caller_may_wait_for_the_result(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/workflows/nightly?wait=result", json={"note": "b", "count": 1})

    assert answer.status_code == 200
    assert answer.json()["result"] == {"done": ["step-0 of b"]}
    assert answer.json()["runId"].startswith("run_")


async def test_a_run_that_raises_is_a_500_that_names_the_run(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/workflows/failing?wait=result")

    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (500, "internal_error")
    assert "how it fails" not in answer.text
    over = await record(http, error["meta"]["runId"])
    assert (over["status"], over["error"]) == ("errored", {"name": "ValueError", "message": "This is how it fails."})


async def test_branches_side_by_side_find_their_calls_again(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/workflows/fan-out?wait=result")

    over = await record(http, answer.json()["runId"])
    assert (answer.json()["result"], over["attempts"]) == ([0, 10, 20, 30, 7], 2)


async def test_a_failed_step_raises_the_same_in_each_attempt(http: httpx2.AsyncClient) -> None:
    assert await result(http, "catching") == ["refused", "LookupError", "not there"]


async def test_a_run_sleeps_without_an_attempt_and_goes_on(http: httpx2.AsyncClient) -> None:
    run_id = (await http.post("/workflows/sleeper", json={"note": "c", "seconds": 3})).json()["runId"]

    async def waits() -> bool:
        return "waitingFor" in await record(http, run_id)

    await until(waits, "the sleep")
    assert (await record(http, run_id))["waitingFor"].startswith("a sleep until ")
    over = await ended(http, run_id)
    assert (over["result"], over["attempts"]) == (["before of c", "after of c"], 2)


async def test_a_function_that_swallows_its_end_is_ended_all_the_same(http: httpx2.AsyncClient) -> None:
    assert await result(http, "stubborn") == "slept"


async def test_a_run_hands_work_to_an_agent(http: httpx2.AsyncClient) -> None:
    assert await result(http, "prompter", {"note": "say Found it"}) == "Found it"


async def test_a_run_talks_to_a_session_with_a_name(http: httpx2.AsyncClient) -> None:
    assert await result(http, "talker", {"note": "memory"}) == ["One", "Two"]


async def test_a_failed_agent_fails_the_run_with_its_reason(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/workflows/prompter?wait=result", json={"note": "fail 400"})

    over = await record(http, answer.json()["error"]["meta"]["runId"])
    assert over["error"]["name"] == "RunStepFailed"


async def test_a_run_asks_people(http: httpx2.AsyncClient) -> None:
    run_id = (await http.post("/workflows/asker")).json()["runId"]

    async def asked() -> list[Json]:
        return (await http.get("/v1/inputs", params={"sessionId": run_id})).json()["inputs"]

    await until(asked, "the question")
    (request,) = await asked()
    assert (request["prompt"], [each["id"] for each in request["options"]]) == ("Which color?", ["red", "blue"])
    answer = await http.post(f"/v1/inputs/{request['requestId']}", json={"optionId": "blue"})
    assert answer.is_success, answer.text
    assert (await ended(http, run_id))["result"] == "blue it is"


async def test_the_same_key_starts_one_run_and_another_input_is_a_conflict(http: httpx2.AsyncClient) -> None:
    key = {"idempotency-key": "once"}
    first = await http.post("/workflows/nightly", json={"note": "d"}, headers=key)
    again = await http.post("/workflows/nightly", json={"note": "d"}, headers=key)
    other = await http.post("/workflows/nightly", json={"note": "e"}, headers=key)

    assert first.json() == again.json()
    assert again.headers["idempotency-replayed"] == "true"
    assert (other.status_code, other.json()["error"]["type"]) == (409, "submission_conflict")
    waited = await http.post("/workflows/nightly?wait=result", json={"note": "d"}, headers=key)
    assert waited.json()["runId"] == first.json()["runId"]


@pytest.mark.parametrize("name", ["sleeper", "prompter", "asker"])
async def test_a_run_that_waits_is_cancelled(http: httpx2.AsyncClient, name: str) -> None:
    body = {"note": "drip 2000 words delay 50", "seconds": 3600}
    run_id = (await http.post(f"/workflows/{name}", json=body)).json()["runId"]

    async def waits() -> bool:
        return "waitingFor" in await record(http, run_id)

    await until(waits, "the wait")
    answer = await http.post(f"/runs/{run_id}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (202, "accepted")
    over = await ended(http, run_id)
    assert over["error"] == {"name": "RunCancelled", "message": "The run was cancelled."}
    again = await http.post(f"/runs/{run_id}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "no_active_run")
    if name == "prompter":
        await until(lambda: no_child_runs(http), "the child to end")


async def no_child_runs(http: httpx2.AsyncClient) -> bool:
    page = (await http.get("/v1/sessions", params={"agent": "clerk"})).json()
    return all(each["status"] in ("completed", "failed", "waiting") for each in page["sessions"])


async def test_runs_are_listed_with_a_cursor(http: httpx2.AsyncClient) -> None:
    started = {(await http.post("/workflows/nightly", json={"count": 0})).json()["runId"] for _ in range(3)}
    for run_id in started:
        await ended(http, run_id)

    seen: list[str] = []
    params: dict[str, Any] = {"workflowName": "nightly", "status": "completed", "limit": 2}
    while True:
        page = (await http.get("/runs", params=params)).json()
        assert all("input" not in each and "result" not in each for each in page["runs"])
        seen += [each["runId"] for each in page["runs"]]
        if "nextCursor" not in page:
            break
        params["cursor"] = page["nextCursor"]
    assert started <= set(seen)
    assert len(seen) == len(set(seen))
    assert (await http.get("/runs", params={"cursor": "nonsense", "limit": "many"})).status_code == 200


async def test_runs_are_no_sessions_and_sessions_no_runs(http: httpx2.AsyncClient) -> None:
    run_id = (await http.post("/workflows/nightly", json={})).json()["runId"]
    session_id = (await http.post("/eve/v1/session", json={"message": "say Hi"})).json()["sessionId"]

    unknown = run_id[:-4] + "ZZZZ"
    for path in ("/v1/sessions/{}", "/v1/sessions/{}/tree", "/eve/v1/session/{}/stream"):
        answers = [await http.get(path.format(each)) for each in (run_id, unknown)]
        assert [each.status_code for each in answers] == [404, 404]
        assert answers[0].content == answers[1].content
    assert (await http.delete(f"/v1/sessions/{run_id}")).status_code == 404
    assert (await http.post(f"/eve/v1/session/{run_id}/cancel")).status_code == 404
    answers = [await http.get(f"/runs/{each}?meta") for each in (session_id, unknown, "run_")]
    assert {each.content for each in answers} == {answers[0].content}
    assert [each.json()["error"]["type"] for each in answers] == ["run_not_found"] * 3
    listed = (await http.get("/v1/sessions", params={"limit": 200})).json()["sessions"]
    assert all(each["sessionId"].startswith("ses_") for each in listed)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", "/workflows/unknown", b"{}", 404, "workflow_not_found"),
        ("POST", "/workflows/nightly?wait=forever", b"{}", 400, "invalid_request"),
        ("POST", "/workflows/nightly", b"{", 400, "invalid_json"),
        ("POST", "/workflows/nightly", b'{"count": "many"}', 400, "invalid_request"),
        ("POST", "/workflows/asker", b'"' + b"x" * 1_100_000 + b'"', 413, "too_large"),
        ("GET", "/workflows/nightly", None, 405, "method_not_allowed"),
        ("DELETE", "/runs", None, 405, "method_not_allowed"),
        ("GET", "/runs?status=lost", None, 400, "invalid_request"),
        ("GET", "/runs/run_1/steps", None, 404, "route_not_found"),
        ("POST", "/workflows", b"{}", 404, "route_not_found"),
        ("POST", "/workflows/nightly/again", b"{}", 404, "route_not_found"),
    ],
)
async def test_what_cannot_be_is_refused_in_the_envelope(
    http: httpx2.AsyncClient, method: str, path: str, body: bytes | None, status: int, kind: str
) -> None:
    headers = {"content-type": "application/json"} if body is not None else {}
    answer = await http.request(method, path, content=body, headers=headers)

    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert set(answer.json()["error"]) == {"type", "message", "details"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "cross-origin"
    if status == 405:
        assert answer.headers["allow"] in ("POST", "GET")


async def test_a_body_of_another_type_is_refused_and_none_is_an_empty_object(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/workflows/nightly", content=b"{}", headers={"content-type": "text/plain"})

    assert (answer.status_code, answer.json()["error"]["type"]) == (415, "unsupported_media_type")
    assert (await http.post("/workflows/nightly?wait=result")).json()["result"]["done"] != []


async def test_the_answer_to_head_has_no_body(http: httpx2.AsyncClient) -> None:
    answer = await http.head("/runs/run_unknown")

    assert (answer.status_code, answer.content) == (404, b"")


async def test_many_runs_at_once_all_end(http: httpx2.AsyncClient) -> None:
    found = await asyncio.gather(*(result(http, "nightly", {"note": str(n)}) for n in range(12)))

    assert [each["done"][0] for each in found] == [f"step-0 of {n}" for n in range(12)]
