"""An agent whose tools act on the ledger, one of each effect class."""

import asyncio
import os
from typing import Any, cast

import httpx2

from perdure import Agent, Limits, ToolContext, tool

# Longer than any test holds a gate.
_PATIENCE = 150.0

#: How long people have to answer where silence has a consequence: some tests answer in time.
SOON = 3.0


async def _ledger(path: str, body: dict[str, Any]) -> None:
    async with httpx2.AsyncClient(
        base_url=os.environ["LEDGER_URL"], timeout=_PATIENCE, trust_env=False, verify=False
    ) as client:
        (await client.post(path, json=body)).raise_for_status()


async def _act(
    name: str, note: str, ctx: ToolContext, before: str, after: str, *, honour: bool = False, cling: bool = False
) -> str:
    """One effect, with a gate on either side of it."""
    if before:
        await _pass(before, cling=cling)
    body = {"tool": name, "note": note, "session": ctx.session.id, "turn": ctx.session.turn, "call": ctx.call_id}
    await _ledger("/effect", {"key": ctx.idempotency_key, "body": body, "honour": honour})
    if after:
        await _ledger("/pass", {"gate": after})
    return f"{name} {note}: done"


async def _pass(gate: str, *, cling: bool) -> None:
    """Wait at a gate; a call that clings to it ignores that it has to stop."""
    waiting = asyncio.ensure_future(_ledger("/pass", {"gate": gate}))
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not cling:
                raise
    waiting.result()


@tool(effects="pure", timeout=120)
async def look(note: str, ctx: ToolContext, before: str = "", after: str = "") -> str:
    """Look something up."""
    return await _act("look", note, ctx, before, after)


@tool(effects="idempotent", timeout=120)
async def put(note: str, ctx: ToolContext, before: str = "", after: str = "") -> str:
    """Set something, the same however often."""
    return await _act("put", note, ctx, before, after, honour=True)


@tool(timeout=120)
async def charge(note: str, ctx: ToolContext, before: str = "", after: str = "") -> str:
    """Charge a customer: never twice."""
    return await _act("charge", note, ctx, before, after)


@tool(timeout=120)
def charge_in_thread(note: str, ctx: ToolContext, before: str = "", after: str = "") -> str:
    """Charge a customer, from a thread of its own."""
    return ctx.wait(_act("charge_in_thread", note, ctx, before, after))


@tool(timeout=120)
async def charge_blocking(note: str, ctx: ToolContext, before: str = "") -> str:
    """Charge a customer, and block all other work of this worker meanwhile: a mistake that authors make."""
    with httpx2.Client(base_url=os.environ["LEDGER_URL"], timeout=_PATIENCE, trust_env=False, verify=False) as client:
        client.post("/pass", json={"gate": before}).raise_for_status()
    return await _act("charge_blocking", note, ctx, "", "")


@tool(approval="always", timeout=120)
async def pay(note: str, ctx: ToolContext, before: str = "", after: str = "", cling: bool = False) -> str:
    """Pay a supplier, once an approver agrees: never twice."""
    return await _act("pay", note, ctx, before, after, cling=cling)


@tool(approval="always", expires=SOON, timeout=120)
async def pay_soon(note: str, ctx: ToolContext) -> str:
    """Pay a supplier, if an approver agrees in time."""
    return await _act("pay_soon", note, ctx, "", "")


@tool(approval="always", expires=SOON, on_expiry="approve", timeout=120)
async def pay_anyway(note: str, ctx: ToolContext) -> str:
    """Pay a supplier, unless an approver objects in time."""
    return await _act("pay_anyway", note, ctx, "", "")


TOOLS = (look, put, charge, charge_in_thread, charge_blocking, pay, pay_soon, pay_anyway)

#: What running each tool twice does, for those who check from outside.
EFFECTS = {each.name: each.effects for each in TOOLS}

agent = Agent(
    name="chaos",
    model="openai-chat:scripted",
    instructions="Do as the script says.",
    tools=TOOLS,
    # Where workers are killed at random, it is not the steps that kill them.
    limits=Limits(max_deaths=int(os.environ.get("MAX_DEATHS", "3"))),
    on_interrupted_reply=cast(Any, os.environ.get("ON_INTERRUPTED_REPLY", "retract")),
)
