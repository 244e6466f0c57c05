"""Agents whose sessions have something to trace: a retry, a child, and an approval."""

import asyncio

from perdure import Agent, tool

_begun: set[str] = set()


@tool(effects="pure", retries=2, timeout=20)
async def flaky(key: str, seconds: float = 0.2) -> str:
    """Fail the first time.

    Args:
        key: Of what the first time is.
        seconds: How long it takes.
    """
    await asyncio.sleep(seconds)
    if key not in _begun:
        _begun.add(key)
        raise RuntimeError("hidden-content")
    return "hidden-content"


@tool(approval="always")
def letter(to: str) -> str:
    """Send a letter.

    Args:
        to: The address.
    """
    return f"hidden-content to {to}"


helper = Agent("helper", description="It helps.", tools=[flaky])
agent = Agent("boss", tools=[flaky, letter], subagents=[helper])
