import asyncio
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr
from pydantic_ai import Agent as ForeignAgent
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.tools import Tool as ForeignTool
from pydantic_ai.toolsets import CombinedToolset, FunctionToolset

from perdure import Agent, InvalidDeclaration, ToolContext, tool
from perdure.harness.events import CallNames
from perdure.harness.tools.records import summary
from perdure.harness.tools.toolbox import check_tools, open_toolbox
from perdure.protocol.requests import Coordinates
from perdure.testing import ScriptedModel, call, play
from tests.support.lab import lab


def foreign(ctx: RunContext[ToolContext], n: int) -> str:
    """Say which call this is."""
    return f"{ctx.deps.session.id} {ctx.tool_call_id} {n + 1}"


async def test_pydantic_ais_tools_and_toolsets_work_and_see_our_context() -> None:
    toolset = FunctionToolset([ForeignTool(foreign, name="in_set")])
    agent = Agent("mixed", tools=[ForeignTool(foreign, name="alone"), toolset])
    model = ScriptedModel([[call("alone", n=1), call("in_set", n=2)], "ok"])

    played = await play(agent, "Go", model=model, can_ask=False)

    assert [each.output for each in played.tool_calls] == ["session call_0_0 2", "session call_0_1 3"]
    assert [each.description for each in model.prompts[0].tools] == ["Say which call this is."] * 2


async def test_foreign_tools_run_at_most_once_and_declare_when_they_need_approval() -> None:
    gated = ForeignTool(foreign, name="gated", requires_approval=True)

    box = await open_toolbox(Agent("mixed", tools=[gated]))

    assert (box["gated"].effects, box["gated"].approval_policy.approval) == ("at_most_once", "always")


async def test_their_arguments_are_checked_too() -> None:
    model = ScriptedModel([call("foreign", n="x"), "ok"])

    await play(Agent("mixed", tools=[ForeignTool(foreign)]), "Go", model=model)

    (result,) = model.prompts[1].messages[-1].parts
    assert str(result.content).startswith("Invalid arguments for foreign: n: Input should be a valid integer")  # type: ignore


async def test_a_name_may_not_come_twice_across_both_kinds() -> None:
    @tool(name="foreign")
    def own() -> None: ...

    for tools in ([own, ForeignTool(foreign)], [ForeignTool(foreign), ForeignTool(foreign)]):
        with pytest.raises(InvalidDeclaration, match="more than one tool named foreign"):
            Agent("mixed", tools=tools)


async def test_the_name_of_a_tool_that_prepares_itself_is_known_when_it_has() -> None:
    async def renamed(ctx: RunContext[Any], definition: ToolDefinition) -> ToolDefinition:
        return replace(definition, name="other")

    box = await open_toolbox(Agent("mixed", tools=[ForeignTool(foreign), ForeignTool(foreign, prepare=renamed)]))

    assert list(box) == ["foreign", "other"]


def test_the_name_of_the_structured_result_is_taken_for_them_too() -> None:
    with pytest.raises(InvalidDeclaration, match="'final_output' is taken by the structured result"):
        Agent("mixed", tools=[ForeignTool(foreign, name="final_output")])


def test_what_else_pydantic_ai_has_is_no_tool() -> None:
    with pytest.raises(InvalidDeclaration, match=r"is not a tool\. Give it a function, .* or toolset of pydantic-ai"):
        Agent("mixed", tools=[ForeignAgent("test")])


@pytest.mark.parametrize(
    ("toolset", "complaint"),
    [
        (FunctionToolset([ForeignTool(foreign, name="own")]), "more than one tool named own"),
        (FunctionToolset([ForeignTool(foreign, name="final_output")]), "taken by the structured result"),
        (FunctionToolset([ForeignTool(foreign, timeout=float("inf"))]), "the timeout is a number of seconds"),
        (CombinedToolset([FunctionToolset([foreign]), FunctionToolset([foreign])]), "Agent 'mixed': .*'foreign'"),
    ],
)
async def test_what_a_toolset_has_is_checked_before_a_request_is_served(toolset: Any, complaint: str) -> None:
    @tool
    def own() -> None: ...

    with pytest.raises(InvalidDeclaration, match=complaint):
        await check_tools([Agent("mixed", tools=[own, toolset])])


async def test_an_unreachable_toolset_is_logged_and_delays_no_other_agent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Away(FunctionToolset[Any]):
        async def get_tools(self, ctx: RunContext[Any]) -> Any:
            raise ConnectionError("a secret")

    await check_tools([Agent("mixed", tools=[Away()]), Agent("other")])

    assert caplog.messages == ["Agent 'mixed': its tools cannot be listed now (ConnectionError)."]


async def test_their_time_limits_are_such_as_can_be_kept() -> None:
    endless = ForeignTool(foreign, timeout=float("inf"))

    with pytest.raises(InvalidDeclaration, match="Tool 'foreign': the timeout is a number of seconds"):
        await open_toolbox(Agent("mixed", tools=[endless]))


def test_a_summary_is_short_and_keeps_secrets() -> None:
    shown = summary("send", {"to": "a" * 100, "api_key": "hunter2", "Password": 1, "body": {"token": "hunter2"}})

    assert "hunter2" not in shown
    assert shown.startswith('send(to="aaa')
    assert shown.endswith("…, api_key=•••, Password=•••, body={1})")


@tool
def unlock(door: str, pin: SecretStr, old_pin: SecretStr | None = None) -> str:
    """Unlock."""
    return door


async def test_what_is_declared_as_a_secret_is_not_in_the_summary_of_a_call() -> None:
    async with lab([call("unlock", door="north", pin="4711", old_pin="0815"), "Done."], unlock) as it:
        (ref,) = await it.calls(await it.deliver("Go"))

    assert ref.summary == 'unlock(door="north", pin=•••, old_pin=•••)'


def test_calls_of_one_reply_never_share_an_id() -> None:
    names = CallNames(Coordinates(session_id="s", turn=1, step=0), frozenset({"a"}), ())
    parts = [ToolCallPart("act", "{}", tool_call_id=given) for given in ("a_1_0_2", "a", "a")]

    applied = names.applied(ModelResponse(parts=parts))

    assert len({each.tool_call_id for each in applied.tool_calls}) == 3


def _where() -> Iterator[bool]:
    """Whether the event loop does the work."""
    return (threading.current_thread() is threading.main_thread() for _ in range(3))


@tool
def lazy() -> Iterator[bool]:
    """Return before the work is done."""
    return _where()


@tool
async def lazy_and_async() -> Iterator[bool]:
    """Return before the work is done."""
    return _where()


@tool
def lazy_inside() -> dict[str, Any]:
    """Return before the work is done."""
    return {"rows": [_where()]}


@tool
async def lazy_inside_and_async() -> dict[str, Any]:
    """Return before the work is done."""
    return {"rows": [_where()]}


@pytest.mark.parametrize("declared", [lazy_inside, lazy_inside_and_async])
async def test_what_is_lazy_in_a_result_is_made_outside_of_the_event_loop(declared: Any) -> None:
    async with lab([call(declared.name), "Done."], declared) as it:
        await it.run_one()

        (result,) = await it.emitted("action.result")
        assert result["result"]["output"] == {"rows": [[False, False, False]]}


@pytest.mark.parametrize("declared", [lazy, lazy_and_async])
async def test_a_lazy_result_is_made_outside_of_the_event_loop(declared: Any) -> None:
    async with lab([call(declared.name), "Done."], declared) as it:
        await it.run_one()

        (result,) = await it.emitted("action.result")
        assert result["result"]["output"] == [False, False, False]


@tool
def library() -> str:
    """Return far more than is kept."""
    return "é" * 40_000_000


@tool
def table() -> list[dict[str, int]]:
    """Return far more than is kept."""
    return [{"row": number} for number in range(600_000)]


@pytest.mark.alone
@pytest.mark.parametrize("declared", [library, table])
async def test_a_result_that_is_cut_delays_no_other_task(declared: Any) -> None:
    loop, pauses = asyncio.get_running_loop(), [0.0]

    async def watch() -> None:
        while True:
            began = loop.time()
            await asyncio.sleep(0.01)
            pauses.append(loop.time() - began)

    async with lab([call(declared.name), "Done."], declared) as it:
        watching = asyncio.create_task(watch())
        assert (await it.run_one()).status == "completed"
        watching.cancel()

        (result,) = await it.emitted("action.result")
        assert "[output cut: 655" in result["result"]["output"]
    assert max(pauses) < 1


@tool
def endless() -> Iterator[int]:
    """Count."""
    return itertools.count()


@tool
def endless_inside() -> dict[str, Iterator[int]]:
    """Count."""
    return {"numbers": itertools.count()}


@pytest.mark.parametrize("declared", [endless, endless_inside])
async def test_a_result_without_end_is_refused(declared: Any) -> None:
    async with lab([call(declared.name), "Done."], declared) as it:
        assert (await it.run_one()).status == "failed"

        (result,) = await it.emitted("action.result")
        assert "more than 100000 values" in result["error"]["message"]
