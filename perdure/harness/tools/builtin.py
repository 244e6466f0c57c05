"""The built-in tools `ask_question` and `final_output`, and the offer of all tools in one step."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.tools import ToolDefinition

from perdure.agents import output_schema
from perdure.agents.agent import FINAL_OUTPUT, Agent
from perdure.harness.journal import TurnJournal
from perdure.protocol.deliveries import Mode
from perdure.protocol.inputs import InputAnswer, Option
from perdure.protocol.requests import Failure
from perdure.protocol.wire import JsonObject

from .records import Outcome, Result
from .toolbox import InvalidArguments, OwnTool, Usable, invalid_arguments, open_toolbox

if TYPE_CHECKING:
    from .child_tool import ChildTool

ASK_QUESTION = "ask_question"
#: The tool with which a model runs programs.
CODE_MODE = "code_mode"


class _Choice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1)
    label: str = Field(min_length=1)


class Question(BaseModel):
    """The arguments of `ask_question`."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)

    prompt: str = Field(min_length=1, description="The question, as the user will read it.")
    options: list[str | _Choice] = Field(default=[], description="Answers to choose from; none: the answer is text.")
    allow_freeform: bool = Field(default=False, description="Whether an answer beside the options may be written.")

    @property
    def shown(self) -> JsonObject:
        choices = [_Choice(id=each, label=each) if isinstance(each, str) else each for each in self.options]
        return {
            "prompt": self.prompt,
            "display": "select" if choices else "text",
            "allow_freeform": self.allow_freeform or not choices,
            "options": tuple(Option(id=each.id, label=each.label) for each in choices),
        }


DEFINITION = ToolDefinition(
    name=ASK_QUESTION,
    description="Ask the user a question, and wait for the answer before you go on.",
    parameters_json_schema=Question.model_json_schema(by_alias=True),
)


def read_question(arguments: JsonObject) -> Question:
    try:
        question = Question.model_validate(arguments)
    except ValidationError as invalid:
        raise invalid_arguments(ASK_QUESTION, invalid) from None
    ids = [option.id for option in question.shown["options"]]
    if len(ids) != len(set(ids)) or "" in ids:
        raise InvalidArguments(f"Invalid arguments for {ASK_QUESTION}: options: each needs an id of its own")
    return question


def answered(answer: InputAnswer) -> Outcome:
    output: dict[str, Any] = {"optionId": answer.option_id, "text": answer.text, "status": "answered"}
    return Outcome(status="completed", output={key: value for key, value in output.items() if value is not None})


def ignored() -> Outcome:
    return Outcome(status="completed", output={"status": "ignored"})


class ProgramTool:
    """The tool that runs a program. Its description has the functions that the program can call."""

    #: Seconds for one stage, with the wait for a place.
    timeout = 120.0
    retries = 0
    #: Every worker runs programs.
    pool: str | None = None

    def __init__(self, functions: Mapping[str, ToolDefinition]) -> None:
        self._functions = functions

    @property
    def definition(self) -> ToolDefinition:
        from perdure.harness.programs.stubs import stubs

        return ToolDefinition(
            name=CODE_MODE,
            description=_PROGRAM + stubs(self._functions),
            parameters_json_schema=_Program.model_json_schema(),
        )

    def check(self, arguments: JsonObject) -> None:
        """Raise `InvalidArguments` if these are no arguments."""
        try:
            _Program.model_validate(arguments)
        except ValidationError as invalid:
            raise invalid_arguments(CODE_MODE, invalid) from None


class _Program(BaseModel):
    """The arguments of `code_mode`."""

    model_config = ConfigDict(extra="forbid", title="")

    code: str = Field(min_length=1, max_length=100_000, description="The program, in Python.")


_PROGRAM = """Run a Python program. The value of its last expression is the result.
Its functions are these tools. Each call must be awaited; await asyncio.gather(…) makes several at once.
A call that fails raises RuntimeError, and one that is denied PermissionError.
It has a part of Python and of its standard library, and no access to files, the network or the clock.

"""


#: Results that the model may try in a turn, and in one reply.
TRIES = 3

NOT_FULFILLED = Failure(
    code="OUTPUT_SCHEMA_NOT_FULFILLED",
    message="The agent could not produce a result matching the requested schema.",
)
TOO_EARLY = (
    "This result was not accepted: other calls of the same step wait for people. "
    "Call final_output again once you have their results."
)
NOT_COMPARED = (
    f"This result was not looked at: of one reply, at most {TRIES} results are compared with the schema. "
    "Hand over one result."
)

_INVALID = "OUTPUT_SCHEMA_INVALID"

#: Seconds for one validation on a busy machine. The process limits its own CPU time and memory.
_TIMEOUT = 30.0
#: Concurrent validations in one worker.
_MAX_CONCURRENT = max(1, (os.cpu_count() or 2) // 2)
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class SchemaFailed(Exception):
    """The schema cannot be used to validate results; another try would not change that."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.failure = Failure(code=_INVALID, message=f"The output schema cannot be used: {problem}.")


class FinalOutput:
    """The tool for a structured result. Providers accept only objects: other values are wrapped as `{value: …}`."""

    def __init__(self, schema: JsonObject) -> None:
        self._schema = schema
        self._wrapped = schema.get("type") != "object"

    @property
    def problem(self) -> Failure | None:
        """The failure if the schema itself is invalid."""
        found = output_schema.problem(self._schema)
        return SchemaFailed(found).failure if found else None

    @property
    def definition(self) -> ToolDefinition:
        return ToolDefinition(
            name=FINAL_OUTPUT,
            description="Hand over the final result. Call this, and nothing else, once you have it.",
            parameters_json_schema=self._parameters,
        )

    async def read(self, arguments: JsonObject) -> Result:
        """The validated result; raises `InvalidArguments` with the problems if it does not fit the schema."""
        if self._wrapped and "value" not in arguments:
            raise InvalidArguments(f"Invalid arguments for {FINAL_OUTPUT}: value: is missing")
        value = arguments["value"] if self._wrapped else arguments
        if errors := await _errors(self._schema, value):
            raise InvalidArguments(f"Invalid arguments for {FINAL_OUTPUT}: {'; '.join(errors)}")
        return Result(value=value)

    @property
    def _parameters(self) -> JsonObject:
        if not self._wrapped:
            return self._schema
        inner = {key: value for key, value in self._schema.items() if key not in ("$defs", "definitions", "$schema")}
        # References are relative to the root, so the definitions stay there.
        shared = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
        return {"type": "object", "properties": {"value": inner}, "required": ["value"], **shared}


async def _errors(schema: JsonObject, value: Any) -> list[str]:
    """The problems of the value. A process of its own validates it, because only that limits time and memory."""
    lines = await _run_comparison(json.dumps([schema, value]).encode())
    answers: list[Any] = [json.loads(line) for line in lines.splitlines(keepends=True) if line.endswith(b"\n")]
    match answers:
        case [{"fits": True}]:
            return []
        case [{"fits": False}, errors]:
            return errors
        case [{"fits": False}]:
            return ["$: does not fit the schema"]
        case [{"broken": str(problem)}]:
            raise SchemaFailed(problem)
        case _:
            raise SchemaFailed("a result could not be compared with it within the bounds of time and memory")


async def _run_comparison(request: bytes) -> bytes:
    """The output of the process until it ends or is killed."""
    semaphore = _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MAX_CONCURRENT))
    async with semaphore:
        try:
            process = await asyncio.create_subprocess_exec(
                # -P: modules in Perdure's directory must not hide those of the standard library.
                *(sys.executable, "-P", output_schema.__file__),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                # In a session of its own, so that Ctrl-C does not kill it: that would look like a failed validation.
                start_new_session=True,
            )
        except OSError:
            return b""
        try:
            async with asyncio.timeout(_TIMEOUT):
                return (await process.communicate(request))[0]
        except TimeoutError:
            return b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def without_final(response: ModelResponse) -> ModelResponse:
    """The reply without its calls of `final_output`."""
    parts = [part for part in response.parts if not (isinstance(part, ToolCallPart) and part.tool_name == FINAL_OUTPUT)]
    return replace(response, parts=parts)


def with_result_as_text(response: ModelResponse, result: Result) -> ModelResponse:
    """The reply as the history keeps it: the result becomes text, because later turns may not have the tool."""
    text = TextPart(json.dumps(result.value, ensure_ascii=False))
    # OpenAI rejects a reasoning item without the item that followed it, and the reverse: all later requests of the
    # session would fail. A part without an id belongs to no reasoning item.
    kept = [
        replace(part, id=None) if isinstance(part, TextPart) else part
        for part in without_final(response).parts
        if not isinstance(part, ThinkingPart)
    ]
    return replace(response, parts=[*kept, text], finish_reason="stop")


@dataclass(frozen=True)
class Offer:
    tools: Mapping[str, Usable]
    #: Tools that hand work to other agents.
    children: "Mapping[str, ChildTool]" = field(default_factory=dict[str, "ChildTool"])
    #: Whether the model may ask people with the built-in tool.
    asks: bool = False
    output: FinalOutput | None = None
    #: In code mode it stands for all tools and children: the model gets no other way to call them.
    program: "ProgramTool | None" = None

    @property
    def definitions(self) -> Sequence[ToolDefinition]:
        own = [tool.definition for tool in (*self.tools.values(), *self.children.values())]
        own += [self.program.definition] if self.program else []
        return [*own, *([DEFINITION] if self.asks else ()), *([self.output.definition] if self.output else ())]

    @property
    def names(self) -> Sequence[str]:
        return [definition.name for definition in self.definitions]

    @property
    def hidden(self) -> frozenset[str]:
        """Tools whose calls readers do not see as actions."""
        asks, output = (ASK_QUESTION,) if self.asks else (), (FINAL_OUTPUT,) if self.output else ()
        return frozenset({*asks, *output, *((CODE_MODE,) if self.program else ())})


async def open_offer(agent: Agent, *, can_ask: bool, output: FinalOutput | None) -> Offer:
    tools, children = await open_toolbox(agent), _children(agent)
    asks = can_ask and agent.asks_questions and ASK_QUESTION not in {*tools, *children}
    if agent.code_mode:
        return Offer({}, asks=asks, output=output, program=ProgramTool(await functions_of(agent)))
    return Offer(tools, children, asks=asks, output=output)


def tools_expected(agent: Agent, *, can_ask: bool) -> Sequence[ToolDefinition]:
    """A stand-in for the tools of an offer: empty if there will be none. Toolsets are not asked for theirs."""
    has_some = agent.tools or agent.children or agent.code_mode or (can_ask and agent.asks_questions)
    return [ToolDefinition(name="expected")] if has_some else []


async def open_functions(agent: Agent) -> Offer:
    """What the programs of an agent can call."""
    return Offer(await open_toolbox(agent), _children(agent))


async def functions_of(agent: Agent) -> Mapping[str, ToolDefinition]:
    """What the programs of an agent can call, by the name that it has there."""
    from perdure.harness.programs.stubs import python_names

    offer = await open_functions(agent)
    definitions = {each.name: each for each in offer.definitions}
    for name, tool in offer.tools.items():
        if isinstance(tool, OwnTool):
            definitions[name] = replace(tool.definition, return_schema=tool.returns)
    return {name: definitions[tool] for name, tool in python_names(agent.name, list(definitions)).items()}


def _children(agent: Agent) -> "Mapping[str, ChildTool]":
    if not agent.children:
        return {}
    from .child_tool import ChildTool

    return {name: ChildTool(name, child, is_copy=child is agent) for name, child in agent.children}


def required_output(agent: Agent, mode: Mode, turn: TurnJournal) -> FinalOutput | None:
    """The result that the turn requires: by its deliveries' schema or, in a task, by the agent's."""
    declared: JsonObject | None = agent.output_schema if mode == "task" else None
    schema = turn.output_schema if turn.output_schema is not None else declared
    return None if schema is None else FinalOutput(schema)
