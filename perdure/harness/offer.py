"""What a step offers to the model: the agent's tools, and those that Perdure brings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic_ai.tools import ToolDefinition

from perdure.agents.agent import FINAL_OUTPUT, Agent
from perdure.protocol.deliveries import Mode
from perdure.protocol.wire import JsonObject

from .final_output import FinalOutput
from .questions import ASK_QUESTION, DEFINITION
from .toolbox import Usable, open_toolbox
from .turn_journal import TurnJournal


@dataclass(frozen=True)
class Offer:
    tools: Mapping[str, Usable]
    #: Whether the model may ask people with the built-in tool.
    asks: bool = False
    output: FinalOutput | None = None

    @property
    def definitions(self) -> Sequence[ToolDefinition]:
        own = [tool.definition for tool in self.tools.values()]
        return [*own, *([DEFINITION] if self.asks else ()), *([self.output.definition] if self.output else ())]

    @property
    def names(self) -> Sequence[str]:
        return [definition.name for definition in self.definitions]

    @property
    def hidden(self) -> frozenset[str]:
        """Tools whose calls are no actions to readers."""
        return frozenset({*((ASK_QUESTION,) if self.asks else ()), *((FINAL_OUTPUT,) if self.output else ())})


async def open_offer(agent: Agent, *, can_ask: bool, output: FinalOutput | None) -> Offer:
    tools = await open_toolbox(agent)
    return Offer(tools, asks=can_ask and agent.asks_questions and ASK_QUESTION not in tools, output=output)


def wanted_output(agent: Agent, mode: Mode, turn: TurnJournal) -> FinalOutput | None:
    """What this turn's result must look like: as the deliveries say, or else, in a task, as the agent does."""
    declared: JsonObject | None = agent.output_schema if mode == "task" else None
    schema = turn.output_schema if turn.output_schema is not None else declared
    return None if schema is None else FinalOutput(schema)
