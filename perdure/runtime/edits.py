"""Validation of the arguments that an approval changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from perdure.agents.signature import problems
from perdure.errors import Invalid
from perdure.protocol.inputs import InputRequest
from perdure.protocol.wire import JsonObject

if TYPE_CHECKING:
    from perdure.agents.agent import Agent
    from perdure.agents.registry import AgentRegistry


async def read_edit(agents: AgentRegistry | None, request: InputRequest, arguments: JsonObject) -> JsonObject:
    """The arguments as the tool will get them; `Invalid` with the reason when it does not accept them."""
    agent = agents.get(request.agent) if agents else None
    if agent is None:
        raise Invalid(f"The arguments of {request.tool} cannot be checked here, so they cannot be changed here.")
    own = next((tool for tool in agent.own_tools if tool.name == request.tool), None)
    if own is None:
        return await _read_foreign(agent, request.tool, arguments)
    try:
        return own.signature.read(arguments).json
    except ValidationError as invalid:
        raise Invalid(f"Invalid arguments for {request.tool}: {problems(invalid)}") from None


async def _read_foreign(agent: Agent, tool: str, arguments: JsonObject) -> JsonObject:
    # Imported here because it imports pydantic-ai, which a process that only accepts answers rarely needs.
    from perdure.harness.tools.toolbox import InvalidArguments, open_toolbox

    usable = (await open_toolbox(agent)).get(tool)
    if usable is None:
        raise Invalid(f"There is no tool {tool} any more, so its arguments cannot be changed.")
    try:
        return usable.read(arguments).json
    except InvalidArguments as invalid:
        raise Invalid(str(invalid)) from None
