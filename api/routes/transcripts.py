"""The transcript of a session: its messages, or the events that count."""

import contextlib
from collections.abc import AsyncGenerator
from itertools import count

from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.requests import known_id, one_of
from api.responses import NO_STORE, dumps
from api.stream.broadcast import Broadcasts
from api.stream.ndjson import encode
from api.stream.response import LiveResponse
from perdure.protocol.events import PIECES, TERMINAL
from perdure.runtime.sessions import Sessions
from perdure.runtime.streams.transcript import RecordsExpired, transcript
from perdure.store.base import Store
from perdure.store.follow import read_all
from perdure.store.values import SessionRow

#: Bytes that are sent at a time.
_PIECE = 65_536


class TranscriptRoutes:
    def __init__(self, gate: Gate, sessions: Sessions, store: Store, broadcasts: Broadcasts) -> None:
        self._gate = gate
        self._sessions = sessions
        self._store = store
        self._broadcasts = broadcasts

    async def show(self, request: Request) -> Response:
        """All messages, or all events but pieces, as one JSON object."""
        principal = await self._gate.admit(request)
        form = one_of("format", ("messages", "events"), request.query_params.get("format"))
        row = await self._sessions.get(known_id(request.path_params["session_id"]), principal)
        if form == "events":
            return _Listed(self._broadcasts, row, "events", self._events(row))
        if row.records_expired:
            raise RecordsExpired
        return _Listed(self._broadcasts, row, "messages", self._messages(row))

    async def _messages(self, row: SessionRow) -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(transcript(self._store, row.session_id)) as messages:
            async for message in messages:
                yield dumps(self._broadcasts.policy.said(message))

    async def _events(self, row: SessionRow) -> AsyncGenerator[bytes]:
        policy = self._broadcasts.policy
        left_out = frozenset(PIECES) | policy.exclude
        async for event in read_all(self._store, row.session_id):
            # What comes later may never end.
            if event.index >= row.events:
                return
            if event.type not in left_out:
                yield encode(row.session_id, policy.shown(event), {}).rstrip(b"\n")
            if event.type in TERMINAL:
                # Readers of a stream do not see what follows, either.
                return


class _Listed(LiveResponse):
    """An array of any length in an object, sent as fast as its reader takes it; cut off when it cannot be completed."""

    def __init__(self, broadcasts: Broadcasts, row: SessionRow, name: str, entries: AsyncGenerator[bytes]) -> None:
        super().__init__(broadcasts, row.session_id, {**NO_STORE, "content-type": "application/json; charset=utf-8"})
        self._name_of_list = name
        self._entries = entries

    async def chunks(self) -> AsyncGenerator[bytes]:
        piece = bytearray(b'{"%s":[' % self._name_of_list.encode())
        async with contextlib.aclosing(self._entries) as entries:
            numbers = count()
            async for entry in entries:
                piece += (b"," if next(numbers) else b"") + entry
                if len(piece) > _PIECE:
                    yield bytes(piece)
                    piece.clear()
        yield bytes(piece) + b"]}"
