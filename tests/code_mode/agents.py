"""Agents whose model writes programs."""

import os

import httpx2

from perdure import Agent, Limits, RemoteAgent, ToolContext, tool

MODEL = "openai-chat:scripted"


@tool(effects="pure")
async def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@tool(effects="pure", approval="always")
async def pay(amount: int) -> str:
    """Pay somebody."""
    return f"paid {amount}"


async def _ledger(path: str, body: dict[str, object]) -> None:
    async with httpx2.AsyncClient(base_url=os.environ["LEDGER_URL"], timeout=150, trust_env=False) as client:
        (await client.post(path, json=body)).raise_for_status()


@tool(timeout=120)
async def charge(note: str, ctx: ToolContext) -> str:
    """Charge a customer: never twice."""
    body = {"tool": "charge", "note": note, "call": ctx.call_id}
    await _ledger("/effect", {"key": ctx.idempotency_key, "body": body})
    return f"charged {note}"


@tool(effects="pure", timeout=120)
async def meet(gate: str) -> str:
    """Wait at a gate."""
    await _ledger("/pass", {"gate": gate})
    return gate


@tool(timeout=120, approval="always")
async def refund(note: str, ctx: ToolContext) -> str:
    """Give money back: never twice, and only if people say so."""
    body = {"tool": "refund", "note": note, "call": ctx.call_id}
    await _ledger("/effect", {"key": ctx.idempotency_key, "body": body})
    return f"refunded {note}"


@tool(effects="pure", pool="gpu")
async def where() -> str:
    """Say which process this is."""
    return f"process {os.getpid()}"


away = RemoteAgent("away", os.environ.get("REMOTE_URL", "http://127.0.0.1:9"), description="Works elsewhere.")
clerk = Agent(name="clerk", model=MODEL, description="Adds and pays.", tools=[add, pay])
coder = Agent(
    name="coder",
    model=MODEL,
    tools=[add, pay, charge, meet, refund],
    subagents=[clerk],
    code_mode=True,
    limits=Limits(calls_per_program=20),
)
mixed = Agent(name="mixed", model=MODEL, tools=[pay, where], subagents=[clerk, away], code_mode=True)
agents = [coder, mixed]
