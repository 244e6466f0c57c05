"""Declarations that authors write: frozen, and fast to import. They know nothing of the harness, the store or Temporal.

Read `agent`, `tool`, `approval`, `context`, `state`, `run`.
"""

from perdure.protocol.inputs import Responders

from . import responders
from .agent import Agent, Compaction, Durability, Instructions, Lane, Limits, Price
from .approval import Approval, Call, Decision
from .context import SessionView, ToolContext
from .progress.checkpoints import CheckpointTrigger, Milestone
from .progress.plan import Plan, Planning, PlanStep
from .progress.prompt import Progress, Prompt, Section
from .progress.slices import Slice, append_all, replace_latest, replace_latest_by, upsert_by
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
    "CheckpointTrigger",
    "Compaction",
    "Decision",
    "Durability",
    "Effects",
    "Instructions",
    "Lane",
    "Limits",
    "Milestone",
    "Plan",
    "PlanStep",
    "Planning",
    "Price",
    "Progress",
    "Prompt",
    "RemoteAgent",
    "Responders",
    "Run",
    "RunContext",
    "RunRegistry",
    "Section",
    "SessionView",
    "Slice",
    "State",
    "Tool",
    "ToolContext",
    "append_all",
    "load_agents",
    "load_runs",
    "replace_latest",
    "replace_latest_by",
    "responders",
    "run",
    "tool",
    "upsert_by",
]
