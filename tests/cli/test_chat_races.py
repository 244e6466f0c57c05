"""`perdure chat` and an API in which something happens between two of its requests."""

import asyncio

from tests.cli.terminal import Terminal
from tests.client.scripted import Asked, Told, line, serving

BEFORE = line("turn.started", 0, turnId="turn_0") + line("turn.completed", 1, turnId="turn_0")


async def test_a_turn_that_ends_while_one_comes_back_is_not_waited_for() -> None:
    over = False
    waiting = {"type": "session.waiting", "data": {"wait": "next"}, "meta": {"index": 2, "attempt": 1}}

    def answer(asked: Asked) -> Told:
        nonlocal over
        if "/stream" in asked.path:
            return Told(200, b"" if "startIndex=3" in asked.path else BEFORE + line("session.waiting", 2), hang=True)
        if "/events" in asked.path:
            found = [waiting] if over and "session.waiting" in asked.path else []
            return Told(200, {"events": found, "hasMore": False})
        if asked.path.endswith("/v1/sessions/ses_1"):
            # It is over right after, or between this one and the one before.
            status, over = "waiting" if over else "running", True
            return Told(200, {"sessionId": "ses_1", "status": status, "openInputs": []})
        if "/why" in asked.path:
            return Told(200, {"code": "message"})
        return Told(200, {"ok": True, "workflowId": "any", "agent": {"name": "concierge"}})

    async with serving(answer) as server:
        with Terminal("chat", "--url", server.url, "--session", "ses_1") as terminal:
            await asyncio.to_thread(terminal.type, "/quit")

            assert await asyncio.to_thread(terminal.ends) == 0


async def test_what_is_refused_at_the_first_question_ends_no_chat() -> None:
    request = {"requestId": "inp_1", "kind": "question", "prompt": "Which one?", "status": "open"}

    def answer(asked: Asked) -> Told:
        if asked.path.endswith("/cancel"):
            return Told(409, {"error": "Not at this moment.", "ok": False, "code": "conflict"})
        if "/events" in asked.path:
            return Told(200, {"events": [], "hasMore": False})
        if asked.path.endswith("/v1/sessions/ses_1"):
            return Told(200, {"sessionId": "ses_1", "status": "waiting", "openInputs": ["inp_1"]})
        if "/why" in asked.path:
            return Told(200, {"code": "input", "details": {"inputs": ["inp_1"]}})
        return Told(200, {**request, "workflowId": "any", "agent": {"name": "concierge"}})

    async with serving(answer) as server:
        with Terminal("chat", "--url", server.url, "--session", "ses_1") as terminal:
            await asyncio.to_thread(terminal.type, "/cancel", prompt="answer> ")
            await asyncio.to_thread(terminal.shows, "Not at this moment.")
            await asyncio.to_thread(terminal.type, "/quit")

            assert await asyncio.to_thread(terminal.ends) == 0
