"""Events as lines: one JSON object and a newline each. Every delta gets the text so far."""

from typing import Any

from api.responses import dumps
from perdure.protocol import names
from perdure.protocol.events import DELTAS, Event, EventType
from perdure.protocol.stream_policy import StreamPolicy
from perdure.store.base import Store
from perdure.store.follow import read_all

CONTENT_TYPE = "application/x-ndjson; charset=utf-8"
FORMAT = "ndjson"
VERSION = "16"


class NdjsonLines:
    """Encodes the events of one session in order, starting at any event."""

    def __init__(self, store: Store, session_id: str, policy: StreamPolicy) -> None:
        """`policy`: what readers do not see."""
        self._policy = policy
        self._store = store
        self._session_id = session_id
        self._so_far = _SoFar()

    async def line(self, event: Event) -> bytes:
        event = self._policy.shown(event)
        if event.type in DELTAS and not self._so_far.covers(event):
            # The first event is in the middle of a message: the earlier deltas are read once.
            so_far = _SoFar(event)
            started = names.step_key(event.turn or 0, event.step or 0, "started")
            start = await self._store.index_of(self._session_id, started)
            async for earlier in read_all(self._store, self._session_id, start or 0):
                if earlier.index >= event.index:
                    break
                so_far.take(self._policy.shown(earlier))
            self._so_far = so_far
        self._so_far.take(event)
        return encode(self._session_id, event, self._so_far.field(event))


class _SoFar:
    """The texts that one attempt at one step has emitted so far."""

    def __init__(self, event: Event | None = None) -> None:
        self._step = _step(event) if event else None
        self._attempt: int | None = None
        self._texts: dict[str, str] = {}

    def covers(self, event: Event) -> bool:
        """Whether everything before this event in its step has been taken."""
        return self._step == _step(event)

    def take(self, event: Event) -> None:
        if event.type == EventType.STEP_STARTED:
            self._step, self._attempt, self._texts = _step(event), None, {}
        if event.type == EventType.STEP_SUPERSEDED and self.covers(event):
            # The number alone does not tell: a step that a rebuilt session repeats counts its attempts anew.
            self._texts = {}
        if event.type == EventType.STEP_RECOVERED and self.covers(event):
            # This attempt goes on from what those before it have emitted.
            self._attempt = event.attempt
        if event.type not in DELTAS or not self.covers(event):
            return
        if event.attempt != self._attempt:
            # A new attempt emits everything again.
            self._attempt, self._texts = event.attempt, {}
        delta, _ = DELTAS[event.type]
        self._texts[event.type] = self._texts.get(event.type, "") + (event.data or {}).get(delta, "")

    def field(self, event: Event) -> dict[str, str]:
        if event.type not in DELTAS:
            return {}
        return {DELTAS[event.type][1]: self._texts.get(event.type, "")}


def _step(event: Event) -> tuple[int | None, int | None]:
    return event.turn, event.step


def encode(session_id: str, event: Event, more: dict[str, str]) -> bytes:
    line: dict[str, Any] = {}
    if event.data is not None:
        line["data"] = {**event.data, **more}
    line["type"] = event.type
    meta: dict[str, Any] = {"at": event.at, "id": f"{session_id}:{event.index}", "index": event.index}
    if event.attempt is not None:
        meta["attempt"] = event.attempt
    if event.delivery_ids:
        meta["deliveryIds"] = list(event.delivery_ids)
    line["meta"] = meta
    return dumps(line) + b"\n"
