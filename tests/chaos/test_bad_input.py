"""Whatever is sent, the answer is a clear error, and the session lives on."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.common import RawValue

from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef
from tests.support.chaos.scripts import say
from tests.support.chaos.world import Caller, World, unique

pytestmark = pytest.mark.chaos

_MIB = 1024 * 1024
_DEEP = 90_000

#: Bodies of a request, or how one is made that is large, and the status that each is refused with.
BODIES: dict[str, tuple[bytes | Callable[[], bytes], int]] = {
    "nothing": (b"", 400),
    "malformed JSON": (b'{"message": "hel', 400),
    "binary": (bytes(range(256)) * 64, 400),
    "broken UTF-8": (b'{"message": "\xff\xfe"}', 400),
    "a lone surrogate": (b'{"message": "\\ud800"}', 400),
    "not an object": (b'"hello"', 400),
    "a list": (b"[1, 2, 3]", 400),
    "a number as a message": (b'{"message": 5}', 400),
    "an object as a message": (b'{"message": {"text": "hello"}}', 400),
    "a part of unknown type": (b'{"message": [{"type": "hologram"}]}', 400),
    "an empty message": (b'{"message": ""}', 400),
    "deep lists": (b'{"message": ' + b"[" * _DEEP + b"]" * _DEEP + b"}", 400),
    "deep objects": (b'{"message": "hi", "outputSchema": ' + b'{"a":' * _DEEP + b"1" + b"}" * _DEEP + b"}", 400),
    "three megabytes": (json.dumps({"message": "x" * 3 * _MIB}).encode(), 413),
    "seventy megabytes": (lambda: b'{"message": "' + b"x" * 70 * _MIB + b'"}', 413),
}

#: What no caller with a receipt sends as a signal.
SIGNALS: list[Any] = [
    None,
    "hello",
    5,
    [1, 2, 3],
    {},
    {"id": 5, "token_hash": None},
    {"id": ["x"], "tokenHash": {"a": 1}, "version": "one"},
    {"version": 999, "kind": "something new"},
    RawValue(Payload(metadata={"encoding": b"binary/plain"}, data=b"\x00\xff\x00")),
    RawValue(Payload(metadata={"encoding": b"json/plain"}, data=b"{not json")),
    RawValue(Payload(metadata={"encoding": b"from/the-future"}, data=b"?")),
]


@pytest.mark.parametrize("what", BODIES)
async def test_a_bad_body_is_refused_and_the_session_lives_on(world: World, what: str) -> None:
    made, status = BODIES[what]
    body = made if isinstance(made, bytes) else made()
    async with await living_session(world) as caller:
        for path in ("/eve/v1/session", f"/eve/v1/session/{caller.session_id}"):
            answer = await caller.http.post(path, content=with_token(body, caller.token))

            assert (answer.status_code, answer.json()["ok"]) == (status, False), answer.text
            assert answer.json()["error"]
            assert "Traceback" not in answer.text
        await lives_on(caller)


async def test_what_does_not_exist_is_named_as_such(world: World) -> None:
    async with await living_session(world) as caller:
        body = {"continuationToken": caller.token, "message": "hello"}
        unknown_agent = await caller.http.post("/agents/unknown/eve/v1/session", json={"message": "hello"})
        unknown_session = await caller.http.post("/eve/v1/session/ses_unknown", json=body)
        unknown_token = await caller.http.post(
            f"/eve/v1/session/{caller.session_id}", json={**body, "continuationToken": "eve:guessed"}
        )
        unknown_stream = await caller.http.get("/eve/v1/session/ses_unknown/stream")

        assert unknown_agent.status_code == 404
        assert unknown_session.status_code == 404
        assert (unknown_token.status_code, unknown_token.json()["code"]) == (409, "session_not_active")
        assert unknown_stream.status_code == 404
        await lives_on(caller)


async def test_strange_characters_come_through(world: World) -> None:
    async with await living_session(world) as caller:
        word = unique("\u202e🧨\u0007é\x7f")

        assert await caller.say(f"say {word}") == word


async def test_a_signal_of_unknown_shape_is_ignored(world: World) -> None:
    async with await living_session(world) as caller:
        handle = (await world.stack.client()).get_workflow_handle(caller.session_id)
        for signal in SIGNALS:
            await handle.signal(names.DELIVER, signal)
        for name in (names.DELIVER, names.CANCEL):
            await handle.signal(name, args=["one", "two", "three"])
            await handle.signal(name)
        await handle.signal("an unknown signal", "hello")

        await lives_on(caller)


async def test_a_signal_for_a_delivery_that_was_never_accepted_starts_no_turn(world: World) -> None:
    async with await living_session(world) as caller:
        handle = (await world.stack.client()).get_workflow_handle(caller.session_id)
        state = await handle.query(names.DESCRIBE)
        right, wrong = state["tokenHash"], "0" * 64
        for token_hash in (right, wrong):
            ref = DeliveryRef(id=unique("dlv_"), token_hash=token_hash)
            await handle.signal(names.DELIVER, ref.model_dump(mode="json"))

        await lives_on(caller)


async def living_session(world: World) -> Caller:
    if not any(worker.alive for worker in world.stack.workers):
        world.only_worker()
    caller = world.caller()
    await caller.say(say().message)
    return caller


async def lives_on(caller: Caller) -> None:
    script = say()
    assert await caller.say(script.message) == script.answer


def with_token(body: bytes, token: str) -> bytes:
    """The same body, and the right to deliver it."""
    if not body.startswith(b'{"message"'):
        return body
    return b'{"continuationToken": "' + token.encode() + b'", ' + body[1:]
