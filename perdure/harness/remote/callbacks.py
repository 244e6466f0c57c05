"""The callback of a session: when it has ended, however it did, who has started it elsewhere gets its result."""

import json
import logging
import time
from datetime import datetime
from typing import TYPE_CHECKING, cast

from perdure.errors import NeedsAttention
from perdure.protocol.wire import JsonObject
from perdure.session.remote import SESSION_FAILED
from perdure.store.lifecycle import DueCallback

from .outbound import Answer, Outbound, Reach, Unreachable

if TYPE_CHECKING:
    from perdure.store.base import Store

log = logging.getLogger("perdure.callbacks")

#: Seconds for one try; for how long nobody else tries meanwhile.
_SECONDS = 30.0
_LEASE = 40.0
#: The pause after the first try; it doubles with each one. The last try is a day after the end of the session.
_FIRST_PAUSE = 2.0
_LONGEST_PAUSE = 600.0
_LONGEST = 86_400.0
#: A server that knows nothing of the call may not have committed it yet: so many tries take a few minutes.
_UNKNOWN_TRIES = 7

_DELETED = {"code": SESSION_FAILED, "message": "The session was deleted."}


class CallbackSender:
    """Delivers callbacks, at least once. Any process may try at any time: the store says whose turn it is."""

    def __init__(self, store: "Store", outbound: Outbound | None = None) -> None:
        self._store = store
        self._outbound = outbound or Outbound()

    async def deliver(self, session_id: str) -> None:
        """Try once, if the callback of this session is due; note when the next try is, or that there is none."""
        due = await self._store.claim_callback(session_id, _LEASE)
        if due is None:
            return
        try:
            answer = await self._send(due)
        except (Unreachable, NeedsAttention) as failed:
            # What this build cannot read, a newer one may be able to, until the day is over.
            await self._failed(due, str(failed))
            return
        if answer.is_success:
            await self._store.settle_callback(session_id, "delivered")
        elif answer.status in (400, 410, 413, 422) or (answer.status == 404 and due.tries >= _UNKNOWN_TRIES):
            log.warning(
                "the callback of session %s was refused with %d; nobody waits for it", session_id, answer.status
            )
            await self._store.settle_callback(session_id, "refused")
        else:
            await self._failed(due, f"The server has answered {answer.status}.")

    async def _failed(self, due: DueCallback, why: str) -> None:
        if time.time() - datetime.fromisoformat(due.since).timestamp() > _LONGEST:
            log.error("the callback of session %s was not delivered in a day: %s", due.session_id, why)
            await self._store.settle_callback(due.session_id, "abandoned")
            return
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(due.tries - 1, 16))
        log.info("the callback of session %s is tried again in %g s: %s", due.session_id, pause, why)
        await self._store.delay_callback(due, pause)

    async def _send(self, due: DueCallback) -> Answer:
        callback = due.callback
        about = {"callId": callback["callId"], "subagentName": callback["subagentName"], "sessionId": due.session_id}
        content = json.dumps({**await self._result(due.session_id), **about}).encode()
        headers = {"content-type": "application/json", "idempotency-key": f"callback/{due.session_id}"}
        reach = cast("Reach", callback.get("reach", "public"))
        return await self._outbound.post(callback["url"], content, headers, reach=reach, seconds=_SECONDS, most=4_096)

    async def _result(self, session_id: str) -> JsonObject:
        # Imported here because it imports pydantic-ai, which an API process rarely needs.
        from perdure.harness.tools.children import output_of

        row = await self._store.session(session_id)
        if row is None:
            return {"kind": "session.failed", "error": _DELETED}
        if row.status == "completed":
            return {"kind": "session.completed", "output": await output_of(self._store, row)}
        message = (row.error or {}).get("message") or "The session has failed."
        return {"kind": "session.failed", "error": {"code": SESSION_FAILED, "message": message}}
