"""What authors write with: frozen declarations, light to import."""

from perdure.protocol.inputs import Responders

from . import responders
from .agent import Agent, Instructions, Limits
from .approval import Approval, Call, Decision
from .context import SessionView, ToolContext
from .registry import AgentRegistry, load_agents
from .state import State
from .tool import Effects, Tool, tool

__all__ = [
    "Agent",
    "AgentRegistry",
    "Approval",
    "Call",
    "Decision",
    "Effects",
    "Instructions",
    "Limits",
    "Responders",
    "SessionView",
    "State",
    "Tool",
    "ToolContext",
    "load_agents",
    "responders",
    "tool",
]
