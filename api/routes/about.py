"""Health, and the description of an agent."""

from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.path import Scopes
from api.responses import reply
from api.views import describe
from perdure.protocol.names import SESSION_WORKFLOW


class AboutRoutes:
    def __init__(self, gate: Gate, scopes: Scopes, *, development: bool) -> None:
        self._gate = gate
        self._scopes = scopes
        self._development = development

    async def health(self, request: Request) -> Response:
        """Whether this process responds; needs no credentials."""
        self._scopes.agent(request)
        return reply({"ok": True, "status": "ready", "workflowId": SESSION_WORKFLOW})

    async def info(self, request: Request) -> Response:
        """The agent: its model, instructions and tools."""
        agent = self._scopes.agent(request)
        await self._gate.admit(request)
        return reply(describe(agent, development=self._development))
