"""An agent that does what requests ask, and a program that has it done: `python -m tests.runtime.executing KEY`."""

import asyncio
import sys

from pydantic import BaseModel

import perdure
from perdure import Agent, Prompt, Section, tool


class Order(BaseModel):
    """The script is what the scripted provider does."""

    item: str
    script: str


class Bill(BaseModel):
    total: int


@tool(effects="pure")
async def rest(seconds: float) -> str:
    """Take a while."""
    await asyncio.sleep(seconds)
    return "rested"


cashier = Agent(
    name="cashier",
    model="openai-chat:scripted",
    instructions=Prompt(Section("Objective", "Make the bill for $item.")),
    tools=[rest],
)


def order(total: int, *, seconds: float = 0.0, item: str = "tea") -> Order:
    bill = f'call final_output {{"total": {total}}}'
    return Order(item=item, script=f'call rest {{"seconds": {seconds}}} then {bill}' if seconds else bill)


async def main(key: str) -> None:
    async with perdure.connect() as sessions:
        bill = await sessions.execute("cashier", order(7, seconds=3), output=Bill, key=key)
        sys.stdout.write(f"{bill.total}\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
