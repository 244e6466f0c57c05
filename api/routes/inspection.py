"""What callers may look at: sessions, attempts, failed turns, agents, and whether the service answers."""

from collections.abc import Mapping
from typing import get_args

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate, Operators
from api.requests import Scopes, known_id, limit, moment, name, one_of, tag, turn, words
from api.responses import flags, reply
from api.views import describe
from perdure.errors import DeadLetterNotFound, RunNotFound
from perdure.protocol import names
from perdure.protocol.deliveries import Mode, Principal
from perdure.protocol.events import Usage
from perdure.protocol.stream_policy import StreamPolicy
from perdure.protocol.wire import JsonObject
from perdure.runtime.dead_letters import DeadLetters
from perdure.runtime.reports.attempts import SOURCE, lease, shown
from perdure.runtime.reports.family import Family
from perdure.runtime.reports.journal import journal
from perdure.runtime.reports.timeline import Timeline
from perdure.runtime.reports.why import waiting_for
from perdure.runtime.sessions import Description, Sessions
from perdure.session.state import read_turn_number
from perdure.store.attempts import AttemptPage, AttemptQuery
from perdure.store.base import Store
from perdure.store.engine.cursors import SessionSearch
from perdure.store.engine.rows import stamp_of
from perdure.store.inputs import Waits
from perdure.store.lifecycle import DeadLetter, DeadLetterQuery, DeadLetterStatus
from perdure.store.values import SessionQuery, SessionRow, ShownStatus


class InspectionRoutes:
    def __init__(self, gate: Gate, sessions: Sessions) -> None:
        self._gate = gate
        self._sessions = sessions

    async def sessions(self, request: Request) -> Response:
        """One page of the caller's sessions, newest first."""
        principal = await self._gate.admit(request)
        params = request.query_params
        search = SessionSearch(
            query=session_query(params, principal),
            text=words("q", params.get("q")),
            created_after=moment("createdAfter", params.get("createdAfter")),
            created_before=moment("createdBefore", params.get("createdBefore")),
        )
        page = await self._sessions.search(search)
        waiting = await waits_of(self._sessions, *page.sessions)
        listed: JsonObject = {"sessions": [summary(row, waiting[row.session_id]) for row in page.sessions]}
        if page.next_cursor is not None:
            listed["nextCursor"] = page.next_cursor
        return reply(listed)

    async def session(self, request: Request) -> Response:
        """One session, with the status of its workflow."""
        principal = await self._gate.admit(request)
        session_id = known_id(request.path_params["session_id"])
        description = await self._sessions.describe(session_id, principal)
        return reply(detail(description, (await waits_of(self._sessions, description.row))[session_id]))

    async def why(self, request: Request) -> Response:
        """Why one session does not move, in a sentence."""
        principal = await self._gate.admit(request)
        return reply((await self._sessions.why(known_id(request.path_params["session_id"]), principal)).shown)

    async def tree(self, request: Request) -> Response:
        """One session with all that were started from it."""
        principal = await self._gate.admit(request)
        family = await self._sessions.family(known_id(request.path_params["session_id"]), principal)
        return reply(tree(family))


async def waits_of(sessions: Sessions, *rows: SessionRow) -> Mapping[str, Waits]:
    """What these sessions wait for; those that run, or have ended, wait for nothing."""
    found = await sessions.waits([row.session_id for row in rows if row.status in ("starting", "waiting")])
    return {row.session_id: found.get(row.session_id, Waits()) for row in rows}


def session_query(params: QueryParams, principal: Principal) -> SessionQuery:
    return SessionQuery(
        owner=principal.owner,
        agent=name("agent", params.get("agent")),
        status=one_of("status", get_args(ShownStatus), params.get("status")),
        mode=one_of("mode", get_args(Mode), params.get("mode")),
        parent=name("parent", params.get("parent")),
        tag=tag(params.getlist("tag")),
        limit=limit(params.get("limit")),
        cursor=params.get("cursor"),
    )


def summary(row: SessionRow, waits: Waits) -> JsonObject:
    why = waiting_for(row, waits)
    shown: JsonObject = {
        "sessionId": row.session_id,
        "agent": row.agent,
        "mode": row.mode,
        "status": row.shown_status,
        "waitingFor": why and why.sentence,
        "waitingCode": why and why.code,
        "createdAt": row.created_at,
        "updatedAt": row.updated_at,
        "title": row.title,
        "counts": {"turns": row.turns, "steps": row.steps, "toolCalls": row.tool_calls, "events": row.events},
        "usage": row.usage.model_dump(mode="json"),
    }
    if row.tags:
        shown["tags"] = dict(row.tags)
    if row.below.usage != Usage():
        shown["descendants"] = {"usage": row.below.usage.model_dump(mode="json"), "cost": row.below.dollars}
    if row.bounds is not None and row.bounds.deadline is not None:
        shown["deadline"] = stamp_of(row.bounds.deadline)
    if row.bounds is not None and row.bounds.idle_seconds is not None:
        shown["idleSeconds"] = row.bounds.idle_seconds
    if row.attention is not None:
        shown["attention"] = {name: row.attention[name] for name in ("code", "message", "since")}
    if row.error is not None:
        shown["error"] = row.error
    if row.parent is not None:
        shown["parent"] = row.parent
    elif row.forked_from is not None and (row.fork_place is not None or row.forked_turns > 0):
        # Once its parent is deleted, a fork of the first turn's steps shares nothing.
        shown["parent"] = {"sessionId": row.forked_from, **(row.fork_place or {"turn": row.forked_turns - 1})}
    return shown


def detail(description: Description, waits: Waits) -> JsonObject:
    request_ids = [row.request.request_id for row in waits.inputs]
    shown = {**summary(description.row, waits), "openInputs": request_ids}
    ended = description.workflow_status not in (None, "running", "continued_as_new")
    if ended and not description.row.ended and description.row.attention is None:
        shown["waitingFor"] = (
            f"A workflow: the status of its own is {description.workflow_status}; "
            "the reconciler handles it within a minute."
        )
    shown["temporal"] = {
        "workflowId": description.workflow_id,
        "runId": description.run_id,
        "status": description.workflow_status,
        "uiUrl": description.ui_url,
    }
    return shown


#: How many levels of a tree are shown: what is nested deeper, few can read.
_LEVELS = 50


def tree(family: Family) -> JsonObject:
    """The session with its descendants, nested; `truncated` if that is not all of them."""
    shown = member(family.row)
    level = [shown]
    for _ in range(_LEVELS):
        below: list[JsonObject] = []
        for each in level:
            each["children"] = [member(child) for child in family.children.get(each["sessionId"], ())]
            below += each["children"]
        level = below
    cut = any(each["sessionId"] in family.children for each in level)
    return shown if family.complete and not cut else {**shown, "truncated": True}


def member(row: SessionRow) -> JsonObject:
    """One session of a tree. A child has the name under which its parent knows it, and the place of its call."""
    shown: JsonObject = {
        "sessionId": row.session_id,
        "agent": row.agent,
        "status": row.shown_status,
        "title": row.title,
        "createdAt": row.created_at,
        "updatedAt": row.updated_at,
        "usage": row.usage.model_dump(mode="json"),
        "children": [],
    }
    if row.parent is not None:
        shown |= {field: row.parent[field] for field in ("name", "turn", "step", "callId") if field in row.parent}
    return shown


class DeadLetterRoutes:
    def __init__(self, gate: Gate, dead_letters: DeadLetters) -> None:
        self._gate = gate
        self._dead_letters = dead_letters

    async def list(self, request: Request) -> Response:
        """One page of the failed turns of the caller's sessions, newest first."""
        principal = await self._gate.admit(request)
        page = await self._dead_letters.list(dead_letter_query(request.query_params, principal))
        listed: JsonObject = {"deadLetters": [failed_turn(letter) for letter in page.dead_letters]}
        if page.next_cursor is not None:
            listed["nextCursor"] = page.next_cursor
        return reply(listed)

    async def requeue(self, request: Request) -> Response:
        """Deliver the messages of a failed turn again."""
        principal = await self._gate.admit(request)
        session_id = known_id(request.path_params["session_id"], DeadLetterNotFound)
        turn = read_turn_number({"turnId": request.path_params["turn_id"]})
        if turn is None:
            raise DeadLetterNotFound
        requeued = await self._dead_letters.requeue(session_id, turn, principal)
        body = {"ok": True, "sessionId": session_id, "deliveryIds": list(requeued.delivery_ids)}
        return reply(body, headers=flags(deduplicated=requeued.deduplicated, delayed=requeued.delayed))


def dead_letter_query(params: QueryParams, principal: Principal) -> DeadLetterQuery:
    return DeadLetterQuery(
        owner=principal.owner,
        agent=name("agent", params.get("agent")),
        status=one_of("status", get_args(DeadLetterStatus), params.get("status", "open")),
        limit=limit(params.get("limit")),
        cursor=params.get("cursor"),
    )


def failed_turn(letter: DeadLetter) -> JsonObject:
    fields: JsonObject = {
        "sessionId": letter.session_id,
        "turnId": names.turn_id(letter.turn),
        "agent": letter.agent,
        "code": letter.code,
        "message": letter.message,
        "failedAt": letter.failed_at,
    }
    if letter.requeued_at is not None:
        fields["requeuedAt"] = letter.requeued_at
    return fields


class AttemptRoutes:
    def __init__(
        self, gate: Gate, operators: Operators, sessions: Sessions, store: Store, policy: StreamPolicy
    ) -> None:
        """`policy`: what readers of events do not see."""
        self._policy = policy
        self._gate = gate
        self._operators = operators
        self._sessions = sessions
        self._store = store

    async def list(self, request: Request) -> Response:
        """One page of the attempts of a session, in the order of its steps."""
        principal = await self._gate.admit(request)
        params = request.query_params
        row = await self._sessions.get(known_id(request.path_params["session_id"]), principal)
        query = AttemptQuery(row.session_id, turn(params.get("turn")), limit(params.get("limit")), params.get("cursor"))
        return await self._listed(query)

    async def of_run(self, request: Request) -> Response:
        """One page of the attempts at the function of a run, and at what it calls."""
        principal = await self._gate.admit(request)
        params = request.query_params
        record = await self._sessions.runs.get(known_id(request.path_params["run_id"], RunNotFound), principal)
        # A run has no turns.
        return await self._listed(
            AttemptQuery(record.run_id, limit=limit(params.get("limit")), cursor=params.get("cursor"))
        )

    async def _listed(self, query: AttemptQuery) -> Response:
        page = await self._store.attempts.list(query)
        return _listed({"attempts": [shown(each, self._policy) for each in page.attempts]}, page)

    async def timeline(self, request: Request) -> Response:
        """One page of what has happened to a session, also beside its events."""
        principal = await self._gate.admit(request)
        params = request.query_params
        row = await self._sessions.get(known_id(request.path_params["session_id"]), principal)
        timeline = Timeline(self._store, self._policy)
        page = await timeline.page(row.session_id, params.get("cursor"), limit(params.get("limit")))
        listed: JsonObject = {"entries": [each.shown for each in page.entries]}
        if page.next_cursor is not None:
            listed["nextCursor"] = page.next_cursor
        if page.truncated:
            listed["truncated"] = True
        return reply(listed)

    async def journal(self, request: Request) -> Response:
        """How far each step of a turn has come; without a turn, of the last one."""
        principal = await self._gate.admit(request)
        row = await self._sessions.get(known_id(request.path_params["session_id"]), principal)
        return reply({"steps": list(await journal(self._store, row, turn(request.query_params.get("turn"))))})

    async def leases(self, request: Request) -> Response:
        """One page of the attempts that run, of all sessions, oldest first."""
        self._operators.check(await self._gate.admit(request))
        params = request.query_params
        page = await self._store.attempts.leases(limit(params.get("limit")), params.get("cursor"))
        return _listed({"source": SOURCE, "leases": [lease(each) for each in page.attempts]}, page)


def _listed(listed: JsonObject, page: AttemptPage) -> Response:
    if page.next_cursor is not None:
        listed["nextCursor"] = page.next_cursor
    return reply(listed)


class AboutRoutes:
    def __init__(self, gate: Gate, scopes: Scopes, *, development: bool) -> None:
        self._gate = gate
        self._scopes = scopes
        self._development = development

    async def health(self, request: Request) -> Response:
        """Whether this process responds; needs no credentials."""
        self._scopes.agent(request)
        return reply({"ok": True, "status": "ready", "workflowId": names.SESSION_WORKFLOW})

    async def info(self, request: Request) -> Response:
        """The agent: its model, instructions and tools."""
        agent = self._scopes.agent(request)
        await self._gate.admit(request)
        return reply(describe(agent, development=self._development))
