"""APIs that are away, refuse, break off, fall silent or talk nonsense."""

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from perdure.client import AsyncClient, ClientError
from tests.client.scripted import Told, accepted, api, line, serving
from tests.support.processes import free_port

TURN = line("turn.started", 0, turnId="turn_0") + line("turn.completed", 1, turnId="turn_0")
WAITING = line("session.waiting", 2, wait="next")
UNAVAILABLE = Told(503, {"error": "Try again.", "ok": False, "code": "unavailable"})
KEY = "sk-a-secret-of-the-tests"


async def result_of(url: str, **options: Any) -> Any:
    async with AsyncClient(url, **options) as client:
        return await asyncio.wait_for((await client.session().send("hello")).result(), 20)


@pytest.mark.parametrize("status", [425, 429, 502, 503, 504])
async def test_a_post_that_cannot_be_taken_now_is_sent_again_under_its_key(status: int) -> None:
    refused = Told(status, {"error": "Not now.", "ok": False})
    async with serving(api([refused, refused, accepted()], [Told(200, TURN + WAITING)])) as server:
        assert (await result_of(server.url)).status == "completed"

    keys = {each.headers["idempotency-key"] for each in server.of("POST", "/session")}
    assert len(server.of("POST", "/session")) == 3
    assert len(keys) == 1


async def test_a_post_whose_answer_is_lost_is_sent_again_under_its_key() -> None:
    lost = Told(202, b"{", cut=True)
    async with serving(api([lost, accepted()], [Told(200, TURN + WAITING)])) as server:
        assert (await result_of(server.url)).status == "completed"

    assert len({each.headers["idempotency-key"] for each in server.of("POST", "/session")}) == 1
    assert len(server.of("POST", "/session")) == 2


async def test_each_send_has_a_key_of_its_own() -> None:
    async with serving(api([accepted()], [Told(200, TURN + WAITING)])) as server:
        await result_of(server.url)
        await result_of(server.url)

    assert len({each.headers["idempotency-key"] for each in server.of("POST", "/session")}) == 2


async def test_what_the_api_says_of_when_to_come_again_is_respected() -> None:
    full = Told(429, {"error": "Full.", "ok": False, "code": "inbox_full"}, {"retry-after": "1"})
    async with serving(api([full, accepted()], [Told(200, TURN + WAITING)])) as server:
        began = time.monotonic()
        await result_of(server.url)

    assert time.monotonic() - began >= 1


async def test_a_refusal_that_lasts_longer_than_our_patience_is_raised_with_the_key_to_repeat_it() -> None:
    full = Told(429, {"error": "Full.", "ok": False, "code": "inbox_full"}, {"retry-after": "60"})
    async with serving(api([full], [])) as server, AsyncClient(server.url, patience=1) as client:
        with pytest.raises(ClientError) as refused:
            await client.session().send("hello", key="mine")

    error = refused.value
    assert (error.status, error.code, error.retry_after, error.key) == (429, "inbox_full", 60, "mine")
    assert len(server.asked) == 1


async def test_answers_are_sent_ten_times_before_they_are_given_up() -> None:
    state = {"sessionId": "ses_1", "continuationToken": "eve:1", "streamIndex": 3}
    async with serving(api([UNAVAILABLE], [])) as server, AsyncClient(server.url, patience=0) as client:
        with pytest.raises(ClientError, match="Try again"):
            await client.session(state).send(input_responses=[{"requestId": "inp_1", "optionId": "approve"}])

    assert len(server.of("POST", "/session/ses_1")) == 10


async def test_answers_wait_for_no_pause_that_is_longer_than_our_patience() -> None:
    away = Told(503, {"error": "Try again.", "ok": False}, {"retry-after": "3600"})
    state = {"sessionId": "ses_1", "continuationToken": "eve:1", "streamIndex": 3}
    async with serving(api([away], [])) as server, AsyncClient(server.url) as client:
        with pytest.raises(ClientError, match="Try again"):
            await client.session(state).send(input_responses=[{"requestId": "inp_1", "optionId": "approve"}])

    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413, 500])
async def test_a_refusal_is_raised_at_once(status: int) -> None:
    refused = Told(status, {"error": "No.", "ok": False, "code": "some_code", "violations": [1]})
    async with serving(api([refused], [])) as server, AsyncClient(server.url) as client:
        with pytest.raises(ClientError, match="No") as error:
            await client.session().send("hello")

    assert (error.value.status, error.value.code, error.value.message) == (status, "some_code", "No.")
    assert error.value.details == {"violations": [1]}
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_reader_that_may_not_read_is_told_at_once(status: int) -> None:
    async with serving(api([accepted()], [Told(status, {"error": "No.", "ok": False})])) as server:
        with pytest.raises(ClientError, match="No"):
            await result_of(server.url)

    assert len(server.of("GET", "/stream")) == 1


async def test_a_cancel_that_names_no_turn_is_not_repeated() -> None:
    async with serving(api([UNAVAILABLE], [])) as server, AsyncClient(server.url) as client:
        with pytest.raises(ClientError):
            await client.cancel("ses_1")

    assert len(server.asked) == 1


async def test_an_error_in_the_form_of_flue_has_its_type_as_code() -> None:
    error = {"error": {"type": "run_not_found", "message": "No such run.", "details": ""}}
    async with serving(api([], [Told(404, error)])) as server, AsyncClient(server.url) as client:
        with pytest.raises(ClientError) as refused:
            await client.run("run_1")

    assert (refused.value.code, refused.value.message) == ("run_not_found", "No such run.")


async def test_an_error_that_is_a_page_or_has_no_end_is_short() -> None:
    page = Told(500, b"<html>" + b"x" * 3_000_000, {"content-type": "text/html"})
    plain = Told(500, b"word " * 1_000_000)
    for told in (page, plain):
        async with serving(api([told], [])) as server, AsyncClient(server.url) as client:
            with pytest.raises(ClientError) as refused:
                await client.session().send("hello")

        assert refused.value.status == 500
        assert len(str(refused.value)) < 600
        assert "<html>" not in str(refused.value)


# --- streams -----------------------------------------------------------------------------------------------------


async def test_a_stream_that_breaks_is_read_on_behind_the_last_event() -> None:
    first = Told(200, line("turn.started", 0, turnId="turn_0") + b'{"type": "half', cut=True)
    rest = Told(200, line("turn.completed", 1, turnId="turn_0") + WAITING)
    async with serving(api([accepted()], [first, UNAVAILABLE, rest])) as server:
        assert (await result_of(server.url)).status == "completed"

    assert [each.path.partition("?")[2] for each in server.of("GET", "/stream")] == [
        "",
        "startIndex=1",
        "startIndex=1",
    ]


async def test_the_cursor_is_the_index_of_the_last_event_and_no_count() -> None:
    body = b"\n" + line("turn.started", 10, turnId="turn_0") + line("odd", None) + line("session.waiting", 12)
    async with serving(api([accepted()], [Told(200, body)])) as server, AsyncClient(server.url) as client:
        session = client.session()
        events = [event async for event in await session.send("hello")]

    assert [event.index for event in events] == [10, None, 12]
    assert session.state == {"continuationToken": "eve:1", "sessionId": "ses_1", "streamIndex": 13}


async def test_an_event_that_comes_twice_is_read_once() -> None:
    first, whole = Told(200, TURN, cut=True), Told(200, TURN + WAITING)
    async with serving(api([accepted()], [first, whole])) as server, AsyncClient(server.url) as client:
        events = [event.index async for event in await client.session().send("hello")]

    assert events == [0, 1, 2]


async def test_nothing_is_done_without_a_boundary() -> None:
    async with serving(api([accepted()], [Told(200, TURN, cut=True)])) as server:
        with pytest.raises(ClientError) as error:
            await result_of(server.url, outage=1.0)

    assert error.value.code == "unreachable"


async def test_a_session_that_ended_without_a_boundary_is_no_result() -> None:
    ended = Told(200, {"sessionId": "ses_1", "status": "failed"})
    answers = api([accepted()], [Told(200, TURN), Told(200)], **{"/v1/sessions": ended})
    async with serving(answers) as server:
        with pytest.raises(ClientError) as error:
            await result_of(server.url)

    assert error.value.code == "no_boundary"


async def test_blank_lines_are_signs_of_life_and_silence_is_not() -> None:
    silent = Told(200, TURN + b"\n\n", hang=True)
    told: list[ClientError | None] = []
    async with serving(api([accepted()], [silent, Told(200, WAITING)])) as server:
        result = await result_of(server.url, silence=0.3, on_outage=told.append)

    assert result.status == "completed"
    assert [each and each.code for each in told] == ["unreachable", None]


async def test_what_is_unknown_or_cannot_be_read_is_kept() -> None:
    odd: list[bytes] = [b"no json\n", b"[1, 2]\n", b'{"type": 5}\n', b'{"type": "new.thing", "extra": {"a": 1}}\n']
    stream = Told(200, TURN + b"".join(odd) + WAITING)
    async with serving(api([accepted()], [stream])) as server, AsyncClient(server.url) as client:
        events = [event async for event in await client.session().send("hello")]

    assert [event.raw for event in events[2:-1]] == [
        "no json",
        [1, 2],
        {"type": 5},
        {"type": "new.thing", "extra": {"a": 1}},
    ]
    assert [event.type for event in events[2:-1]] == ["", "", "", "new.thing"]


async def test_a_line_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.client.transport._LONGEST_LINE", 10_000)
    async with serving(api([accepted()], [Told(200, b"x" * 50_000, hang=True)])) as server:
        with pytest.raises(ClientError) as error:
            await result_of(server.url)

    assert error.value.code == "too_large"


@pytest.mark.parametrize(("status", "bound"), [(200, "_WHOLE"), (404, "_WHOLE_ERROR")])
async def test_a_response_that_comes_byte_by_byte_without_an_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, status: int, bound: str
) -> None:
    monkeypatch.setattr(f"perdure.client.transport.{bound}", 0.5, raising=False)
    told = Told(status, b"{", drip=0.05)
    async with serving(lambda _: told) as server, AsyncClient(server.url, patience=0) as client:
        with pytest.raises(ClientError) as error:
            await asyncio.wait_for(client.show("ses_1"), 5)

    assert (error.value.status, error.value.code) == ((404, None) if status == 404 else (None, "unreachable"))


async def test_a_program_that_leaves_a_turn_in_its_middle_ends_quietly() -> None:
    program = """
import asyncio, sys
from perdure.client import AsyncClient, Client

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        turn = await client.session().send("hello")
        async for _ in turn:
            break
        async for _ in client.session({"sessionId": "ses_1"}).events():
            break

asyncio.run(main())
with Client(sys.argv[1]) as client:
    for _ in (turn := client.session().send("hello")):
        break
    for _ in client.session({"sessionId": "ses_1"}).events():
        break
"""
    started = line("turn.started", 0, turnId="turn_0")
    async with serving(api([accepted()], [Told(200, started, hang=True)])) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, server.url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), 30)

    assert (process.returncode, output) == (0, b"")


async def test_an_outage_at_a_boundary_is_waited_for() -> None:
    looks = iter([UNAVAILABLE, UNAVAILABLE, Told(200, {"status": "running", "turnId": "turn_0"})])
    script = api([accepted()], [Told(200, TURN + WAITING)])
    async with serving(lambda asked: next(looks) if "/deliveries" in asked.path else script(asked)) as server:
        assert (await result_of(server.url, patience=0)).status == "completed"


async def test_a_stream_that_only_opens_and_ends_is_waited_for_with_pauses() -> None:
    script = api([accepted()], [Told(200, b"\n")], **{"/v1/sessions": Told(404, {"error": "No.", "ok": False})})
    async with serving(script) as server:
        with pytest.raises(ClientError) as error:
            await result_of(server.url, outage=2.0)

    assert error.value.code == "unreachable"
    assert len(server.of("GET", "/stream")) < 15


async def test_a_page_is_no_stream() -> None:
    async with serving(api([accepted()], [Told(200, b"<html>", {"content-type": "text/html"})])) as server:
        with pytest.raises(ClientError) as error:
            await result_of(server.url)

    assert error.value.code == "not_a_stream"


@pytest.mark.parametrize("body", [[], "a text", 7, None, {"events": 3}, {"sessions": 3}])
async def test_json_of_another_form_is_an_error_of_the_client(body: Any) -> None:
    async with serving(lambda _: Told(200, body)) as server, AsyncClient(server.url) as client:
        for asked in (client.events("ses_1"), listed(client), client.cancel("ses_1"), client.session().send("hello")):
            with pytest.raises(ClientError) as raised:
                await asked

            assert raised.value.code == "unreadable"


async def listed(client: AsyncClient) -> list[Any]:
    return [each async for each in client.sessions()]


async def test_answers_that_do_not_count_yet_are_not_waited_for() -> None:
    receipt = accepted(None, inputs=[{"requestId": "inp_1", "status": "open"}])
    state = {"sessionId": "ses_1", "continuationToken": "eve:1", "streamIndex": 3}
    async with serving(api([receipt], [])) as server, AsyncClient(server.url) as client:
        session = client.session(state)
        turn = await session.send(input_responses=[{"requestId": "inp_1", "optionId": "approve"}])
        result = await turn.result()

    assert (result.status, result.boundary) == ("waiting", None)
    assert session.state["streamIndex"] == 3
    assert server.of("GET", "") == []


async def test_a_sealed_turn_ends() -> None:
    sealed = line("turn.sealed", 1, turnId="turn_0", code="no_progress", message="It got nowhere.")
    async with serving(api([accepted()], [Told(200, TURN[: TURN.index(b"\n") + 1] + sealed + WAITING)])) as server:
        result = await result_of(server.url)

    assert (result.status, result.error) == ("sealed", {"code": "no_progress", "message": "It got nowhere."})


# --- credentials -------------------------------------------------------------------------------------------------


async def test_the_key_is_sent_and_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    quoted = {"error": f"The key {KEY} is not known.", "violations": [KEY]}
    quoting = Told(401, {**quoted, "ok": False, "code": "unauthorized"})
    async with serving(api([quoting], [])) as server, AsyncClient(server.url, key=KEY) as client:
        with pytest.raises(ClientError) as refused:
            await client.session().send("hello")
        shown = [repr(client), repr(client.session()), str(refused.value), repr(vars(refused.value)), caplog.text]
    with pytest.raises(ClientError) as absent:
        await AsyncClient(f"http://127.0.0.1:{free_port()}", key=KEY, patience=0).session().send("hello")

    assert server.asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert absent.value.code == "unreachable"
    assert absent.value.__cause__ is None
    assert all(KEY not in text for text in [*shown, str(absent.value), caplog.text])


async def test_a_key_of_the_moment_is_asked_for_each_time() -> None:
    numbers = itertools.count(1)
    async with serving(api([UNAVAILABLE, accepted()], [Told(200, TURN + WAITING)])) as server:
        await result_of(server.url, key=lambda: f"key-{next(numbers)}")

    sent = [each.headers["authorization"] for each in server.asked]
    assert sent == [f"Bearer key-{number}" for number in range(1, len(sent) + 1)]
    assert len(sent) == 4


@pytest.mark.parametrize("bad", ["line\nend", "übel"])
async def test_a_key_that_cannot_be_sent_is_not_quoted(bad: str) -> None:
    forms: list[dict[str, Any]] = [{"key": f"{KEY}{bad}"}, {"headers": {"x-api-key": f"{KEY}{bad}"}}]
    for options in forms:
        with pytest.raises(ClientError, match="printable ASCII") as refused:
            async with AsyncClient("http://127.0.0.1:9", **options) as client:
                await client.session().send("hello")
        assert KEY not in str(refused.value)


@pytest.mark.parametrize("host", ["http://user:secret@127.0.0.1", "ftp://127.0.0.1", "127.0.0.1:8000", "", "http://"])
def test_a_host_that_cannot_be_called_or_shown_is_refused(host: str) -> None:
    with pytest.raises(ClientError) as refused:
        AsyncClient(host)

    assert refused.value.code == "invalid"
    assert "secret" not in str(refused.value)


async def test_the_last_event_of_a_turn_is_not_lost_when_its_reader_is_interrupted_at_that_moment() -> None:
    script = api([accepted()], [Told(200, TURN + WAITING, hang=True)])
    async with serving(script) as server, AsyncClient(server.url) as client:
        session = client.session()
        turn = await session.send("hello")
        types = [(await anext(turn)).type for _ in range(2)]

        reader = asyncio.ensure_future(anext(turn))
        while session.state["streamIndex"] < 3:
            await asyncio.sleep(0)
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            types.append((await reader).type)
        types += [event.type async for event in turn]

    assert types == ["turn.started", "turn.completed", "session.waiting"]


async def test_who_is_asked_whether_it_is_an_api_gets_no_key() -> None:
    async with (
        serving(api([], [], health=Told(body={"status": "ready"}), info=Told(body={}))) as server,
        AsyncClient(server.url, key="a secret key", headers={"x-api-key": "another one"}) as client,
    ):
        await client.health()
        await client.info()

    health, info = server.asked
    assert not {"authorization", "x-api-key"} & health.headers.keys()
    assert {"authorization", "x-api-key"} <= info.headers.keys()


async def test_the_error_after_a_message_that_was_accepted_before_has_its_key() -> None:
    first, again = accepted(), accepted("dlv_2")
    again = replace(again, headers={"idempotency-replayed": "true"})
    script = api([first, again], [Told(200, TURN + WAITING)], events=Told(404, {"error": "Gone.", "code": "gone"}))
    async with serving(script) as server, AsyncClient(server.url) as client:
        session = client.session()
        await (await session.send("one")).result()

        with pytest.raises(ClientError) as failed:
            await session.send("two")

    assert failed.value.code == "gone"
    assert failed.value.key == server.of("POST", "/ses_1")[0].headers["idempotency-key"]
