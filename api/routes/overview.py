"""What a deployment serves, and how it is: its agents, its store, Temporal, workers, task queues, and its metrics."""

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate, Operators
from api.responses import NO_STORE, reply
from perdure.agents.agent import DEMO, Agent
from perdure.agents.registry import AgentRegistry
from perdure.agents.tool import Tool
from perdure.errors import Forbidden
from perdure.protocol.wire import JsonObject
from perdure.runtime.reports.health import Health
from perdure.settings import Settings

if TYPE_CHECKING:
    from perdure.telemetry.scrape import Scrape


class OverviewRoutes:
    def __init__(
        self, gate: Gate, operators: Operators, agents: AgentRegistry, health: Health, settings: Settings
    ) -> None:
        self._gate = gate
        self._operators = operators
        self._agents = agents
        self._health = health
        self._settings = settings

    async def agents(self, request: Request) -> Response:
        """The agents that callers may start, the default one first."""
        await self._gate.admit(request)
        served = [agent for agent in self._agents if self._agents.is_public(agent.name)]
        return reply({"agents": [_agent(agent) for agent in served]})

    async def health(self, request: Request) -> Response:
        """How the parts of the deployment are; who works there is for operators."""
        principal = await self._gate.admit(request)
        found = await self._health.look()
        store = {"kind": "sqlite" if self._settings.database.startswith("sqlite") else "postgres"}
        shown: JsonObject = {**found, "store": {**store, **found["store"]}}
        if self._settings.build_id is not None:
            shown["build"] = self._settings.build_id
        if not self._operators.trust(principal):
            return reply(_without_workers(shown))
        temporal = {"address": self._settings.temporal_address, "ui": self._settings.temporal_ui_url}
        return reply({**shown, "temporal": {**shown["temporal"], **temporal}})


class MetricsRoutes:
    def __init__(self, gate: Gate, operators: Operators, scrape: "Scrape") -> None:
        self._gate = gate
        self._operators = operators
        self._scrape = scrape

    async def show(self, request: Request) -> Response:
        """What this process has measured, for Prometheus: to operators, and on a development machine."""
        principal = await self._gate.admit(request)
        if not self._operators.trust(principal):
            raise Forbidden("This is for operators.")
        body = await asyncio.to_thread(self._scrape.text)
        return Response(body, headers={**NO_STORE, "content-type": self._scrape.content_type})


def _without_workers(shown: JsonObject) -> JsonObject:
    """How many workers poll each queue, and not which."""
    queues: list[JsonObject] = shown["queues"]
    counted = [{**queue, "pollers": len(queue["pollers"])} for queue in queues]
    return {**{name: value for name, value in shown.items() if name != "workers"}, "queues": counted}


def _agent(agent: Agent) -> JsonObject:
    about: JsonObject = {
        "name": agent.name,
        "model": agent.model or DEMO,
        "turns": agent.turns or "child",
        "tools": [_tool(tool) for tool in agent.own_tools],
        "subagents": [each.name for each in agent.subagents],
    }
    if agent.description is not None:
        about["description"] = agent.description
    return about


def _tool(tool: Tool[..., Any]) -> JsonObject:
    about: JsonObject = {
        "name": tool.name,
        "description": tool.description,
        "effects": tool.effects,
        "approval": tool.approval != "never",
        "inputSchema": tool.schema,
    }
    return about if tool.pool is None else {**about, "pool": tool.pool}
