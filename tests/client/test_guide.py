"""The programs of the guide to the client."""

import asyncio

import pytest

from tests.support.stack import Stack
from tests.test_docs import definitions


async def test_the_programs_of_the_guide_work(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    guide = definitions("client.md")

    assert await asyncio.to_thread(guide["ask"], stack.url, "say hello there") == "hello there"
    assert capsys.readouterr().out == "hello there"
    assert await guide["buy"](stack.url, 'call pay {"amount": 3} then say bought') == "bought"
