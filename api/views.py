"""The JSON of an agent, as the contract shows it."""

from typing import Any

from perdure.agents.agent import DEMO, Agent
from perdure.agents.tool import Tool
from perdure.protocol.wire import JsonObject


def describe(agent: Agent, *, development: bool) -> JsonObject:
    tools = [_tool(agent, tool) for tool in agent.own_tools]
    channels = [_channel(method, path) for method, path in _ROUTES]
    # The contract lists no agents on other servers here.
    subagents = [_subagent(agent, each) for each in agent.subagents if isinstance(each, Agent)]
    return {
        "kind": "eve-agent-info",
        "version": 1,
        "mode": "development" if development else "production",
        "agent": _agent(agent),
        "capabilities": {"devRoutes": False},
        "channels": {
            "authored": [],
            "available": channels,
            "disabledFramework": [],
            "framework": [
                {**channel, "disabledByAuthor": False, "replacedByAuthoredChannel": False, "status": "active"}
                for channel in channels
            ],
        },
        "connections": [],
        "diagnostics": {"discoveryErrors": 0, "discoveryWarnings": 0},
        "hooks": [],
        "instructions": _instructions(agent),
        "sandbox": None,
        "schedules": [],
        "skills": {"dynamic": [], "static": []},
        "subagents": {"local": subagents, "total": len(subagents)},
        "tools": {
            "authored": tools,
            "available": tools,
            "disabledFramework": [],
            "dynamic": [],
            "framework": [],
            "reserved": [],
        },
        "workflow": {"enabled": False, "toolName": "Workflow"},
        "workspace": {"resourceRoot": None, "rootEntries": []},
    }


_ROUTES = (
    ("POST", "/eve/v1/session"),
    ("POST", "/eve/v1/session/:sessionId"),
    ("GET", "/eve/v1/session/:sessionId/stream"),
)


def _agent(agent: Agent) -> JsonObject:
    # Roots are names here: callers must not see paths of the server.
    about: JsonObject = {
        "agentRoot": f"agents/{agent.name}",
        "appRoot": ".",
        "name": agent.name,
        "model": {"id": agent.model or DEMO},
    }
    if agent.description is not None:
        about["description"] = agent.description
    if agent.output_schema is not None:
        about["outputSchema"] = agent.output_schema
    return about


def _source(agent: Agent, what: str) -> JsonObject:
    return {"logicalPath": f"agents/{agent.name}/{what}", "sourceKind": "module"}


def _tool(agent: Agent, tool: Tool[..., Any]) -> JsonObject:
    return {
        **_source(agent, f"tools/{tool.name}"),
        "name": tool.name,
        "description": tool.description,
        "hasAuth": False,
        "hasExecute": True,
        "hasModelOutputProjection": False,
        "hasOutputSchema": False,
        "inputSchema": tool.schema,
        "origin": "authored",
        "replacesFrameworkTool": False,
        "requiresApproval": tool.approval != "never",
    }


def _subagent(agent: Agent, subagent: Agent) -> JsonObject:
    nothing = dict.fromkeys(("channels", "connections", "hooks", "schedules", "skills"), 0)
    return {
        **_source(agent, f"subagents/{subagent.name}"),
        "name": subagent.name,
        "description": subagent.description or "",
        "entryPath": f"agents/{subagent.name}",
        "nodeId": f"subagents/{subagent.name}",
        "rootPath": f"agents/{subagent.name}",
        "summary": {**nothing, "tools": len(subagent.own_tools), "instructions": bool(subagent.instructions)},
    }


def _instructions(agent: Agent) -> JsonObject:
    source = _source(agent, "instructions")
    if not isinstance(agent.instructions, str):
        # A function, or a prompt in sections: both are rendered before each model call.
        dynamic = {**source, "eventNames": ["turn.started"], "origin": "authored", "slug": "instructions"}
        return {"dynamic": [dynamic], "static": None}
    if not agent.instructions:
        return {"dynamic": [], "static": None}
    return {"dynamic": [], "static": {**source, "name": "instructions", "markdown": agent.instructions}}


def _channel(method: str, path: str) -> JsonObject:
    return {
        "logicalPath": "channels/eve",
        "sourceKind": "framework",
        "name": "eve",
        "method": method,
        "origin": "framework",
        "urlPath": path,
    }
