"""Calls that agents on other servers do. They are started, followed and cancelled in short requests, never held open.

What is known of a call is in the store. A result becomes a delivery to the session that waits, once: from the callback
of the other server, or from its stream, which is read from time to time in case that no callback comes.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast
from urllib.parse import quote

from perdure.agents.remote import RemoteAgent
from perdure.errors import AgentGone, PerdureError
from perdure.harness.tools.records import RequestedCall
from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import Attention, Coordinates
from perdure.protocol.wire import JsonObject
from perdure.session.remote import (
    DEPTH_HEADER,
    FAILED,
    START_FAILED,
    Progress,
    RemoteState,
    derive_callback_token,
    failure,
    hash_callback_token,
    progress,
)
from perdure.store.base import Store
from perdure.store.lifecycle import NewRemoteCall, RemoteCall

from .outbound import Answer, Lines, Outbound, Unreachable

log = logging.getLogger("perdure.remote")

#: Attempts to start a task, with pauses of 1, 2, 4, … seconds: about a minute.
_STARTS = 6
#: Seconds for one request of each kind, and for all requests of one look.
_START_SECONDS, _CANCEL_SECONDS, _READ_SECONDS, _LOOK_SECONDS = 20.0, 10.0, 5.0, 25.0
#: Seconds for the author's function that makes the headers of a request.
_HEADER_SECONDS = 10.0
#: Pauses between two looks at a stream on which nothing is new: the first one, and the longest. With a callback the
#: stream is read only in case that the callback never comes.
_PAUSES = {False: (1.0, 30.0), True: (20.0, 600.0)}
#: What is read of a stream at once, and the longest text that is kept of it.
_MOST_READ, _MOST_TEXT = 4_194_304, 1_048_576
#: Answers in a row that say that there is no such session, or that cannot be read.
_MISSES = 5
#: Seconds that a cancelled task has to end.
_STOP_SECONDS = 30.0

_LONGEST_ID = 255


@dataclass(frozen=True)
class Remote:
    """One call, and the agent that does it."""

    at: Coordinates
    call: RequestedCall
    #: None: it is no longer declared.
    agent: RemoteAgent | None

    @property
    def declared(self) -> RemoteAgent:
        if self.agent is None:
            raise AgentGone(f"The remote agent {self.call.tool!r} is no longer declared.", agent=self.call.tool)
        return self.agent

    @property
    def place(self) -> str:
        return f"{self.at.session_id}/{self.at.turn}/{self.at.step}/{self.call.call_id}"


@dataclass(frozen=True)
class Look:
    """What a look at one call has found: its session, the delivery with its result, and when to look again."""

    remote: Remote
    session_id: str | None = None
    result: DeliveryRef | None = None
    due: float | None = None


class RemoteCalls:
    """Each method may be repeated at any time."""

    def __init__(
        self,
        store: Store,
        *,
        public_url: str | None = None,
        secret: bytes | None = None,
        outbound: Outbound | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._public_url = public_url if secret else None
        self._secret = secret or b""
        self._outbound = outbound or Outbound()
        self._clock = clock

    async def begin(self, remote: Remote, deadline: float | None) -> None:
        """Write the call, unless that was done before. `deadline`: that of its turn or its session."""
        ends_at = self._clock() + remote.declared.timeout
        state = RemoteState(
            call_id=remote.call.call_id,
            name=remote.declared.name,
            calls_back=self._public_url is not None,
            ends_at=ends_at if deadline is None else min(ends_at, deadline),
        )
        token = self._token(remote) if state.calls_back else None
        call = NewRemoteCall(
            session_id=remote.at.session_id,
            action=remote.call.key,
            state=state.model_dump(mode="json"),
            token_hash=None if token is None else hash_callback_token(token),
        )
        await self._store.begin_remote_call(call)

    async def stop(self, remote: Remote) -> bool:
        """Note that the call is to be stopped; False if no result of it will come."""
        known = await self._known(remote)
        if known is None:
            return False
        call, state = known
        if call.ended:
            return await self._delivered(call) is not None
        if state.stop_at is None:
            # The pauses begin anew: who has cancelled waits for the end.
            state = state.model_copy(update={"stop_at": self._clock(), "due": 0.0, "polls": 0})
            await self._store.advance_remote_call(call, state.model_dump(mode="json"))
        # One that was not begun never will be.
        return state.tries > 0

    async def session_of(self, remote: Remote) -> str | None:
        """The id of the session that does the call, if it is known."""
        known = await self._known(remote)
        return None if known is None else known[1].session_id

    async def look(self, remotes: Sequence[Remote]) -> Sequence[Look]:
        """Do for each call what is due: start it, read its stream, or cancel it."""
        looks = [asyncio.create_task(self._look(each)) for each in remotes]
        try:
            await asyncio.wait(looks, timeout=_LOOK_SECONDS)
        finally:
            for each in looks:
                each.cancel()
            done = await asyncio.gather(*looks, return_exceptions=True)
        for found in done:
            if isinstance(found, Exception):
                raise found
        # One that was not done in time is due still.
        now = self._clock()
        found = zip(remotes, done, strict=True)
        return [each if isinstance(each, Look) else Look(remote, due=now) for remote, each in found]

    async def _look(self, remote: Remote) -> Look:
        known = await self._known(remote)
        if known is None:
            return Look(remote)
        call, state = known
        if not call.ended and state.due <= self._clock():
            ended = await self._advance_safely(remote, call, state)
            known = await self._known(remote)
            assert known is not None
            call, state = known
            if ended is not None and not call.ended:
                await self._store.end_remote_call(call, ended, state.after_end())
                call, state = (await self._known(remote)) or known
        if not call.ended:
            never = state.stop_at is not None and state.tries == 0
            return Look(remote, state.session_id, due=None if never else state.due)
        return Look(remote, state.session_id, result=await self._delivered(call))

    async def _delivered(self, call: RemoteCall) -> DeliveryRef | None:
        """The delivery with the result, for a driver that may not have its signal."""
        rows = await self._store.deliveries(call.session_id, [names.delivery_of_call(call.session_id, call.action)])
        if not rows or not rows[0].unread or rows[0].ref is None:
            return None
        return DeliveryRef.model_validate({**rows[0].ref, "at": rows[0].accepted_at})

    async def _advance_safely(self, remote: Remote, call: RemoteCall, state: RemoteState) -> JsonObject | None:
        """The same as `_advance`. A call that breaks it is tried again later, and the others go on."""
        try:
            return await self._advance(remote, call, state)
        except PerdureError:
            raise
        except Exception as error:
            # Its text may quote a secret, or what the other server has sent.
            log.error("a call of the remote agent %s could not be advanced: %s", state.name, type(error).__name__)
        now = self._clock()
        if now >= state.ends_at or state.stop_at is not None:
            return failure(FAILED, "The task could not be followed. The other server may go on with it.")
        again = state.model_copy(update={"due": now + _PAUSES[False][1]})
        await self._store.advance_remote_call(call, again.model_dump(mode="json"))
        return None

    async def _advance(self, remote: Remote, call: RemoteCall, state: RemoteState) -> JsonObject | None:
        """Do what is due for one call; returns its result if it has one now."""
        now = self._clock()
        if state.stop_at is not None:
            return await self._advance_stopped(remote, call, state, now)
        if now >= state.ends_at:
            reachable = remote.agent is not None and state.session_id is not None
            confirmed = reachable and await self._cancel(remote, state.session_id or "")
            more = "" if confirmed or state.tries == 0 else " The other server may go on with it."
            code = START_FAILED if state.session_id is None else FAILED
            return failure(code, f"The task has not ended in time.{more}")
        if remote.agent is None:
            # Not raised: the driver would repeat this look, and process no cancel meanwhile.
            gone = Attention(code=AgentGone.code, message=f"The remote agent {state.name!r} is no longer declared.")
            await self._store.set_attention(remote.at.session_id, gone)
            await self._later(call, state)
            return None
        if state.session_id is None:
            return await self._start(remote, call, state)
        return await self._follow(remote, call, state)

    # --- the start ---

    async def _start(self, remote: Remote, call: RemoteCall, state: RemoteState) -> JsonObject | None:
        if state.tries >= _STARTS:
            return failure(START_FAILED, "The other server could not be reached, or has not answered.")
        pause = min(2.0**state.tries, 30.0)
        # Before the request: if this worker dies after it, the next one knows that there may be a session.
        state = state.model_copy(update={"tries": state.tries + 1, "due": self._clock() + pause})
        await self._store.advance_remote_call(call, state.model_dump(mode="json"))
        try:
            answer = await self._post_start(remote, state)
        except Unreachable as failed:
            return failure(START_FAILED, str(failed)) if state.tries >= _STARTS else None
        if answer.is_transient:
            refused = failure(START_FAILED, f"The other server has answered {answer.status}.")
            return refused if state.tries >= _STARTS else None
        session_id = _session_id(answer)
        if not answer.is_success or session_id is None:
            return failure(START_FAILED, f"The other server has refused the task: it has answered {answer.status}.")
        due = self._clock() + (_PAUSES[True][0] if state.calls_back else 0.0)
        state = state.model_copy(update={"session_id": session_id, "due": due})
        await self._store.advance_remote_call(call, state.model_dump(mode="json"))
        return None

    async def _post_start(self, remote: Remote, state: RemoteState) -> Answer:
        arguments = remote.call.input
        schema = arguments.get("outputSchema") or arguments.get("output_schema") or remote.declared.output_schema
        body: JsonObject = {
            "message": arguments.get("message"),
            "mode": "task",
            # Beyond the contract: servers that do not know it ignore it.
            "deadline": datetime.fromtimestamp(state.ends_at, UTC).isoformat(),
        }
        if schema is not None:
            body["outputSchema"] = schema
        if state.calls_back and self._public_url is not None:
            token = self._token(remote)
            url = f"{self._public_url}/eve/v1/callback/{token}"
            body["callback"] = {"callId": state.call_id, "subagentName": state.name, "token": token, "url": url}
        depth = remote.call.child.depth if remote.call.child else 1
        return await self._post(
            remote,
            remote.declared.sessions_url,
            body,
            min(_START_SECONDS, max(1.0, state.ends_at - self._clock())),
            # The same for each attempt: a server that knows such keys starts one session.
            {"idempotency-key": _key(remote), DEPTH_HEADER: str(depth)},
        )

    # --- the stream ---

    async def _follow(self, remote: Remote, call: RemoteCall, state: RemoteState) -> JsonObject | None:
        assert state.session_id is not None
        try:
            read = await self._read(remote, state.session_id, state.next)
        except Unreachable:
            await self._later(call, state)
            return None
        if read.too_long:
            return failure(FAILED, "The other server has sent an event that is too large.")
        if read.status != 200:
            return await self._missed(call, state, gone=read.status in (404, 410), transient=read.status >= 500)
        # In a thread: there may be half a million of them.
        found = await asyncio.to_thread(_progress, state, read.lines)
        if found is None:
            return await self._missed(call, state, gone=True)
        if found.ended is not None:
            return found.ended
        came = found.state.next > state.next
        state = found.state.model_copy(update={"misses": 0})
        if len(state.text or "") > _MOST_TEXT:
            state = state.model_copy(update={"text": (state.text or "")[:_MOST_TEXT]})
        await self._later(call, state.model_copy(update={"polls": 0}) if came else state)
        return None

    async def _missed(
        self, call: RemoteCall, state: RemoteState, *, gone: bool, transient: bool = False
    ) -> JsonObject | None:
        """An answer that does not help. Where a callback may come, a refusal to show the stream is no verdict."""
        counts = not transient and (gone or not state.calls_back)
        state = state.model_copy(update={"misses": state.misses + counts})
        if state.misses >= _MISSES:
            return failure(FAILED, "The other server does not show the session that it has started.")
        await self._later(call, state)
        return None

    async def _later(self, call: RemoteCall, state: RemoteState) -> None:
        first, longest = _PAUSES[state.calls_back and state.stop_at is None]
        pause = min(first * 2 ** min(state.polls, 16), longest)
        due = min(self._clock() + pause, max(state.ends_at, self._clock()))
        state = state.model_copy(update={"polls": state.polls + 1, "due": due})
        await self._store.advance_remote_call(call, state.model_dump(mode="json"))

    # --- the end ---

    async def _advance_stopped(
        self, remote: Remote, call: RemoteCall, state: RemoteState, now: float
    ) -> JsonObject | None:
        """Cancel the session there; one that does not confirm that is abandoned, and the result says so."""
        if state.tries == 0:
            return None
        assert state.stop_at is not None
        abandoned = failure(
            FAILED, "The task was stopped here. The other server has not confirmed that, and may go on with it."
        )
        if remote.agent is None or state.session_id is None or now >= state.stop_at + _STOP_SECONDS:
            return abandoned
        match await self._cancel(remote, state.session_id):
            case True:
                return await self._follow(remote, call, state)
            case False:
                return abandoned
            case None:
                await self._later(call, state)
                return None

    async def _cancel(self, remote: Remote, session_id: str) -> bool | None:
        """Ask the other server to cancel the session. False: it does not do that; None: it cannot be asked now."""
        try:
            answer = await self._post(remote, f"{_session_url(remote, session_id)}/cancel", {}, _CANCEL_SECONDS)
        except Unreachable:
            return None
        if answer.is_transient:
            return None
        said = _json(answer.body)
        return answer.is_success and said.get("status") in ("accepted", "no_active_turn")

    # --- requests ---

    async def _post(
        self, remote: Remote, url: str, body: JsonObject, seconds: float, headers: Mapping[str, str] | None = None
    ) -> Answer:
        sent = {**await self._headers(remote), "content-type": "application/json", **(headers or {})}
        content = json.dumps(body).encode()
        # The author has chosen the server, which may well be on a private network.
        return await self._outbound.post(url, content, sent, reach="private", seconds=seconds)

    async def _read(self, remote: Remote, session_id: str, start: int) -> Lines:
        url = f"{_session_url(remote, session_id)}/stream?startIndex={start}"
        return await self._outbound.lines(
            url,
            await self._headers(remote),
            reach="private",
            seconds=_READ_SECONDS,
            most=_MOST_READ,
            is_last=_is_last,
        )

    async def _headers(self, remote: Remote) -> dict[str, str]:
        try:
            # It may ask a server of its own, and a call must end in time all the same.
            async with asyncio.timeout(_HEADER_SECONDS):
                return await remote.declared.request_headers()
        except Exception as error:
            # Its text may quote a secret.
            log.warning(
                "the headers for the remote agent %s cannot be had: %s", remote.declared.name, type(error).__name__
            )
            raise Unreachable("The credentials for the other server cannot be had.") from None

    def _token(self, remote: Remote) -> str:
        return derive_callback_token(self._secret, remote.place)

    async def _known(self, remote: Remote) -> tuple[RemoteCall, RemoteState] | None:
        call = await self._store.remote_call(remote.at.session_id, remote.call.key)
        return None if call is None else (call, RemoteState.model_validate(call.state))


def _session_url(remote: Remote, session_id: str) -> str:
    return f"{remote.declared.sessions_url}/{quote(session_id, safe='')}"


def _key(remote: Remote) -> str:
    return "remote-" + hashlib.sha256(remote.place.encode()).hexdigest()[:40]


def _session_id(answer: Answer) -> str | None:
    found = answer.headers.get("x-eve-session-id") or _json(answer.body).get("sessionId")
    usable = isinstance(found, str) and 0 < len(found) <= _LONGEST_ID and found.isprintable() and found.isascii()
    return found if usable else None


def _json(body: bytes) -> dict[str, Any]:
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _progress(state: RemoteState, lines: Sequence[bytes]) -> Progress | None:
    """The state after these lines; None if one of them is no event."""
    events = [_json(line) for line in lines if line.strip()]
    return progress(state, events) if all(events) else None


def _is_last(line: bytes) -> bool:
    return b"session." in line and _json(line).get("type") in ("session.completed", "session.failed")
