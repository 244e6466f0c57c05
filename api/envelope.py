"""Responses and errors in the form that clients of Durable Streams and of Flue expect."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from perdure.bounds import shortened
from perdure.errors import (
    IdempotencyConflict,
    InboxFull,
    NotFound,
    PerdureError,
    SessionDeleted,
    Unauthenticated,
    Unavailable,
)

from .requests import Handler
from .responses import dumps

log = logging.getLogger("perdure.api")

#: On every response: a browser neither guesses a type, nor refuses the response to a page of another origin.
SECURITY = {"x-content-type-options": "nosniff", "cross-origin-resource-policy": "cross-origin"}

_LONGEST = 1_200


class MethodNotAllowed(PerdureError):
    """The method is not allowed here."""

    status = 405
    code = "method_not_allowed"


class RouteNotFound(NotFound):
    """Nothing is served at this path."""

    code = "route_not_found"


def enveloped(handler: Handler, headers: Mapping[str, str] | None = None) -> Handler:
    """The handler with its errors in the envelope, and with these headers on every response."""

    @functools.wraps(handler)
    async def answered(request: Request) -> Response:
        try:
            response = await handler(request)
        except PerdureError as error:
            response = refusal(error)
        except ClientDisconnect:
            raise
        except Exception as error:
            log.error("request failed", exc_info=error)
            response = refusal(PerdureError())
        response.headers.update(headers or {})
        return response

    return answered


def not_allowed(*methods: str, headers: Mapping[str, str] | None = None) -> Handler:
    """The handler of all methods but these, with these headers."""

    async def refuse(request: Request) -> Response:
        allowed = ", ".join(methods)
        raise MethodNotAllowed(f"{request.method} is not allowed here; {allowed} is.", allow=allowed)

    return enveloped(refuse, headers)


async def not_found(request: Request) -> Response:
    """The handler of a path that does not exist."""
    return refusal(RouteNotFound())


def shown(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response that caches must not store."""
    return Response(
        dumps(content), status, {"cache-control": "no-store", **SECURITY, **(headers or {})}, "application/json"
    )


def refusal(error: PerdureError, headers: Mapping[str, str] | None = None) -> Response:
    """The response to an error. Of a failure of ours it says nothing but that it was one."""
    status, kind, message = error.status, error.code, shortened(error.message, _LONGEST)
    meta = error.details.get("meta")
    extra = dict(headers or {})
    match error:
        case Unavailable():
            # The text of the database or the network is only for the log.
            log.warning("request refused with 503: %s", error.message)
            status, kind, message = 503, "runtime_unavailable", "The service cannot take this now; try again."
        case IdempotencyConflict() | SessionDeleted():
            kind = "submission_conflict"
        case _ if status >= 500:
            status, message = 500, "The request failed."
            kind = kind if kind.startswith("submission_") else "internal_error"
        case _:
            pass
    if isinstance(error, Unavailable | InboxFull):
        extra["retry-after"] = "1"
    if isinstance(error, MethodNotAllowed):
        extra["allow"] = error.details["allow"]
    body: dict[str, Any] = {"type": kind, "message": message, "details": error.details.get("explained", "")}
    if meta is not None:
        body["meta"] = meta
    response = shown({"error": body}, status, extra)
    if isinstance(error, Unauthenticated):
        for challenge in error.details.get("challenges", ("Bearer",)):
            response.headers.append("www-authenticate", challenge)
    return response
