"""The agents of the next build: a tool has another name, an agent is gone, and states have one more field."""

from perdure import Agent, tool
from perdure.protocol.events import Usage
from perdure.protocol.requests import TurnResult
from perdure.session.state import SessionState, TurnState


@tool(effects="idempotent")
def transfer(amount: int) -> dict[str, int]:
    """Pay an amount; `pay` before.

    Args:
        amount: How much.
    """
    return {"transferred": amount}


agents = [Agent(name="kept", model="openai-chat:scripted", tools=[transfer])]

_after_turn, _after_step = SessionState.after_turn, TurnState.after_step


def after_turn(self: SessionState, result: TurnResult, *, counts_silent: bool = False) -> SessionState:
    return _after_turn(self, result, counts_silent=counts_silent).model_copy(update={"mood": "calm"})


def after_step(self: TurnState, usage: Usage) -> TurnState:
    after = _after_step(self, usage)
    return after.model_copy(update={"extra": {**after.extra, "tone": "warm"}})


SessionState.after_turn = after_turn
TurnState.after_step = after_step
