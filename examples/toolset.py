"""An agent whose tools were written for pydantic-ai: they work as they are, and see Perdure's context as `ctx.deps`.

PERDURE_AGENTS=examples.toolset:agent make dev
"""

from pydantic_ai import RunContext
from pydantic_ai.toolsets import FunctionToolset

from perdure import Agent, ToolContext

geometry = FunctionToolset[ToolContext]()


@geometry.tool
def area(ctx: RunContext[ToolContext], width: float, height: float) -> float:
    """The area of a rectangle."""
    ctx.deps.log.info("asked for an area")
    return width * height


agent = Agent(name="geometer", instructions="Answer with the tools you have.", tools=[geometry])
