"""Input requests: listing those that the caller may answer, and answering one."""

from typing import get_args

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.bodies import BodyReader, Fields, parse_answer
from api.requests import RequestLimits, idempotency_key, known_id, limit, name, one_of
from api.responses import flags, reply
from perdure.errors import InputNotFound
from perdure.protocol.deliveries import DeliveryBody, InputResponse
from perdure.protocol.inputs import InputKind, InputStatus
from perdure.protocol.wire import JsonObject
from perdure.runtime.inputs import Inputs
from perdure.store.inputs import InputQuery, InputRow


class InputRoutes:
    def __init__(self, gate: Gate, inputs: Inputs, bodies: BodyReader, limits: RequestLimits) -> None:
        self._gate = gate
        self._inputs = inputs
        self._bodies = bodies
        self._limits = limits

    async def list(self, request: Request) -> Response:
        """One page of the requests that the caller may answer, oldest first."""
        principal = await self._gate.admit(request)
        page = await self._inputs.list(input_query(request.query_params), principal)
        listed: JsonObject = {"inputs": [shown(row) for row in page.rows]}
        if page.next_cursor is not None:
            listed["nextCursor"] = page.next_cursor
        return reply(listed)

    async def show(self, request: Request) -> Response:
        """One request with its status."""
        principal = await self._gate.admit(request)
        request_id = known_id(request.path_params["request_id"], InputNotFound)
        return reply(shown(await self._inputs.get(request_id, principal)))

    async def answer(self, request: Request) -> Response:
        """Answer one request. A responder need not own the session."""
        principal = await self._gate.admit(request)
        key = idempotency_key(request)
        request_id = known_id(request.path_params["request_id"], InputNotFound)

        def parse(fields: Fields) -> InputResponse:
            response = parse_answer(request_id, fields)
            self._limits.check(DeliveryBody(input_responses=(response,)))
            return response

        response = await self._bodies.read(request, parse)
        receipt = await self._inputs.answer(response, principal, idempotency_key=key)
        (outcome,) = receipt.inputs
        body = {**outcome.model_dump(mode="json", exclude_none=True), "sessionId": receipt.session_id}
        return reply(body, headers=flags(deduplicated=receipt.deduplicated, delayed=receipt.delayed))


def input_query(params: QueryParams) -> InputQuery:
    return InputQuery(
        session_id=name("sessionId", params.get("sessionId")),
        agent=name("agent", params.get("agent")),
        kind=one_of("kind", get_args(InputKind), params.get("kind")),
        status=one_of("status", get_args(InputStatus), params.get("status", "open")),
        limit=limit(params.get("limit")),
        cursor=params.get("cursor"),
    )


def shown(row: InputRow) -> JsonObject:
    request = row.request
    fields: JsonObject = {
        "requestId": request.request_id,
        "sessionId": request.session_id,
        "agent": request.agent,
        "kind": request.kind,
        "status": row.status,
        "tool": request.tool,
        "callId": request.call_id,
        "prompt": request.prompt,
        "summary": request.summary,
        "arguments": request.input,
        "display": request.display,
        "allowFreeform": request.allow_freeform,
        "options": [option.model_dump(mode="json", exclude_none=True) for option in request.options],
        "responders": request.responders.model_dump(mode="json", exclude_none=True),
        "votes": len(row.votes),
        "openedAt": row.opened_at,
        "expiresAt": request.expires_at,
        "onExpiry": request.on_expiry if request.expires_at is not None else None,
        "closedAt": row.closed_at,
    }
    if row.answer is not None:
        fields["answer"] = row.answer.shown()
    return fields
