"""What authors write with: frozen declarations, light to import."""

from .agent import Agent, Instructions, Limits
from .context import SessionView, ToolContext
from .registry import AgentRegistry, load_agents
from .state import State
from .tool import Approval, Effects, Tool, tool

__all__ = [
    "Agent",
    "AgentRegistry",
    "Approval",
    "Effects",
    "Instructions",
    "Limits",
    "SessionView",
    "State",
    "Tool",
    "ToolContext",
    "load_agents",
    "tool",
]
