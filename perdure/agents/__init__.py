"""Declarations that authors write: frozen, and fast to import. They know nothing of the harness, the store or Temporal.

Read `agent`, `tool`, `approval`, `context`, `state`, `run`.
"""

from perdure.protocol.inputs import Responders

from . import responders
from .agent import Agent, Compaction, Durability, Instructions, Lane, Limits, Price
from .approval import Approval, Call, Decision
from .context import SessionView, ToolContext
from .registry import AgentRegistry, load_agents, load_runs
from .remote import RemoteAgent
from .run import Run, RunContext, RunRegistry, run
from .state import State
from .tool import Effects, Tool, tool

__all__ = [
    "Agent",
    "AgentRegistry",
    "Approval",
    "Call",
    "Compaction",
    "Decision",
    "Durability",
    "Effects",
    "Instructions",
    "Lane",
    "Limits",
    "Price",
    "RemoteAgent",
    "Responders",
    "Run",
    "RunContext",
    "RunRegistry",
    "SessionView",
    "State",
    "Tool",
    "ToolContext",
    "load_agents",
    "load_runs",
    "responders",
    "run",
    "tool",
]
