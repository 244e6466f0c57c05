"""To wait for what no event announces."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

from tests.support.processes import PATIENCE

#: What a look costs is what the others on the machine do not have: most of the time none is taken.
_OFTEN = 0.01
_SELDOM = 0.25
_SHARE = 4


async def until(condition: Callable[[], Any], what: str = "a condition", within: float = PATIENCE) -> None:
    """Wait until the condition, which may be asynchronous, holds; what was waited for is the error."""
    try:
        async with asyncio.timeout(within):
            while True:
                began = time.monotonic()
                if await _holds(condition):
                    return
                looked = time.monotonic() - began
                await asyncio.sleep(min(max(_OFTEN, _SHARE * looked), _SELDOM))
    except TimeoutError:
        raise AssertionError(f"waited {within:g} s for {what}") from None


async def _holds(condition: Callable[[], Any]) -> bool:
    held = condition()
    return bool(await held if inspect.isawaitable(held) else held)
