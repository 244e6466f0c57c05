"""The agent that `make dev` serves by default."""

import asyncio
import random
from datetime import UTC, datetime

from .agent import Agent
from .context import ToolContext
from .state import State
from .tool import tool

NOTES = State("notes", list[str], default=list[str])


@tool(effects="pure")
def roll_dice(count: int = 1, sides: int = 6) -> list[int]:
    """Roll dice.

    Args:
        count: How many dice.
        sides: How many sides each of them has.
    """
    return [random.randint(1, sides) for _ in range(count)]


@tool(effects="idempotent")
async def remember_note(ctx: ToolContext, note: str) -> str:
    """Keep a note for the rest of the session.

    Args:
        note: What to remember.
    """
    notes = await NOTES.update(ctx, lambda notes: [*notes, note])
    return f"Noted. I keep {len(notes)} note{'s' if len(notes) != 1 else ''} now."


@tool(effects="pure")
def current_time() -> str:
    """Tell the time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@tool(effects="pure", timeout=90)
async def wait_seconds(seconds: int) -> str:
    """Wait: time enough to kill the worker that does it, and to see another one begin again.

    Args:
        seconds: How long, at most 60.
    """
    seconds = max(0, min(seconds, 60))
    await asyncio.sleep(seconds)
    return f"Waited {seconds} seconds."


@tool(approval="always", summary=lambda arguments: f"Send a postcard: “{arguments['text']}”")
def send_postcard(text: str) -> str:
    """Send a postcard, once somebody has approved it. Nothing leaves this machine.

    Args:
        text: What to write on it.
    """
    return f"The postcard is on its way: {text}"


# No model of its own: the built-in demo model answers until PERDURE_MODEL names a real one.
agent = Agent(
    name="demo",
    description="Rolls dice, remembers notes, knows the time, can wait, and sends postcards that you approve.",
    instructions="You are a friendly demo. Use your tools when they help, and keep answers short.",
    tools=[roll_dice, remember_note, current_time, wait_seconds, send_postcard],
)
