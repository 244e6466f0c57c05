"""An agent whose calls run one after the other, and say in a file that they ran."""

import os
import time
from pathlib import Path

from perdure import Agent, Limits, tool


@tool(effects="idempotent")
def work(name: str, seconds: float = 0.0) -> str:
    """Take some time."""
    with Path(os.environ["TEST_LEDGER"]).open("a") as ledger:
        ledger.write(f"{name}\n")
    time.sleep(seconds)
    return f"{name} is done"


def steered(name: str, **options: object) -> Agent:
    return Agent(
        name=name,
        model="openai-chat:scripted",
        instructions="Do as the script says.",
        tools=[work],
        limits=Limits(parallel_calls=1),
        **options,  # type: ignore[arg-type]
    )


child = steered("steered", turns="child")
inline = steered("steered", turns="inline")
