"""Declarations that authors write: frozen, and fast to import. They know nothing of the harness, the store or Temporal.

Read `agent`, `tool`, `approval`, `context`, `state`.
"""

from perdure.protocol.inputs import Responders

from . import responders
from .agent import Agent, Compaction, Instructions, Limits, Price
from .approval import Approval, Call, Decision
from .context import SessionView, ToolContext
from .registry import AgentRegistry, load_agents
from .remote import RemoteAgent
from .state import State
from .tool import Effects, Tool, tool

__all__ = [
    "Agent",
    "AgentRegistry",
    "Approval",
    "Call",
    "Compaction",
    "Decision",
    "Effects",
    "Instructions",
    "Limits",
    "Price",
    "RemoteAgent",
    "Responders",
    "SessionView",
    "State",
    "Tool",
    "ToolContext",
    "load_agents",
    "responders",
    "tool",
]
