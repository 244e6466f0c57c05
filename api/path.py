"""The path and query of a request: the agent, the session, and the parameters of lists."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from perdure.agents.agent import Agent
from perdure.agents.registry import AgentRegistry
from perdure.errors import InputNotFound, Invalid, SessionNotFound
from perdure.protocol.principals import Principal
from perdure.runtime.sessions import Sessions
from perdure.store.values import SessionRow

_KEY_LIMIT = 255


class Scopes:
    """Resolves the path. The bare prefix starts sessions of the default agent, and serves sessions of all agents."""

    def __init__(self, agents: AgentRegistry, sessions: Sessions) -> None:
        self._agents = agents
        self._sessions = sessions

    def agent(self, request: Request) -> Agent:
        """The agent of the prefix; `AgentNotFound` when no agent of this name is served."""
        name = _path(request).get("agent")
        return self._agents.default if name is None else self._agents[name]

    async def session(self, request: Request, principal: Principal) -> SessionRow:
        """The session of the path, if it belongs to the caller and to the agent of the prefix."""
        params = _path(request)
        row = await self._sessions.get(known_id(params["session_id"]), principal)
        if params.get("agent") not in (None, row.agent):
            raise SessionNotFound
        return row


def known_id(text: str) -> str:
    """The id; `SessionNotFound` for a text that cannot be a session id."""
    if not (text.isascii() and text.isprintable()):
        raise SessionNotFound
    return text


def known_input(text: str) -> str:
    """As `known_id`, for input requests."""
    if not (text.isascii() and text.isprintable()):
        raise InputNotFound
    return text


def idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _KEY_LIMIT:
        raise Invalid(f"Expected the Idempotency-Key header to have 1 to {_KEY_LIMIT} characters.")
    return key


def _path(request: Request) -> Mapping[str, Any]:
    return request.path_params


_MOST = 200
_FEW = 50


def name(field: str, given: str | None) -> str | None:
    if given is not None and not given.isprintable():
        raise Invalid(f"Expected '{field}' to be a name.")
    return given


def one_of(name: str, choices: tuple[Any, ...], given: str | None) -> Any:
    if given is not None and given not in choices:
        raise Invalid(f"Expected '{name}' to be one of {', '.join(choices)}.")
    return given


def limit(given: str | None) -> int:
    if given is None:
        return _FEW
    if not (given.isascii() and given.isdecimal() and len(given) <= 3 and 1 <= int(given) <= _MOST):
        raise Invalid(f"Expected 'limit' to be an integer from 1 to {_MOST}.")
    return int(given)
