"""JSON responses, and the responses to errors."""

import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.bounds import quoted, shortened
from perdure.errors import (
    CallbackNotPending,
    ForkRefused,
    InboxFull,
    InputClosed,
    InputExpired,
    Invalid,
    OutcomeUnknown,
    PerdureError,
    SessionNotFound,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnsupportedMedia,
)


def dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        # An unpaired surrogate, or a number of more than 64 bits: a tool can return one, and the stream of its session
        # must still be readable.
        return json.dumps(value, separators=(",", ":")).encode()


log = logging.getLogger("perdure.api")

#: The longest error text, in characters: it may quote more of the request than a caller should get.
_LONGEST = 1_200
_LONGEST_TARGET = 500

NO_STORE = {"cache-control": "no-store"}


def reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response that caches must not store."""
    return Response(
        dumps(content), status, {**NO_STORE, **(headers or {})}, media_type="application/json; charset=utf-8"
    )


def flags(*, deduplicated: bool = False, delayed: bool = False) -> dict[str, str]:
    """The flags of a receipt as headers: the body of a repeated request must be the first one, byte for byte."""
    named = {"idempotency-replayed": deduplicated, "x-perdure-delayed": delayed}
    return {name: "true" for name, holds in named.items() if holds}


def problem(error: PerdureError) -> Response:
    """The response to an error that the caller may see."""
    response = reply(_body(error), error.status)
    if isinstance(error, Unauthenticated):
        for challenge in error.details.get("challenges", ("Bearer",)):
            response.headers.append("www-authenticate", challenge)
    elif isinstance(error, Unavailable | InboxFull):
        response.headers["retry-after"] = "1"
    return response


def _body(error: PerdureError) -> dict[str, Any]:
    message = shortened(error.message, _LONGEST)
    match error:
        case Invalid() | SessionNotFound() | CallbackNotPending():
            return {"error": message, "ok": False}
        case TooLarge() | UnsupportedMedia():
            return {"error": message, "ok": False, "violations": error.details.get("violations", [])}
        case Unavailable():
            # The text of the database or the network is only for the log.
            shown = OutcomeUnknown() if isinstance(error, OutcomeUnknown) else Unavailable()
            return {"code": shown.code, "error": shown.message, "ok": False}
        case InputClosed() | InputExpired():
            outcome = {"status": error.details.get("status"), "optionId": error.details.get("option_id")}
            known = {name: value for name, value in outcome.items() if value is not None}
            return {"code": error.code, "error": message, "ok": False, **known}
        case ForkRefused():
            known = {name: error.details[name] for name in ("reason", "nearest") if name in error.details}
            return {"code": error.code, "error": message, "ok": False, **known}
        case _:
            return {"code": getattr(error, "wire_code", error.code), "error": message, "ok": False}


async def on_error(_: Request, error: Exception) -> Response:
    """The response to an expected error; a server-side condition, such as a store that cannot be read, is a 503."""
    if not isinstance(error, PerdureError):
        return hidden(error)
    if error.status < 500:
        return problem(error)
    log.warning("request refused with 503: %s", error.message, exc_info=None if error.retryable else error)
    return problem(error if isinstance(error, Unavailable) else Unavailable())


async def on_http_error(request: Request, error: Exception) -> Response:
    """The same response for an unknown route and an unknown method, so that routes cannot be probed."""
    if isinstance(error, HTTPException) and error.status_code not in (404, 405):
        return reply({"error": error.detail, "ok": False}, error.status_code)
    target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    message = f"Cannot find any route matching [{request.method}] {quoted(target, _LONGEST_TARGET)}"
    return reply({"error": True, "message": message, "status": 404}, 404)


def hidden(error: BaseException) -> Response:
    """A 500 with an error id; the details are only in the log."""
    error_id = str(uuid.uuid4())
    log.error("request failed, error id %s", error_id, exc_info=error)
    return reply({"error": "Channel handler failed.", "errorId": error_id, "ok": False}, 500)


class Shield:
    """The outermost middleware: no exception leaves the application, and no caller sees its text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            # The client has disconnected; there is no one to respond to.
            return
        except Exception as error:
            response = hidden(error)
            if not started:
                await response(scope, receive, send)
