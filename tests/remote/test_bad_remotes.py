"""Other servers that misbehave: each ends in one clear result, and nothing is held open for them."""

import asyncio
import time
from typing import Any

import httpx2
import pytest

from tests.remote.fake import Asked, Fake
from tests.remote.test_two_servers import call, one
from tests.support.plugin import StackFactory
from tests.support.processes import free_port
from tests.support.stack import Stack
from tests.support.talk import Talk, text, types

DONE: list[dict[str, Any]] = [
    {"type": "session.started", "data": {}},
    {"type": "message.completed", "data": {"message": "From the stream"}},
    {"type": "session.completed"},
]
PORT = free_port()


@pytest.fixture(scope="module")
def polls(module_stack: StackFactory) -> Stack:
    """A caller that callbacks cannot reach. Its tasks have six seconds."""
    environment = {"REMOTE_URL": f"http://127.0.0.1:{PORT}", "REMOTE_TIMEOUT": "6"}
    return module_stack(provider=True, agents="tests.remote.agents:agents", environment=environment)


@pytest.fixture(scope="module")
def called_back(module_stack: StackFactory) -> Stack:
    """A caller that callbacks can reach."""
    stack = module_stack(provider=True, apis=0, workers=0, agents="tests.remote.agents:agents")
    stack.environment["REMOTE_URL"] = f"http://127.0.0.1:{PORT}"
    stack.start_api()
    stack.environment["PERDURE_PUBLIC_URL"] = stack.url
    stack.start_worker()
    return stack


def result(value: bytes) -> bytes:
    """The stream of a session that ends with this result."""
    return b'{"type":"result.completed","data":{"result":%b}}\n{"type":"session.completed"}\n' % value


async def turn(talk: Talk, message: str = "say x") -> list[dict[str, Any]]:
    await talk.create(call("away", message=message))
    return await talk.until_boundary()


async def started(fake: Fake) -> Asked:
    """The first start that the server got."""
    async with asyncio.timeout(20):
        while not fake.starts:
            await asyncio.sleep(0.02)
    return fake.starts[0]


def report(start: Asked, **fields: Any) -> dict[str, Any]:
    about = {name: start.body["callback"][name] for name in ("callId", "subagentName")}
    return {"kind": "session.completed", "sessionId": "wrun_fake", "output": "Called back", **about, **fields}


# --- the start ---


async def test_a_start_that_is_refused_for_now_is_repeated_with_the_same_key_and_body(polls: Stack) -> None:
    async with Fake(port=PORT, refuses=2, events=DONE) as fake, polls.talk() as talk:
        events = await turn(talk)

    assert text(events) == "Results: From the stream"
    assert len(fake.starts) == 3
    assert len({each.headers["idempotency-key"] for each in fake.starts}) == 1
    assert all(each.body == fake.starts[0].body for each in fake.starts)


async def test_a_start_has_the_authors_headers_and_the_depth(polls: Stack) -> None:
    async with Fake(port=PORT, events=DONE) as fake, polls.talk() as talk:
        await turn(talk, "say Hello")

    (start,) = fake.starts
    assert start.headers["authorization"] == "Bearer a key of the tests"
    assert (start.headers["x-tenant"], start.headers["x-perdure-depth"]) == ("acme-secret-tenant", "1")
    assert (start.body["message"], start.body["mode"]) == ("say Hello", "task")
    assert "callback" not in start.body


@pytest.mark.parametrize(
    ("fake", "code"),
    [
        pytest.param(Fake(status=400), "REMOTE_AGENT_START_FAILED", id="refused"),
        pytest.param(Fake(status=302, redirect="http://127.0.0.1:9/"), "REMOTE_AGENT_START_FAILED", id="redirected"),
        pytest.param(Fake(session={}), "REMOTE_AGENT_START_FAILED", id="no id"),
        pytest.param(Fake(session={"sessionId": "a\nb" * 200}), "REMOTE_AGENT_START_FAILED", id="an odd id"),
        pytest.param(Fake(status=500), "REMOTE_AGENT_START_FAILED", id="always 500"),
        pytest.param(Fake(hang=True), "REMOTE_AGENT_START_FAILED", id="hangs"),
        pytest.param(Fake(floods=True), "REMOTE_AGENT_FAILED", id="streams for ever"),
        pytest.param(Fake(), "REMOTE_AGENT_FAILED", id="says nothing"),
        pytest.param(Fake(raw=b"{nope\n" * 3), "REMOTE_AGENT_FAILED", id="streams nonsense"),
        pytest.param(Fake(raw=b"x" * 5_000_000), "REMOTE_AGENT_FAILED", id="one endless line"),
        pytest.param(Fake(raw=result(b"[" * 300 + b"]" * 300)), "REMOTE_AGENT_FAILED", id="nests too deep"),
        pytest.param(Fake(raw=result(b"[" * 110 + b"]" * 110)), "REMOTE_AGENT_FAILED", id="nests deeper than tools"),
        pytest.param(Fake(stream_status=404), "REMOTE_AGENT_FAILED", id="forgets it"),
        pytest.param(Fake(events=[{"type": "session.failed", "data": {}}]), "SESSION_FAILED", id="fails"),
    ],
)
async def test_a_remote_that_misbehaves_is_one_failed_result(polls: Stack, fake: Fake, code: str) -> None:
    fake.port = PORT
    began = time.monotonic()
    async with fake, polls.talk() as talk:
        events = await turn(talk)

    result = one(events, "action.result")
    assert (result["status"], result["error"]["code"]) == ("failed", code)
    assert ("subagent.called" in types(events)) == (code != "REMOTE_AGENT_START_FAILED")
    assert types(events)[-2:] == ["turn.completed", "session.waiting"]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("value", "output"),
    [
        pytest.param(rb'"half \ud83d of"', "half \ufffd of", id="half a character"),
        pytest.param(rb'{"a": [NaN, 1e999]}', {"a": [None, None]}, id="no numbers"),
        pytest.param(rb'"a\u0000b"', "a\0b", id="a zero"),
    ],
)
async def test_a_result_that_few_can_read_is_repaired(polls: Stack, value: bytes, output: Any) -> None:
    async with Fake(port=PORT, raw=result(value)), polls.talk() as talk:
        events = await turn(talk)

    assert one(events, "action.result")["result"]["output"] == output


async def test_a_server_that_is_not_there_is_a_failed_start(polls: Stack) -> None:
    async with polls.talk() as talk:
        events = await turn(talk)

    assert one(events, "action.result")["error"]["code"] == "REMOTE_AGENT_START_FAILED"


# --- the end ---


async def test_a_cancel_that_the_other_server_does_not_know_is_said(polls: Stack) -> None:
    async with Fake(port=PORT) as fake, polls.talk() as talk:
        await talk.create(call("away", message="say x"))
        await talk.until("subagent.called")
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")
        events = await talk.until_boundary()

    assert "turn.cancelled" in types(events)
    assert "may go on with it" in one(events, "action.result")["error"]["message"]
    assert len(fake.of("POST", "/cancel")) == 1


async def test_a_cancel_that_the_other_server_cannot_take_now_is_repeated(polls: Stack) -> None:
    async with Fake(port=PORT, cancel_status=503) as fake, polls.talk() as talk:
        await talk.create(call("away", message="say x"))
        await talk.until("subagent.called")
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")
        async with asyncio.timeout(20):
            while not fake.of("POST", "/cancel"):
                await asyncio.sleep(0.02)
        fake.cancel_status, fake.cancel = 200, {"status": "accepted"}
        fake.events = [{"type": "session.failed", "data": {"message": "Stopped there."}}]
        events = await talk.until_boundary()

    assert "turn.cancelled" in types(events)
    assert one(events, "action.result")["error"]["message"] == "Stopped there."
    assert len(fake.of("POST", "/cancel")) == 2


async def test_a_task_of_an_agent_that_is_no_longer_declared_waits_for_it_and_can_be_stopped(
    make_stack: StackFactory,
) -> None:
    environment = {"REMOTE_URL": f"http://127.0.0.1:{PORT}"}
    stack = make_stack(provider=True, agents="tests.remote.agents:agents", environment=environment)
    async with Fake(port=PORT) as fake, stack.talk() as talk:
        await talk.create(call("away", message="say x"))
        await talk.until("subagent.called")
        stack.workers[0].kill()
        stack.start_worker({"PERDURE_AGENTS": "tests.remote.agents:alone"})
        await talk.until("session.attention")
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")
        events = await talk.until_boundary(within=120)

    assert "turn.cancelled" in types(events)
    assert "may go on with it" in one(events, "action.result")["error"]["message"]
    assert fake.of("POST", "/cancel") == []


async def test_a_callback_that_never_comes_is_found_on_the_stream(called_back: Stack) -> None:
    async with Fake(port=PORT, events=DONE) as fake, called_back.talk() as talk:
        events = await turn(talk)

    assert text(events) == "Results: From the stream"
    assert "callback" in fake.starts[0].body


async def test_a_callback_counts_once(called_back: Stack) -> None:
    async with Fake(port=PORT) as fake, called_back.talk() as talk:
        await talk.create(call("away", message="say x"))
        start = await started(fake)
        url = start.body["callback"]["url"]
        answers = await asyncio.gather(*(talk.http.post(url, json=report(start)) for _ in range(5)))
        events = await talk.until_boundary()
        late = await talk.http.post(url, json=report(start))

    assert sorted(each.status_code for each in answers) == [202, 404, 404, 404, 404]
    assert {each.text for each in answers if each.status_code == 202} == {'{"ok":true}'}
    assert (late.status_code, late.json()["error"]) == (404, "Session callback not pending.")
    assert text(events) == "Results: Called back"
    assert types(events).count("action.result") == 1
    assert types(events).count("subagent.called") == 1


async def test_a_callback_for_a_cancelled_call_comes_too_late(called_back: Stack) -> None:
    async with Fake(port=PORT) as fake, called_back.talk() as talk:
        await talk.create(call("away", message="say x"))
        start = await started(fake)
        await talk.until("subagent.called")
        await talk.http.post(f"/eve/v1/session/{talk.session_id}/cancel")
        events = await talk.until_boundary()
        late = await talk.http.post(start.body["callback"]["url"], json=report(start))

    assert "turn.cancelled" in types(events)
    assert late.status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"{", 400, "Invalid JSON body."),
        (b"5", 400, "Expected a JSON object."),
        (b"{}", 400, "Missing callback callId."),
        (b'{"callId": "c"}', 400, "Missing callback subagentName."),
        (b'{"callId": "c", "subagentName": "s", "kind": "x"}', 400, "Unsupported callback kind."),
        (b'{"callId": "c", "subagentName": "s", "kind": "session.failed"}', 404, "Session callback not pending."),
    ],
)
async def test_what_is_no_callback_is_refused_in_the_words_of_the_contract(
    called_back: Stack, body: bytes, status: int, error: str
) -> None:
    async with httpx2.AsyncClient(base_url=called_back.url) as http:
        answer = await http.post("/eve/v1/callback/some-token", content=body)
        without = await http.post("/eve/v1/callback/", content=body)

    assert (answer.status_code, answer.json()) == (status, {"error": error, "ok": False})
    assert (without.status_code, without.json()["error"]) == (400, "Missing callback token.")


async def test_a_callback_with_the_right_token_for_another_call_is_refused(called_back: Stack) -> None:
    async with Fake(port=PORT) as fake, called_back.talk() as talk:
        await talk.create(call("away", message="say x"))
        start = await started(fake)
        url = start.body["callback"]["url"]
        wrong = await talk.http.post(url, json=report(start, callId="another"))
        guessed = await talk.http.post(url[:-1] + "~", json=report(start))
        # A failure without an error has the contract's words.
        right = await talk.http.post(url, json={**report(start), "kind": "session.failed"})
        events = await talk.until_boundary()

    assert [each.status_code for each in (wrong, guessed, right)] == [404, 404, 202]
    error = one(events, "action.result")["error"]
    assert error == {"code": "REMOTE_AGENT_FAILED", "message": "Remote agent failed."}


async def test_a_huge_callback_is_refused_and_the_token_stays(called_back: Stack) -> None:
    async with Fake(port=PORT) as fake, called_back.talk() as talk:
        await talk.create(call("away", message="say x"))
        start = await started(fake)
        url = start.body["callback"]["url"]
        huge = await talk.http.post(url, json=report(start, output="x" * 5_000_000))
        right = await talk.http.post(url, json=report(start))
        events = await talk.until_boundary()

    assert (huge.status_code, right.status_code) == (413, 202)
    assert text(events) == "Results: Called back"
