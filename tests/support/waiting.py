"""To wait for what no event announces."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from tests.support.processes import PATIENCE


async def until(condition: Callable[[], Any], what: str = "a condition", within: float = PATIENCE) -> None:
    """Wait until the condition, which may be asynchronous, holds; what was waited for is the error."""
    try:
        async with asyncio.timeout(within):
            while not await _holds(condition):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {within:g} s for {what}") from None


async def _holds(condition: Callable[[], Any]) -> bool:
    held = condition()
    return bool(await held if inspect.isawaitable(held) else held)
