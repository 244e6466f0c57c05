"""Durable agent sessions in Python, on Temporal: what an author writes with."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.agents import (
        Agent,
        AgentRegistry,
        Call,
        Decision,
        Limits,
        Responders,
        SessionView,
        State,
        Tool,
        ToolContext,
        load_agents,
        responders,
        tool,
    )
    from perdure.errors import InvalidDeclaration, PerdureError
    from perdure.protocol.principals import Principal

__all__ = [
    "Agent",
    "AgentRegistry",
    "Call",
    "Decision",
    "InvalidDeclaration",
    "Limits",
    "PerdureError",
    "Principal",
    "Responders",
    "SessionView",
    "State",
    "Tool",
    "ToolContext",
    "load_agents",
    "responders",
    "tool",
]

# Looked up on first use: workflow code imports `perdure.protocol` and must not drag in what agents need.
_HOME = {
    "InvalidDeclaration": "perdure.errors",
    "PerdureError": "perdure.errors",
    "Principal": "perdure.protocol.principals",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "perdure.agents")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
