"""A part of the product that dies at a chosen moment of its talk with Temporal.

`DIE_AT=after_signal python -m tests.support.chaos.dying api …` is `perdure api …`, killed where no signal from outside
could be timed to. `DIE_AT=in_decision … worker` dies while it decides for a turn.
"""

import functools
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias

from temporalio.client import Client, WorkflowHandle
from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from perdure.cli.commands import main
from perdure.protocol import names

Moment: TypeAlias = Literal["before_start", "after_start", "before_signal", "after_signal", "in_decision"]


def arm(moment: str) -> None:
    """Put the death in place."""
    if moment == "in_decision":
        os.environ["PERDURE_SANDBOX"] = "on"
        SandboxedWorkflowRunner.create_instance = _deadly_decision(SandboxedWorkflowRunner.create_instance)
        return
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


def _deadly_decision(create: Callable[..., WorkflowInstance]) -> Callable[..., WorkflowInstance]:
    """Die with a turn's task in hand: the server has handed it out, and gets no result."""

    decides = names.SESSION_WORKFLOW if os.environ.get("PERDURE_TURNS") == "inline" else names.TURN_WORKFLOW

    def dies(runner: SandboxedWorkflowRunner, details: WorkflowInstanceDetails) -> WorkflowInstance:
        if details.info.workflow_type == decides:
            os.kill(os.getpid(), signal.SIGKILL)
        return create(runner, details)

    return dies


if __name__ == "__main__":
    arm(os.environ["DIE_AT"])
    main()
