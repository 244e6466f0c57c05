"""The tool that hands work to an agent: what the model sees of it, and which calls are refused."""

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_ai.tools import ToolDefinition

from perdure.agents import output_schema
from perdure.agents.agent import Agent, Limits
from perdure.agents.remote import RemoteAgent
from perdure.protocol.wire import JsonObject

from . import outcomes
from .records import ChildCall, Outcome, RequestedCall
from .toolbox import InvalidArguments, invalid_arguments

LIMIT = "SUBAGENT_LIMIT_REACHED"

_COPY = "Hand a task to a copy of yourself that knows nothing of this conversation, and get its result."


class Task(BaseModel):
    """The arguments of a tool that hands work to an agent."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)

    message: str = Field(min_length=1, description="The task, with all that is needed to do it.")
    output_schema: JsonObject | None = Field(default=None, description="A JSON schema that the result must fit.")


class ChildTool:
    """The tool that hands work to an agent."""

    def __init__(self, name: str, agent: Agent | RemoteAgent, *, is_copy: bool) -> None:
        self._name = name
        self._agent = agent
        self._is_copy = is_copy

    @property
    def _description(self) -> str:
        return _COPY if self._is_copy else self._agent.description or f"Hand a task to the agent {self._name}."

    @property
    def definition(self) -> ToolDefinition:
        return ToolDefinition(
            name=self._name,
            description=self._description,
            parameters_json_schema=Task.model_json_schema(by_alias=True),
        )

    def read(
        self, requested: RequestedCall, depth: int, limits: Limits, left: int
    ) -> tuple[RequestedCall, Outcome | None]:
        """The call, or the outcome of a refused one; `left`: how many calls of this step may still go to agents."""
        try:
            task = Task.model_validate(requested.input)
        except ValidationError as invalid:
            raise invalid_arguments(self._name, invalid) from None
        if task.output_schema is not None and (problem := output_schema.problem(task.output_schema)):
            raise InvalidArguments(f"Invalid arguments for {self._name}: outputSchema: {problem}")
        if depth >= limits.subagent_depth:
            message = f"This task was not begun: agents may hand work on {limits.subagent_depth} times only. Do it."
            return requested, outcomes.failed(message, LIMIT)
        if left <= 0:
            most = limits.subagents_per_step
            message = f"This task was not begun: one step may hand on {most} tasks. Hand it on in a later step."
            return requested, outcomes.failed(message, LIMIT)
        child = ChildCall(
            agent=self._agent.name,
            node_id="__root__" if self._is_copy else f"subagents/{self._name}",
            description=self._description,
            depth=depth + 1,
            remote_url=self._agent.url if isinstance(self._agent, RemoteAgent) else None,
        )
        return requested.model_copy(update={"child": child}), None
