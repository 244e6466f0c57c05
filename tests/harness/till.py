"""Payments that people have to agree to."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from perdure import tool
from perdure.protocol.inputs import OpenInput
from perdure.testing import ScriptedModel, call
from tests.support.lab import Lab, lab


class Till:
    """Counts what was paid."""

    def __init__(self) -> None:
        self.paid: list[int] = []

    def tool(self, **options: Any) -> Any:
        declared: dict[str, Any] = {"name": "pay", "approval": "always", **options}

        @tool(**declared)
        def pay(amount: int) -> str:
            """Pay."""
            self.paid.append(amount)
            return f"paid {amount}"

        return pay


@asynccontextmanager
async def asked(
    till: Till, *amounts: int, then: tuple[Any, ...] = ("Done.",), **options: Any
) -> AsyncGenerator[tuple[Lab, ScriptedModel, tuple[OpenInput, ...]]]:
    """A session that waits for approvals of these payments."""
    model = ScriptedModel([[call("pay", amount=amount) for amount in amounts], *then])
    async with lab(model, till.tool(**options), can_ask=True) as it:
        yield it, model, await it.parked(await it.deliver("Pay"))


def last_parts(model: ScriptedModel, number: int = -1) -> list[Any]:
    """What the last request of a prompt says."""
    return [part.content for part in model.prompts[number].messages[-1].parts]  # type: ignore[union-attr]
