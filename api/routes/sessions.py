"""Starting sessions, delivering to them, cancelling turns, and controls of the model's history."""

from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.bodies import BodyReader, ContinueBody, CreateBody, Fields, parse_continue, parse_create
from api.callbacks import parse_report, with_reach
from api.controls import parse_cancel, parse_control, parse_fork
from api.requests import RequestLimits, Scopes, idempotency_key, known_id
from api.responses import flags, reply
from perdure.errors import Invalid, NoActiveSession, SessionNotFound
from perdure.protocol.deliveries import Capabilities, Principal, Receipt
from perdure.protocol.wire import JsonObject
from perdure.runtime.remote.callbacks import Callbacks
from perdure.runtime.sessions import Sessions
from perdure.session.remote import DEPTH_HEADER, read_depth
from perdure.settings import Settings


class SessionRoutes:
    def __init__(
        self,
        gate: Gate,
        scopes: Scopes,
        sessions: Sessions,
        bodies: BodyReader,
        limits: RequestLimits,
        settings: Settings,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._scopes = scopes
        self._sessions = sessions
        self._bodies = bodies
        self._limits = limits

    async def create(self, request: Request) -> Response:
        """Start a session with its first message."""
        agent = self._scopes.agent(request)
        principal = await self._gate.admit(request)
        key = idempotency_key(request)

        def parse(fields: Fields) -> CreateBody:
            body = parse_create(fields, principal)
            self._limits.check(body.delivery)
            return body

        body = await self._bodies.read(request, parse)
        callback = None if body.callback is None else await with_reach(body.callback, self._settings)
        receipt = await self._sessions.start(
            agent.name,
            body=body.delivery,
            mode=body.mode,
            principal=principal,
            capabilities=Capabilities(request_input=body.mode == "conversation"),
            idempotency_key=key,
            deadline=body.deadline,
            idle_seconds=body.idle_seconds,
            callback=callback,
            queue_mode=body.queue_mode,
            tags=body.tags,
            depth=read_depth(request.headers.get(DEPTH_HEADER)) or None,
        )
        return _accepted(receipt, 202)

    async def deliver(self, request: Request) -> Response:
        """Deliver a message, or answers, to the session that owns the token."""
        self._scopes.agent(request)
        principal = await self._gate.admit(request)
        key = idempotency_key(request)

        def parse(fields: Fields) -> ContinueBody:
            body = parse_continue(fields, principal)
            self._limits.check(body.delivery)
            return body

        body = await self._bodies.read(request, parse)
        session = await self._scopes.session(request, principal)
        receipt = await self._sessions.deliver(
            body.token,
            body=body.delivery,
            session_id=session.session_id,
            principal=principal,
            idempotency_key=key,
            queue_mode=body.queue_mode,
            lane=body.lane,
        )
        return _accepted(receipt, 200)

    async def fork(self, request: Request) -> Response:
        """Start a session that shares the first turns of this one."""
        principal = await self._gate.admit(request)
        key = idempotency_key(request)
        place = await self._bodies.read(request, parse_fork)
        session_id = known_id(request.path_params["session_id"])
        fork = await self._sessions.fork(
            session_id,
            place.turn,
            step=place.step,
            checkpoint=place.checkpoint,
            principal=principal,
            idempotency_key=key,
        )
        body = {
            "sessionId": fork.session_id,
            "continuationToken": fork.continuation_token,
            "parent": {
                "sessionId": fork.parent,
                "turn": fork.turn,
                **({} if fork.step is None else {"step": fork.step}),
            },
        }
        headers = flags(deduplicated=fork.deduplicated, delayed=fork.delayed)
        return reply(body, 201, {"x-eve-session-id": fork.session_id, **headers})

    async def delete(self, request: Request) -> Response:
        """Delete the session for good."""
        principal = await self._gate.admit(request)
        session_id = known_id(request.path_params["session_id"])
        deletion = await self._sessions.delete(session_id, principal=principal)
        body = {"sessionId": session_id, "requestedAt": deletion.requested_at, "deleted": deletion.counts}
        if deletion.finished_at is None:
            return reply({**body, "status": "deleting"}, 202)
        return reply({**body, "status": "deleted", "deletedAt": deletion.finished_at})

    async def cancel(self, request: Request) -> Response:
        """Stop the session's turn, or withdraw what it waits for."""
        self._scopes.agent(request)
        principal = await self._gate.admit(request)
        turn_id = await self._bodies.read(request, parse_cancel, optional=True)
        session = await self._scopes.session(request, principal)
        cancelled = await self._sessions.cancel(session.session_id, turn_id=turn_id, principal=principal)
        body = {"ok": True, "sessionId": session.session_id, "status": cancelled.status}
        return reply(body, headers=flags(delayed=cancelled.delayed))

    async def compact(self, request: Request) -> Response:
        """Summarise the model's history."""
        return await self._control(request, self._sessions.compact)

    async def clear(self, request: Request) -> Response:
        """Drop the model's history."""
        return await self._control(request, self._sessions.clear)

    async def reset(self, request: Request) -> Response:
        """End the session."""
        return await self._control(request, self._sessions.reset, "reset")

    async def _control(self, request: Request, control: "_Control", done: str = "accepted") -> Response:
        self._scopes.agent(request)
        principal = await self._gate.admit(request)
        key = idempotency_key(request)
        await self._bodies.read(request, parse_control, optional=True)
        try:
            session = await self._scopes.session(request, principal)
            receipt = await control(session.session_id, principal=principal, idempotency_key=key)
        except (SessionNotFound, NoActiveSession):
            # As eve answers: for a session that is not there, nothing is left to do.
            return reply({"ok": True, "status": "no_active_session"})
        named = "sessionId" if done == "accepted" else "previousSessionId"
        headers = flags(deduplicated=receipt.deduplicated, delayed=receipt.delayed)
        body = {"ok": True, named: receipt.session_id, "status": done}
        return reply(body, 202 if done == "accepted" else 200, headers)


class _Control(Protocol):
    """One of the methods of `Sessions` that deliver a control."""

    async def __call__(self, session_id: str, *, principal: Principal, idempotency_key: str | None) -> Receipt: ...


def _accepted(receipt: Receipt, status: int) -> Response:
    body: JsonObject = {"deliveryId": receipt.delivery_id, "ok": True, "sessionId": receipt.session_id}
    if receipt.inputs:
        body["inputs"] = [each.model_dump(mode="json", exclude_none=True) for each in receipt.inputs]
    if receipt.continuation_token is not None:
        body["continuationToken"] = receipt.continuation_token
    headers = flags(deduplicated=receipt.deduplicated, delayed=receipt.delayed)
    return reply(body, status, {"x-eve-session-id": receipt.session_id, **headers})


class CallbackRoutes:
    """Other servers report here what agents there have done. The token is the right to do that, for one call, once."""

    def __init__(self, callbacks: Callbacks, bodies: BodyReader) -> None:
        self._callbacks = callbacks
        self._bodies = bodies

    async def accept(self, request: Request) -> Response:
        """Deliver the result of a call to the session that waits for it."""
        token = request.path_params.get("token")
        if not token:
            raise Invalid("Missing callback token.")
        report = await self._bodies.read(request, parse_report)
        await self._callbacks.accept(token, report)
        return reply({"ok": True}, 202)
