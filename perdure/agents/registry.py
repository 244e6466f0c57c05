"""The agents that a process serves."""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import cast

from perdure.bounds import quoted
from perdure.errors import AgentNotFound, InvalidDeclaration
from perdure.protocol.deliveries import Bounds

from .agent import Agent, Limits, Turns
from .run import Run, RunRegistry
from .tool import Tool


class AgentRegistry:
    """Agents by name; the first is the default. Their subagents are served, too, and callers cannot start them."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        if not agents:
            raise InvalidDeclaration("There is no agent to serve: name one in PERDURE_AGENTS, or with --agents.")
        self._agents: dict[str, Agent] = {}
        self._public = frozenset(agent.name for agent in agents)
        for number, agent in enumerate(agents):
            if any(agent is other for other in agents[:number]):
                raise InvalidDeclaration(f"Two agents are named {agent.name!r}.")
            self._add(agent)

    def _add(self, agent: Agent) -> None:
        known = self._agents.setdefault(agent.name, agent)
        if known is not agent:
            raise InvalidDeclaration(f"Two agents are named {agent.name!r}.")
        for each in agent.subagents:
            if isinstance(each, Agent):
                self._add(each)

    @property
    def default(self) -> Agent:
        """The agent of requests that name none."""
        return next(iter(self._agents.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all of them, in order."""
        return tuple(self._agents)

    def get(self, name: str) -> Agent | None:
        """The agent of this name, or None."""
        return self._agents.get(name)

    def is_public(self, name: str) -> bool:
        """Whether callers may start it."""
        return name in self._public

    def __getitem__(self, name: str) -> Agent:
        """The agent that callers may start under this name."""
        agent = self._agents.get(name) if self.is_public(name) else None
        if agent is None:
            raise AgentNotFound(f"No agent named {quoted(name)!r} is served here.", agent=name)
        return agent

    def __contains__(self, name: str) -> bool:
        return name in self._agents

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents.values())

    def __len__(self) -> int:
        return len(self._agents)


def pools_of(agents: Iterable[Agent]) -> Sequence[str]:
    """The pools of workers that tools of these agents need."""
    declared = (tool for agent in agents for tool in agent.tools)
    tools = (cast("Tool[..., object]", each) for each in declared if isinstance(each, Tool))
    return tuple(dict.fromkeys(tool.pool for tool in tools if tool.pool))


def load_agents(spec: str, model: str | None = None, turns: Turns | None = None) -> AgentRegistry:
    """Load `module:attribute[,module:attribute…]`; an attribute is an agent or a list of agents, maybe with runs.

    `model` and `turns` are the defaults of agents that name none.
    """
    agents: list[Agent] = []
    for reference in _references(spec):
        agents.extend(_agents(reference, _load(reference, "an agent", Agent)))
    completed: dict[int, Agent] = {}

    def complete(agent: Agent) -> Agent:
        # Two agents may share a subagent: it stays one agent.
        if id(agent) not in completed:
            subagents = [complete(each) if isinstance(each, Agent) else each for each in agent.subagents]
            completed[id(agent)] = replace(
                agent, model=agent.model or model, turns=agent.turns or turns, subagents=subagents
            )
        return completed[id(agent)]

    return AgentRegistry([complete(agent) for agent in agents])


def load_runs(spec: str, agents: str = "") -> RunRegistry:
    """Load `module:attribute[,module:attribute…]`; an attribute is a run or a list of runs.

    `agents`: where agents are loaded from; runs in their lists are found, too.
    """
    runs: list[Run] = []
    for reference in _references(spec):
        found = _load(reference, "a run", Run)
        runs += [each for each in found if isinstance(each, Run)]
        if not found or not all(isinstance(each, Run) for each in found):
            raise _not_one(reference, found, "a run", Run)
    for reference in _references(agents):
        runs += [each for each in _load(reference, "an agent", Agent) if isinstance(each, Run)]
    # A run may be named in both places.
    return RunRegistry(list({id(each): each for each in runs}.values()))


def _references(spec: str) -> Iterable[str]:
    # Console scripts do not put the current folder on the path, `python -m` does. Authors expect both to work.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    return filter(None, (part.strip() for part in spec.split(",")))


def _as_module(path: str) -> str:
    return path.removesuffix(".py").removeprefix("./").replace("/", ".")


def _load(reference: str, what: str, kind: type[object]) -> Sequence[object]:
    """What the reference names: the parts of a list, or one object."""
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        example = f"{_as_module(module_name) or 'package.module'}:{attribute or what.rpartition(' ')[2]}"
        raise InvalidDeclaration(f"{reference!r} does not name {what}; write `module:attribute`, `{example}` for one.")
    if module_name.endswith(".py") or "/" in module_name:
        path = _as_module(module_name)
        raise InvalidDeclaration(f"{reference!r} names a file; write the module's name, `{path}:{attribute}`.")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as missing:
        # Only for the module of the reference: a missing import inside the author's module keeps its own traceback.
        if missing.name and (module_name == missing.name or module_name.startswith(missing.name + ".")):
            raise InvalidDeclaration(
                f"There is no module {module_name!r} (from {reference!r}), neither in {os.getcwd()} nor installed; "
                f"start in the folder that holds {module_name.partition('.')[0]}."
            ) from None
        raise
    if not hasattr(module, attribute):
        raise InvalidDeclaration(
            f"The module {module_name!r} has no {attribute!r} (from {reference!r}); "
            f"it has {_named(module, what, kind)}."
        )
    found: object = getattr(module, attribute)
    return cast("Sequence[object]", found) if isinstance(found, list | tuple) else (found,)


def _agents(reference: str, listed: Sequence[object]) -> list[Agent]:
    agents = [each for each in listed if isinstance(each, Agent)]
    if not agents or not all(isinstance(each, Agent | Run) for each in listed):
        raise _not_one(reference, listed, "an agent", Agent)
    return agents


def _not_one(reference: str, listed: Sequence[object], what: str, kind: type[object]) -> InvalidDeclaration:
    """What to say of a reference that names something else."""
    module_name, _, attribute = reference.partition(":")
    module = sys.modules[module_name]
    found: object = getattr(module, attribute)
    if isinstance(found, Run):
        return InvalidDeclaration(
            f"{reference!r} is not {what}, but a run: name it in PERDURE_RUNS, or in a list with an agent."
        )
    of = f"of type {type(found).__name__}" if listed else "an empty list"
    name = kind.__name__
    return InvalidDeclaration(
        f"{reference!r} is not {what.partition(' ')[0]} {name} or a list of {name}s, but {of}; "
        f"the module has {_named(module, what, kind)}."
    )


def _named(module: ModuleType, what: str, kind: type[object]) -> str:
    """The names of the module's agents or runs, as used in a reference."""
    names = [repr(name) for name, value in vars(module).items() if isinstance(value, kind) and not name.startswith("_")]
    return ", ".join(names) or f"no {what.rpartition(' ')[2]} at all"


#: How `Limits.max_attempts` is written where it is not a plain number: nothing for the default, 0 for no limit.
_ATTEMPTS: dict[int | None, int | None] = {Limits().max_attempts: None, None: 0}


def bounds_of(
    limits: Limits, *, deadline: float | None = None, idle_seconds: float | None = None, depth: int | None = None
) -> Bounds | None:
    """The bounds of a new session: what its agent declares, and what the caller wants if that is tighter.

    `depth`: how many sessions are above it on other servers.
    """
    ends = [] if limits.session_seconds is None else [time.time() + limits.session_seconds]
    ends += [] if deadline is None else [deadline]
    idle = [each for each in (limits.idle_seconds, idle_seconds) if each is not None]
    bounds = Bounds(
        deadline=min(ends, default=None),
        idle_seconds=min(idle, default=None),
        turn_seconds=limits.turn_seconds,
        attempts=_ATTEMPTS.get(limits.max_attempts, limits.max_attempts),
        depth=depth,
    )
    return None if bounds == Bounds() else bounds
