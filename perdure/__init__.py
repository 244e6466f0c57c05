"""Durable agent sessions in Python, on Temporal: what an author writes with."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.agents import (
        Agent,
        AgentRegistry,
        Call,
        CheckpointTrigger,
        Compaction,
        Decision,
        Durability,
        Lane,
        Limits,
        Milestone,
        Plan,
        Planning,
        PlanStep,
        Price,
        Progress,
        Prompt,
        RemoteAgent,
        Responders,
        Run,
        RunContext,
        Section,
        SessionView,
        Slice,
        State,
        Tool,
        ToolContext,
        append_all,
        load_agents,
        replace_latest,
        replace_latest_by,
        responders,
        run,
        tool,
        upsert_by,
    )
    from perdure.errors import ExecutionFailed, InvalidDeclaration, PerdureError, RunStepFailed, StepOutcomeUnknown
    from perdure.protocol.deliveries import Capabilities, DispatchReceipt, FilePart, Principal, Receipt, TextPart
    from perdure.protocol.events import Event
    from perdure.runtime.open import connect
    from perdure.runtime.runs import Runs, RunStarted
    from perdure.runtime.sessions import Sessions
    from perdure.store.runs import RunQuery, RunRecord
    from perdure.store.values import SessionQuery

__all__ = [
    "Agent",
    "AgentRegistry",
    "Call",
    "Capabilities",
    "CheckpointTrigger",
    "Compaction",
    "Decision",
    "DispatchReceipt",
    "Durability",
    "Event",
    "ExecutionFailed",
    "FilePart",
    "InvalidDeclaration",
    "Lane",
    "Limits",
    "Milestone",
    "PerdureError",
    "Plan",
    "PlanStep",
    "Planning",
    "Price",
    "Principal",
    "Progress",
    "Prompt",
    "Receipt",
    "RemoteAgent",
    "Responders",
    "Run",
    "RunContext",
    "RunQuery",
    "RunRecord",
    "RunStarted",
    "RunStepFailed",
    "Runs",
    "Section",
    "SessionQuery",
    "SessionView",
    "Sessions",
    "Slice",
    "State",
    "StepOutcomeUnknown",
    "TextPart",
    "Tool",
    "ToolContext",
    "append_all",
    "connect",
    "load_agents",
    "replace_latest",
    "replace_latest_by",
    "responders",
    "run",
    "tool",
    "upsert_by",
]

# Looked up on first use: workflow code imports `perdure.protocol` and must not drag in what agents need.
_HOME = {
    "Capabilities": "perdure.protocol.deliveries",
    "DispatchReceipt": "perdure.protocol.deliveries",
    "Event": "perdure.protocol.events",
    "ExecutionFailed": "perdure.errors",
    "FilePart": "perdure.protocol.deliveries",
    "InvalidDeclaration": "perdure.errors",
    "PerdureError": "perdure.errors",
    "Principal": "perdure.protocol.deliveries",
    "Receipt": "perdure.protocol.deliveries",
    "RunQuery": "perdure.store.runs",
    "RunRecord": "perdure.store.runs",
    "RunStarted": "perdure.runtime.runs",
    "RunStepFailed": "perdure.errors",
    "Runs": "perdure.runtime.runs",
    "SessionQuery": "perdure.store.values",
    "Sessions": "perdure.runtime.sessions",
    "StepOutcomeUnknown": "perdure.errors",
    "TextPart": "perdure.protocol.deliveries",
    "connect": "perdure.runtime.open",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "perdure.agents")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
