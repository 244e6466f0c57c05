"""What an operator sees of sessions that PostgreSQL keeps."""

import json
import re
import subprocess

import pytest

from perdure.dev.supervisor import command
from tests.support.plugin import StackFactory
from tests.support.stack import Stack

pytestmark = pytest.mark.postgres


def perdure(stack: Stack, part: str, *options: str) -> str:
    """What a command says in the stack's environment."""
    done = subprocess.run(
        command(part, *options), env=stack.environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_sessions_are_listed_and_shown(make_stack: StackFactory, postgres_url: str) -> None:
    stack = make_stack(database_url=postgres_url)
    async with stack.talk() as older, stack.talk() as newer:
        await older.say("the older one")
        await newer.say("the newer one")

        first = (await newer.http.get("/v1/sessions", params={"limit": 1})).json()
        rest = (await newer.http.get("/v1/sessions", params={"limit": 1, "cursor": first["nextCursor"]})).json()
        newer.cursor = 0
        live = await newer.until_boundary()
    listed = perdure(stack, "sessions").splitlines()
    shown = [json.loads(line) for line in perdure(stack, "tail", newer.session_id, "--no-follow").splitlines()]

    assert [page["sessions"][0]["sessionId"] for page in (first, rest)] == [newer.session_id, older.session_id]
    assert rest["sessions"][0]["status"] == "waiting"
    assert [line.split()[0] for line in listed] == [newer.session_id, older.session_id]
    assert re.search(r" waiting .* the newer one$", listed[0])
    assert [event["index"] for event in shown] == list(range(len(live)))
    assert [event["type"] for event in shown] == [event["type"] for event in live]
