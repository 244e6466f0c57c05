"""Starting sessions and delivering to them."""

from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.bodies import Content, parse_cancel, parse_continue, parse_create, read_json
from api.limits import Limits
from api.problems import reply
from api.scope import Scopes, idempotency_key
from perdure.protocol.deliveries import Capabilities, DeliveryBody, Receipt
from perdure.protocol.principals import Principal
from perdure.protocol.wire import JsonObject
from perdure.runtime.sessions import Sessions


class SessionRoutes:
    def __init__(self, gate: Gate, scopes: Scopes, sessions: Sessions, limits: Limits) -> None:
        self._gate = gate
        self._scopes = scopes
        self._sessions = sessions
        self._limits = limits

    async def create(self, request: Request) -> Response:
        """Start a session with its first message."""
        agent = self._scopes.agent(request)
        principal = await self._gate.admit(request)
        key = idempotency_key(request)
        body = parse_create(await read_json(request, self._limits.body_bytes))
        self._limits.check(body.content)
        receipt = await self._sessions.start(
            agent.name,
            body=_delivery(body.content, principal),
            mode=body.mode,
            principal=principal,
            capabilities=Capabilities(request_input=body.mode == "conversation"),
            idempotency_key=key,
        )
        return _accepted(receipt, 202)

    async def deliver(self, request: Request) -> Response:
        """Deliver a message, or answers, to the session that owns the token."""
        self._scopes.agent(request)
        principal = await self._gate.admit(request)
        key = idempotency_key(request)
        body = parse_continue(await read_json(request, self._limits.body_bytes))
        self._limits.check(body.content)
        session = await self._scopes.session(request, principal)
        receipt = await self._sessions.deliver(
            body.token,
            body=_delivery(body.content, principal),
            session_id=session.session_id,
            principal=principal,
            idempotency_key=key,
            coalesce=body.coalesce,
        )
        return _accepted(receipt, 200)

    async def cancel(self, request: Request) -> Response:
        """Stop the session's turn, or withdraw what it waits for."""
        self._scopes.agent(request)
        principal = await self._gate.admit(request)
        turn_id = parse_cancel(await read_json(request, self._limits.body_bytes, optional=True))
        session = await self._scopes.session(request, principal)
        status = await self._sessions.cancel(session.session_id, turn_id=turn_id, principal=principal)
        return reply({"ok": True, "sessionId": session.session_id, "status": status})


def _delivery(content: Content, principal: Principal) -> DeliveryBody:
    return DeliveryBody(
        message=content.message,
        client_context=content.client_context,
        input_responses=content.input_responses,
        output_schema=content.output_schema,
        principal=principal,
    )


def _accepted(receipt: Receipt, status: int) -> Response:
    body: JsonObject = {"deliveryId": receipt.delivery_id, "ok": True, "sessionId": receipt.session_id}
    if receipt.inputs:
        body["inputs"] = [each.model_dump(mode="json", exclude_none=True) for each in receipt.inputs]
    if receipt.continuation_token is not None:
        body["continuationToken"] = receipt.continuation_token
    headers = {"x-eve-session-id": receipt.session_id}
    if receipt.deduplicated:
        # In a header, because the body of a repeated request is the first one, byte for byte.
        headers["idempotency-replayed"] = "true"
    return reply(body, status, headers)
