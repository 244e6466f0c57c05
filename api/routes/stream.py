"""Reading a session's events, live."""

import re

from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.requests import Scopes
from api.stream.broadcast import Broadcasts
from api.stream.response import EventStream
from perdure.errors import Invalid

_INTEGER_PREFIX = re.compile(r"\s*([+-]?[0-9]{1,16})(?![0-9])")
_LARGEST = 2**53 - 1


class StreamRoutes:
    def __init__(self, gate: Gate, scopes: Scopes, broadcasts: Broadcasts) -> None:
        self._gate = gate
        self._scopes = scopes
        self._broadcasts = broadcasts

    async def events(self, request: Request) -> Response:
        """Every event from `startIndex` on as a line of JSON, then live ones, until the session ends."""
        self._scopes.agent(request)
        principal = await self._gate.admit(request)
        start = start_index(request.query_params.getlist("startIndex"))
        return EventStream(self._broadcasts, await self._scopes.session(request, principal), start)


def start_index(given: list[str]) -> int:
    """The leading integer of the first value: `3.7` is 3 and `2x` is 2."""
    if not given:
        return 0
    found = _INTEGER_PREFIX.match(given[0])
    number = int(found[1]) if found else -1
    if not 0 <= number <= _LARGEST:
        raise Invalid("Expected startIndex to be a non-negative integer.")
    return number
