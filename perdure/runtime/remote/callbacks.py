"""Callbacks: those of other servers are delivered to the sessions that wait, and those of our sessions are repeated."""

from __future__ import annotations

import asyncio
import hmac
import logging
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from perdure.errors import CallbackNotPending, Unavailable
from perdure.protocol.wire import JsonObject
from perdure.runtime.sweeper import repeating
from perdure.session.remote import RemoteState, hash_callback_token, reported
from perdure.store.base import Store

if TYPE_CHECKING:
    from perdure.harness.remote.callbacks import CallbackSender
    from perdure.runtime.signals import Signals

log = logging.getLogger("perdure.callbacks")

#: How many are tried at once: a server that does not answer takes half a minute, and the others do not wait for it.
_PAGE = 50


class Callbacks:
    """Several processes may do this at once: each callback is delivered by one of them at a time."""

    def __init__(self, store: Store, signals: Signals, *, every: float = 3.0) -> None:
        self._store = store
        self._signals = signals
        self._every = every
        self._sender: CallbackSender | None = None

    async def accept(self, token: str, report: JsonObject) -> None:
        """Deliver what another server reports to the session that waits; `CallbackNotPending` if none does.

        `report`: the body of the request, with its kind, `callId` and `subagentName` checked.
        """
        call = await self._store.remote_call_by_token(hash_callback_token(token))
        if call is None:
            raise CallbackNotPending
        state = RemoteState.model_validate(call.state)
        if not (_same(state.call_id, report["callId"]) and _same(state.name, report["subagentName"])):
            raise CallbackNotPending
        session_id = report.get("sessionId")
        if state.session_id is None and _is_id(session_id):
            state = state.model_copy(update={"session_id": session_id})
        accepted = await self._store.end_remote_call(call, reported(report), state.after_end())
        if accepted is None:
            raise CallbackNotPending
        await self._signals.deliver(accepted.delivery, unsignalled=accepted.unsignalled)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Deliver what is due repeatedly while this context is open."""
        return repeating(
            self.sweep,
            (self._every * 0.8, self._every * 1.2),
            away="callbacks cannot be looked for now",
            failed="callbacks could not be delivered",
        )

    async def sweep(self) -> None:
        """Try each callback that is due once. A driver does that first, so these have failed, or lost their driver."""
        due = await self._store.due_callbacks(_PAGE)
        if not due:
            return
        # Imported here because most API processes never deliver one.
        from perdure.harness.remote.callbacks import CallbackSender

        sender = self._sender = self._sender or CallbackSender(self._store)

        async def deliver(session_id: str) -> None:
            try:
                await sender.deliver(session_id)
            except Unavailable as away:
                log.warning("the callback of session %s is tried later: %s", session_id, away.message)
            except Exception as error:
                # It is due again when its lease has ended. The text may quote the address.
                log.error("the callback of session %s could not be tried: %s", session_id, type(error).__name__)

        await asyncio.gather(*map(deliver, due))


def _same(one: str, other: object) -> bool:
    return isinstance(other, str) and hmac.compare_digest(one.encode(), other.encode(errors="surrogatepass"))


def _is_id(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= 255 and text.isascii() and text.isprintable()
