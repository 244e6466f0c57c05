"""The declaration of an agent."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from perdure.errors import InvalidDeclaration
from perdure.protocol.deliveries import OVERFLOWS, QUEUE_MODES, Overflow, QueueMode
from perdure.protocol.inputs import Responders
from perdure.protocol.wire import JsonObject

from .approval import takes
from .context import SessionView
from .output_schema import problem
from .tool import Tool, tool

if TYPE_CHECKING:
    from .progress.checkpoints import CheckpointTrigger
    from .progress.plan import Planning
    from .progress.prompt import Prompt
    from .remote import RemoteAgent

Instructions: TypeAlias = "str | Prompt | Callable[[SessionView], str | Awaitable[str]]"

#: What a plain message does while a request is open: it waits for the answer, or it denies the request.
WhileWaiting: TypeAlias = Literal["queue", "deny"]

#: How turns run: each as a child workflow, or in the workflow of their session.
Turns: TypeAlias = Literal["child", "inline"]

#: What an unreadable history does: it waits for a worker that can read it, or it is left out.
OnUnreadable: TypeAlias = Literal["wait", "fresh"]

#: What happens to a reply whose worker dies, or whose stream breaks, after readers have seen a part of it: the part is
#: retracted and the model is asked again, or the model goes on from it.
OnInterruptedReply: TypeAlias = Literal["retract", "continue"]

#: The name of the built-in model that needs no key; the default for agents without a model.
DEMO = "demo"

#: The tool with which the model gives a structured result; an agent cannot declare a tool of this name.
FINAL_OUTPUT = "final_output"

#: The tool with which an agent that has subagents hands work to a copy of itself.
SELF_COPY = "agent"

#: The context window of a model of which it is not known.
DEFAULT_WINDOW = 100_000

#: The number of calls that one worker runs at the same time. Temporal allows four times as many open in one turn.
_MOST_PARALLEL = 500

#: A hundred years, in seconds: more would not fit into dates.
LONGEST_TIME = 3_155_760_000

NAME = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?")


@dataclass(frozen=True)
class Limits:
    """The limits of a session. The token limits count the whole session; None means no limit."""

    steps_per_turn: int = 50
    #: Calls that one reply of the model may make; each further one gets an error instead.
    calls_per_step: int = 128
    #: How many calls of a step run at the same time.
    parallel_calls: int = 16
    #: How many calls one program of the model may make.
    calls_per_program: int = 100
    #: How deep sessions may start one another: 3 allows children, their children, and those of these.
    subagent_depth: int = 3
    #: How many calls of one step may go to subagents; each further one gets an error instead.
    subagents_per_step: int = 32
    input_tokens: int | None = None
    output_tokens: int | None = None
    #: Seconds from the beginning of a turn until it fails, whatever it does then. Each answer of people begins a turn.
    turn_seconds: float | None = None
    #: Seconds from the creation of a session until it ends, and seconds without a turn or a delivery until it ends.
    session_seconds: float | None = None
    idle_seconds: float | None = None
    #: Attempts at a call whose worker dies or cannot work. None: only the deadline of the turn ends them.
    max_attempts: int | None = 10
    #: A turn fails when so many workers have died, frozen or lost their connection in one of its steps.
    max_deaths: int | None = 3
    #: A turn fails when the model has made the same call with the same result in so many steps in a row.
    repeated_calls: int | None = 5
    #: Budgets: tokens in all, and US dollars. At the limit the session asks, in a conversation, whether to extend it.
    turn_tokens: int | None = None
    turn_cost: float | None = None
    session_tokens: int | None = None
    session_cost: float | None = None
    #: Who may extend a budget; None: the turn fails without a question.
    extended_by: Responders | None = field(default_factory=Responders)
    #: Whether there is a budget.
    has_budget: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        for name, limit in (
            ("steps_per_turn", self.steps_per_turn),
            ("calls_per_step", self.calls_per_step),
            ("calls_per_program", self.calls_per_program),
            ("subagent_depth", self.subagent_depth),
            ("subagents_per_step", self.subagents_per_step),
        ):
            if not _is_count(limit):
                raise InvalidDeclaration(f"{name} must be a whole number, at least 1; not {limit!r}.")
        if not (_is_count(self.parallel_calls) and self.parallel_calls <= _MOST_PARALLEL):
            raise InvalidDeclaration(f"parallel_calls must be a whole number from 1 to {_MOST_PARALLEL}.")
        for name, limit in (
            ("input_tokens", self.input_tokens),
            ("output_tokens", self.output_tokens),
            ("repeated_calls", self.repeated_calls),
            ("max_deaths", self.max_deaths),
            ("turn_tokens", self.turn_tokens),
            ("session_tokens", self.session_tokens),
        ):
            if limit is not None and not _is_count(limit):
                raise InvalidDeclaration(f"{name} must be a whole number, at least 1, or None; not {limit!r}.")
        self._check_times_and_costs()
        budgets = (self.turn_tokens, self.turn_cost, self.session_tokens, self.session_cost)
        object.__setattr__(self, "has_budget", any(each is not None for each in budgets))

    def _check_times_and_costs(self) -> None:
        for name, limit in (
            ("turn_seconds", self.turn_seconds),
            ("session_seconds", self.session_seconds),
            ("idle_seconds", self.idle_seconds),
        ):
            if limit is not None and not _is_time(limit):
                raise InvalidDeclaration(f"{name} must be a number of seconds above 0, or None; not {limit!r}.")
        for name, limit in (("turn_cost", self.turn_cost), ("session_cost", self.session_cost)):
            if limit is not None and not _is_time(limit):
                raise InvalidDeclaration(f"{name} must be a number of US dollars above 0, or None; not {limit!r}.")
        if self.max_attempts is None:
            if self.turn_seconds is None:
                raise InvalidDeclaration("max_attempts=None needs turn_seconds: something must end the attempts.")
        elif not _is_count(self.max_attempts):
            raise InvalidDeclaration(
                f"max_attempts must be a whole number, at least 1, or None; not {self.max_attempts!r}."
            )


_LANE = re.compile(r"[a-z0-9_-]{1,32}")


@dataclass(frozen=True)
class Lane:
    """The defaults of what callers deliver to one lane of a session."""

    #: What a message does that arrives while the session is busy, unless it says so itself.
    mode: QueueMode = "followup"
    #: How many deliveries may wait; None: `PERDURE_MAX_INBOX`, and never more than that.
    cap: int | None = None
    #: What happens to a message for which there is no room.
    overflow: Overflow = "reject"

    def __post_init__(self) -> None:
        if self.mode not in QUEUE_MODES:
            raise InvalidDeclaration(f"A lane's mode is one of {', '.join(QUEUE_MODES)}; not {self.mode!r}.")
        if self.overflow not in OVERFLOWS:
            raise InvalidDeclaration(f"A lane's overflow is one of {', '.join(OVERFLOWS)}; not {self.overflow!r}.")
        cap = cast("object", self.cap)
        if cap is not None and (not isinstance(cap, int) or isinstance(cap, bool) or cap < 1):
            raise InvalidDeclaration(f"A lane's cap is a whole number, at least 1; not {cap!r}.")

    def room(self, most: int) -> int:
        """How many deliveries may wait where `most` may in any case."""
        return most if self.cap is None else min(most, self.cap)


@dataclass(frozen=True)
class Durability:
    """How far a turn is carried through deaths of workers and failures: what comes first ends it.

    These are `max_attempts` and `turn_seconds` of `Limits` in one place, and with bounds by default.
    """

    #: Attempts at a call whose worker dies or cannot work. None: only the time-out ends them.
    max_attempts: int | None = 10
    #: From the beginning of a turn, which is when it reads its deliveries; absolute. None: no time-out.
    timeout: timedelta | None = timedelta(hours=1)

    def __post_init__(self) -> None:
        if not (self.timeout is None or _is_span(self.timeout)):
            raise InvalidDeclaration(f"timeout must be a timedelta, or None; not {self.timeout!r}.")

    def applied(self, limits: Limits) -> Limits:
        """These limits with both bounds; `InvalidDeclaration` if they say something else themselves."""
        seconds = None if self.timeout is None else self.timeout.total_seconds()
        for name, own, mine, default in (
            ("max_attempts", limits.max_attempts, self.max_attempts, Limits.max_attempts),
            ("turn_seconds", limits.turn_seconds, seconds, Limits.turn_seconds),
        ):
            if own not in (default, mine):
                raise InvalidDeclaration(f"{name} of `limits` is {own!r}, and `durability` says {mine!r}: say it once.")
        return replace(limits, max_attempts=self.max_attempts, turn_seconds=seconds)


@dataclass(frozen=True)
class Price:
    """What a model costs, in US dollars for a million tokens. Without their own price cached tokens are input."""

    input: float
    output: float
    cache_read: float | None = None
    cache_write: float | None = None

    def __post_init__(self) -> None:
        for name, price in vars(self).items():
            if price is not None and not (isinstance(price, int | float) and 0 <= price < 1_000_000):
                raise InvalidDeclaration(f"The price {name} must be a number of US dollars; not {price!r}.")


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _is_time(seconds: object) -> bool:
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= LONGEST_TIME


def _is_span(value: object) -> bool:
    return isinstance(value, timedelta)


def _is_share(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number <= 1


@dataclass(frozen=True)
class Compaction:
    """When older history is summarised, and by which model. Nothing is deleted: only later prompts are shorter."""

    #: The tokens that the model accepts; None: what is known of the model, or 100,000.
    context_window: int | None = None
    #: The share of the context window from which on a request is too large.
    threshold: float = 0.9
    #: The model that writes summaries; None: the agent's model.
    model: str | None = None

    def __post_init__(self) -> None:
        if self.context_window is not None and not _is_count(self.context_window):
            raise InvalidDeclaration(
                f"context_window must be a whole number, at least 1, or None; not {self.context_window!r}."
            )
        if not _is_share(self.threshold):
            raise InvalidDeclaration(f"threshold must be a number above 0, at most 1; not {self.threshold!r}.")
        if self.model is not None and not _is_text(self.model):
            raise InvalidDeclaration(f"model must be the name of a model, or None; not {self.model!r}.")


def _default_trigger() -> "CheckpointTrigger":
    from .progress.checkpoints import CheckpointTrigger

    return CheckpointTrigger()


@dataclass(frozen=True)
class Agent:
    """A model, its instructions and its tools.

    `tools` takes functions, `Tool`s, and pydantic-ai's tools and toolsets. Without `model` the deployment's is used.
    """

    name: str
    model: str | None = None
    instructions: Instructions = ""
    tools: Sequence[Any] = ()
    description: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    limits: Limits = field(default_factory=Limits)
    #: How far turns are carried through deaths and failures; None: as `limits` say.
    durability: Durability | None = None
    #: None: history is never summarised.
    compaction: Compaction | None = field(default_factory=Compaction)
    #: In task mode, the JSON schema of the result.
    output_schema: JsonObject | None = None
    while_waiting: WhileWaiting = "queue"
    #: What happens when a turn finds a history that it cannot read: the session waits for a worker that can, or
    #: the model continues without the earlier turns.
    on_unreadable: OnUnreadable = "wait"
    #: What happens to a reply whose worker dies, or whose stream breaks, after readers have seen a part of it: that is
    #: retracted and the model is asked again, or, if it is text only, the model goes on from it.
    on_interrupted_reply: OnInterruptedReply = "retract"
    #: Of the model, for budgets of costs; the default is the list of `genai-prices`.
    price: Price | None = None
    #: How turns run: each as a child workflow, or `"inline"`, in the workflow of their session. The default is the
    #: deployment's (`PERDURE_TURNS`).
    turns: Turns | None = None
    #: Whether the model may ask people with the built-in `ask_question`. A tool of that name replaces it.
    asks_questions: bool = True
    #: Agents to which the model can hand work, here and on other servers. Each is a tool of its name, and each call a
    #: session of its own.
    subagents: "Sequence[Agent | RemoteAgent]" = ()
    #: Whether the model can also hand work to a copy of this agent, with the built-in tool `agent`. By default it can
    #: if there are subagents.
    copies_itself: bool | None = None
    #: Whether the model calls tools and subagents from programs that it writes: instead of them it gets one tool,
    #: `code_mode`. Needs the extra `codemode`.
    code_mode: bool = False
    #: The defaults of its lanes, by name, and lanes of its own beside `main`, `cron`, `heartbeat` and `subagent`.
    lanes: Mapping[str, Lane] = field(default_factory=dict[str, Lane])
    #: Whether the model plans: it gets tools for a plan, and instructions how to use them.
    planning: "Planning | None" = None
    #: What makes a checkpoint, beside tools that ask for one. The default: each step of a plan that becomes done.
    checkpoints: "CheckpointTrigger | None" = field(default_factory=_default_trigger)
    #: The tools that hand work to an agent, by name.
    children: "Sequence[tuple[str, Agent | RemoteAgent]]" = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        if not (_is_text(self.name) and NAME.fullmatch(self.name)):
            raise InvalidDeclaration(
                f"The agent name {self.name!r} will not do: use lowercase letters, digits, '-' and '_', at most 64, "
                "the first and the last one a letter or a digit."
            )
        if wrong := _wrong_type(self):
            raise InvalidDeclaration(f"Agent {self.name!r}: {wrong}.")
        if self.durability is not None:
            object.__setattr__(self, "limits", self.durability.applied(self.limits))
        tools = tuple(_declared(self.name, declaration) for declaration in self.tools)
        object.__setattr__(self, "tools", tools)
        object.__setattr__(self, "subagents", tuple(self.subagents))
        copies = bool(self.subagents) if self.copies_itself is None else self.copies_itself
        children = (*((each.name, each) for each in self.subagents), *(((SELF_COPY, self),) if copies else ()))
        object.__setattr__(self, "children", children)
        own = [*(name for name in map(_name, tools) if name is not None), *(each.name for each in self.subagents)]
        if copies and SELF_COPY in own:
            raise InvalidDeclaration(
                f"Agent {self.name!r}: the name {SELF_COPY!r} is taken by the copy of the agent itself: use another "
                "one, or `copies_itself=False`."
            )
        _refuse_duplicates(self.name, own)
        if self.code_mode:
            _check_code_mode(self.name)
        if self.output_schema is not None and (found := problem(self.output_schema)):
            raise InvalidDeclaration(f"Agent {self.name!r}: the output schema cannot be used: {found}.")

    @property
    def own_tools(self) -> tuple[Tool[..., Any], ...]:
        """The tools declared with `@tool`. Foreign toolsets list their tools only at run time."""
        return tuple(cast("Tool[..., Any]", known) for known in self.tools if isinstance(known, Tool))


def _check_code_mode(agent: str) -> None:
    if find_spec("pydantic_monty") is None:
        raise InvalidDeclaration(f"Agent {agent!r}: code_mode needs the extra: pip install 'perdure[codemode]'.")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


#: Fields with few values, and how these are written.
_CHOICES: Mapping[str, tuple[Sequence[object], str]] = {
    "on_unreadable": (("wait", "fresh"), "'wait' or 'fresh'"),
    "on_interrupted_reply": (("retract", "continue"), "'retract' or 'continue'"),
    "turns": ((None, "child", "inline"), "'child' or 'inline'"),
    "while_waiting": (("queue", "deny"), "'queue' or 'deny'"),
    "copies_itself": ((None, True, False), "True or False"),
    "code_mode": ((True, False), "True or False"),
}


def _wrong_type(agent: Agent) -> str | None:
    """A field of the wrong type. Authors without a type checker get the error here, not at the first call."""
    from .progress import is_prompt, wrong_declaration

    fields: Mapping[str, object] = vars(agent)
    instructions, tools, schema = fields["instructions"], fields["tools"], fields["output_schema"]
    for name, (choices, advice) in _CHOICES.items():
        if fields[name] not in choices:
            return f"{name} is {advice}"
    if fields["model"] is not None and not _is_text(fields["model"]):
        return f"model is a name, `anthropic:claude-sonnet-4-5` for one, not {fields['model']!r}"
    known = _is_text(instructions) or is_prompt(instructions)
    if not (known or (callable(instructions) and takes(instructions, None))):
        return (
            "instructions are text, a `Prompt`, or a function that takes the session: "
            "`def instructions(session) -> str`"
        )
    if _is_text(tools) or not isinstance(tools, Iterable):
        return "tools is a list: `tools=[look_up, order]`"
    if not isinstance(fields["settings"], Mapping):
        return "settings is a dict of model settings: `settings={'temperature': 0.2}`"
    if wrong := _wrong_bounds(fields) or _wrong_lanes(fields["lanes"]) or wrong_declaration(fields):
        return wrong
    if schema is not None and not isinstance(schema, Mapping):
        return "output_schema is a JSON schema; that of a pydantic model is `Model.model_json_schema()`"
    return _wrong_subagents(fields["subagents"])


def _wrong_bounds(fields: Mapping[str, object]) -> str | None:
    if not isinstance(fields["limits"], Limits):
        return "limits is `Limits(…)`: `limits=Limits(steps_per_turn=12)`"
    if fields["durability"] is not None and not isinstance(fields["durability"], Durability):
        return "durability is `Durability(…)`: `durability=Durability(timeout=timedelta(minutes=10))`"
    if fields["compaction"] is not None and not isinstance(fields["compaction"], Compaction):
        return "compaction is `Compaction(…)` or None: `compaction=Compaction(context_window=32_000)`"
    if fields["price"] is not None and not isinstance(fields["price"], Price):
        return "price is `Price(…)`: `price=Price(input=3, output=15)`"
    return None


def _wrong_lanes(lanes: object) -> str | None:
    if not isinstance(lanes, Mapping):
        return "lanes is a dict: `lanes={'main': Lane(mode='collect')}`"
    known = cast("Mapping[object, object]", lanes)
    if not all(isinstance(name, str) and _LANE.fullmatch(name) for name in known):
        return "a lane is named by 1 to 32 of the characters a-z, 0-9, '_' and '-': `lanes={'audit': Lane()}`"
    if not all(isinstance(lane, Lane) for lane in known.values()):
        return "lanes is a dict: `lanes={'main': Lane(mode='collect')}`"
    return None


def _wrong_subagents(subagents: object) -> str | None:
    if _is_text(subagents) or not isinstance(subagents, Iterable):
        return "subagents is a list of agents: `subagents=[researcher]`"
    from .remote import RemoteAgent

    known = (Agent, RemoteAgent)
    wrong = next((each for each in cast("Iterable[object]", subagents) if not isinstance(each, known)), None)
    if wrong is None:
        return None
    named = cast("Tool[..., Any]", wrong).name if isinstance(wrong, Tool) else wrong
    return f"{named!r} is no agent; subagents is a list of agents: `subagents=[researcher]`"


def _declared(agent: str, declaration: object) -> object:
    if isinstance(declaration, Tool):
        return cast("Tool[..., Any]", declaration)
    if isinstance(declaration, FunctionType | MethodType):
        return tool(declaration)
    if _is_foreign(declaration):
        return declaration
    from .remote import RemoteAgent

    if isinstance(declaration, Agent | RemoteAgent):
        name = declaration.name
        raise InvalidDeclaration(f"Agent {agent!r}: {name!r} is an agent, not a tool: `subagents=[{name}]`.")
    raise InvalidDeclaration(
        f"Agent {agent!r}: {declaration!r} is not a tool. "
        "Give it a function, a `@tool`, or a tool or toolset of pydantic-ai."
    )


def _is_foreign(declaration: object) -> bool:
    """Whether it is a tool or a toolset of pydantic-ai."""
    # Checked by module name first: importing pydantic-ai always would make every `import perdure` slow.
    if not any(base.__module__.partition(".")[0] == "pydantic_ai" for base in type(declaration).__mro__):
        return False
    from pydantic_ai.tools import Tool as ForeignTool
    from pydantic_ai.toolsets import AbstractToolset

    return isinstance(declaration, ForeignTool | AbstractToolset)


def _name(declared: object) -> str | None:
    """The name of the tool. None for toolsets and tools with a `prepare` function: their names are known in a step."""
    if isinstance(declared, Tool):
        return cast("Tool[..., Any]", declared).name
    from pydantic_ai.tools import Tool as ForeignTool

    if not isinstance(declared, ForeignTool):
        return None
    foreign = cast("ForeignTool[Any]", declared)
    return foreign.name if foreign.prepare is None else None


def _refuse_duplicates(agent: str, names: Sequence[str]) -> None:
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InvalidDeclaration(f"Agent {agent!r} has more than one tool named {', '.join(duplicates)}.")
    if FINAL_OUTPUT in names:
        raise InvalidDeclaration(f"Agent {agent!r}: the name {FINAL_OUTPUT!r} is taken by the structured result.")
