"""Looking at sessions: which there are, what they did, what they wait for."""

from typing import Any, TypeVar, get_args

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.problems import reply
from api.scope import known_id
from perdure.errors import Invalid
from perdure.protocol.deliveries import Mode
from perdure.protocol.principals import Principal
from perdure.protocol.wire import JsonObject
from perdure.runtime.sessions import Description, Sessions
from perdure.store.base import SessionQuery, SessionRow, SessionStatus

_MOST = 200
_FEW = 50

Choice = TypeVar("Choice", bound=str)


class InspectionRoutes:
    def __init__(self, gate: Gate, sessions: Sessions) -> None:
        self._gate = gate
        self._sessions = sessions

    async def sessions(self, request: Request) -> Response:
        """One page of the caller's sessions, newest first."""
        principal = await self._gate.admit(request)
        page = await self._sessions.list(session_query(request.query_params, principal))
        listed: JsonObject = {"sessions": [summary(row) for row in page.sessions]}
        if page.next_cursor is not None:
            listed["nextCursor"] = page.next_cursor
        return reply(listed)

    async def session(self, request: Request) -> Response:
        """One session, with what Temporal knows of it."""
        principal = await self._gate.admit(request)
        session_id = known_id(request.path_params["session_id"])
        return reply(detail(await self._sessions.describe(session_id, principal)))


def session_query(params: QueryParams, principal: Principal) -> SessionQuery:
    return SessionQuery(
        owner=principal.owner,
        agent=_name("agent", params.get("agent")),
        status=_one_of("status", get_args(SessionStatus), params.get("status")),
        mode=_one_of("mode", get_args(Mode), params.get("mode")),
        limit=_limit(params.get("limit")),
        cursor=params.get("cursor"),
    )


def _name(field: str, given: str | None) -> str | None:
    if given is not None and not given.isprintable():
        raise Invalid(f"Expected '{field}' to be a name.")
    return given


def _one_of(name: str, choices: tuple[Any, ...], given: str | None) -> Any:
    if given is not None and given not in choices:
        raise Invalid(f"Expected '{name}' to be one of {', '.join(choices)}.")
    return given


def _limit(given: str | None) -> int:
    if given is None:
        return _FEW
    if not (given.isascii() and given.isdecimal() and len(given) <= 3 and 1 <= int(given) <= _MOST):
        raise Invalid(f"Expected 'limit' to be an integer from 1 to {_MOST}.")
    return int(given)


def summary(row: SessionRow) -> JsonObject:
    shown: JsonObject = {
        "sessionId": row.session_id,
        "agent": row.agent,
        "mode": row.mode,
        "status": row.status,
        "waitingFor": waiting_for(row.status),
        "createdAt": row.created_at,
        "updatedAt": row.updated_at,
        "title": row.title,
        "counts": {"turns": row.turns, "steps": row.steps, "toolCalls": row.tool_calls, "events": row.events},
        "usage": row.usage.model_dump(mode="json"),
    }
    if row.error is not None:
        shown["error"] = row.error
    if row.parent is not None:
        shown["parent"] = row.parent
    return shown


def detail(description: Description) -> JsonObject:
    shown = summary(description.row)
    ended = description.workflow_status not in (None, "running", "continued_as_new")
    if ended and description.row.status in ("starting", "running", "waiting"):
        shown["waitingFor"] = f"Nothing: its workflow is {description.workflow_status} and will not go on."
    shown["temporal"] = {
        "workflowId": description.workflow_id,
        "runId": description.run_id,
        "status": description.workflow_status,
        "uiUrl": description.ui_url,
    }
    return shown


def waiting_for(status: SessionStatus) -> str | None:
    """Why the session does nothing right now; None when it does something, or never will again."""
    match status:
        case "starting":
            return "A worker that takes up its first turn."
        case "waiting":
            return "The next message."
        case "running" | "completed" | "failed":
            return None
