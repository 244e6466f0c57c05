"""A run that is started once a night, and survives whatever dies meanwhile.

PERDURE_AGENTS=examples.nightly:everything perdure dev
perdure runs start nightly --input '{"day": "2027-01-31"}' --wait
"""

import asyncio
from datetime import date

from pydantic import BaseModel

from perdure import Agent, RunContext, StepOutcomeUnknown, run

writer = Agent("writer", instructions="Write one short paragraph about the figures that you are given.")

_SALES = {"north": 12, "south": 30}
_SENT: list[str] = []


class Nightly(BaseModel):
    day: date
    pause: float = 0.0


class Report(BaseModel):
    total: int
    text: str
    sent: bool


async def count(region: str) -> int:
    """Stands for a query of a database."""
    return _SALES[region]


def send(text: str) -> str:
    """Stands for an e-mail, which must not go out twice."""
    _SENT.append(text)
    return f"message {len(_SENT)}"


@run(name="nightly", input=Nightly, output=Report)
async def nightly(ctx: RunContext, night: Nightly) -> Report:
    # To count twice does no harm, and both regions are counted at the same time.
    counts = await asyncio.gather(
        *(ctx.step(f"count-{region}", count, region, effects="pure") for region in sorted(_SALES))
    )
    ctx.log("info", "counted", total=sum(counts))
    await ctx.sleep(night.pause)
    text = str(await ctx.prompt("writer", f"On {night.day} we have sold {sum(counts)}."))
    try:
        await ctx.step("send", send, text)
        sent = True
    except StepOutcomeUnknown:
        # It may have been sent. Twice would be worse than not at all.
        sent = False
    return Report(total=sum(counts), text=text, sent=sent)


everything = [writer, nightly]
