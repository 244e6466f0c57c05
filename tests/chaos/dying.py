"""A part of the product that dies at a chosen moment of its talk with Temporal.

`DIE_AT=after_signal python -m tests.chaos.dying api …` is `perdure api …`, killed where no signal from outside
could be timed to.
"""

import functools
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias

from temporalio.client import Client, WorkflowHandle

from perdure.cli import main

Moment: TypeAlias = Literal["before_start", "after_start", "before_signal", "after_signal"]


def arm(moment: str) -> None:
    """Put the death in place."""
    when, _, what = moment.partition("_")
    owner: Any = {"start": Client, "signal": WorkflowHandle}[what]
    name = {"start": "start_workflow", "signal": "signal"}[what]
    setattr(owner, name, _deadly(getattr(owner, name), before=when == "before"))


def _deadly(call: Callable[..., Awaitable[Any]], *, before: bool) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(call)
    async def dies(*args: Any, **kwargs: Any) -> None:
        if not before:
            await call(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    return dies


if __name__ == "__main__":
    arm(os.environ["DIE_AT"])
    main()
