"""Dispatch: background work for a session, accepted once however often it is asked for.

Trusted code of any process dispatches, tools and runs too. A receipt outlives its session.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perdure.agents.registry import bounds_of
from perdure.bounds import quoted
from perdure.errors import (
    IdempotencyConflict,
    Invalid,
    NoActiveSession,
    SessionDeleted,
    SessionGone,
    SessionNotFound,
    TokenConflict,
    Unavailable,
)
from perdure.protocol import names
from perdure.protocol.deliveries import LOCAL, MAIN, Capabilities, DispatchReceipt, Principal, QueueMode
from perdure.protocol.dispatch import check_names, text_of
from perdure.runtime.deliveries import CallerRequest, message_body, reference, session_id, title_of
from perdure.runtime.signals import Signals
from perdure.session.queue import checked_mode, same_request
from perdure.session.state import hash_token, owned_token
from perdure.store.base import Store
from perdure.store.deliveries import Accepted, NewDelivery
from perdure.store.values import NewSession, SessionRow

from .lanes import Lanes

#: How often a token may find and lose its session while one request is served.
_TRIES = 5


class Dispatches:
    def __init__(self, store: Store, signals: Signals, *, limit: int | None = None) -> None:
        """`limit`: how many deliveries may wait in a session."""
        self._lanes = Lanes(store, signals)
        self._store = store
        self._signals = signals
        self._limit = limit

    async def dispatch(
        self,
        agent: str,
        to: str,
        input: Any,
        *,
        dispatch_id: str | None = None,
        principal: Principal | None = None,
        lane: str = MAIN,
        queue_mode: QueueMode | None = None,
    ) -> DispatchReceipt:
        """Accept the input for the session with this id, or for the owner of this token, which is started if need be.

        Text is the message itself, anything else is written as JSON. The same agent, target, input, lane and mode under
        one `dispatch_id` get the first receipt, also when the session has been deleted since; others are an
        `IdempotencyConflict`. Each principal has its own ids. `queue_mode`: what the message does while the session is
        busy, if not what its lane declares.
        """
        check_names(to, dispatch_id)
        mode = checked_mode(queue_mode)
        self._lanes.check(agent, lane)
        message = text_of(input)
        is_id = to.startswith(names.SESSION_ID)
        row = await self._store.session(to) if is_id else None
        # Trusted code without a principal speaks for the owner of the session; its ids are its own in any case.
        speaker = principal or (LOCAL if row is None else row.principal)
        if principal is not None and row is not None and row.principal.owner != principal.owner:
            # Another's session is answered like one that was never there.
            row = None
        # The id of a lane may be named, too.
        own = row.lane or MAIN if lane == MAIN and row is not None else lane
        # A session that begins with this has what its agent declares.
        main = await self._store.route(hash_token(to)) if row is None else row.lane_of or row.session_id
        settings = self._signals.lane(agent, own) if main is None else await self._signals.lane_of(main, own)
        request = CallerRequest(
            to if is_id else "",
            message_body(message, speaker),
            principal or LOCAL,
            ("dispatch", agent, to, *(() if lane == MAIN else (lane,)), *_same_mode(mode)),
            dispatch_id,
            "" if is_id else hash_token(to),
            mode=mode or settings.mode,
            limit=self._limit if self._limit is None else settings.room(self._limit),
            overflow=settings.overflow,
            lane=own,
        )
        try:
            if is_id:
                accepted = await self._deliver(request, agent, row, lane)
            else:
                accepted = await self._deliver_or_start(request, agent, lane)
        except SessionDeleted as deleted:
            return _kept_receipt(request.delivery(), deleted)
        row = accepted.delivery
        return DispatchReceipt(
            dispatch_id=dispatch_id or row.delivery_id,
            accepted_at=row.accepted_at,
            session_id=row.session_id,
            delivery_id=row.delivery_id,
            deduplicated=not accepted.fresh,
        )

    async def dispatch_owned(
        self,
        agent: str,
        to: str,
        input: Any,
        *,
        dispatch_id: str,
        principal: Principal,
        lane: str = MAIN,
        queue_mode: QueueMode | None = None,
    ) -> DispatchReceipt:
        """The same for tools and runs, whose names for sessions are those of one owner and one agent."""
        if not to.startswith(names.SESSION_ID):
            to = owned_token(principal.owner, agent, to)
        return await self.dispatch(
            agent, to, input, dispatch_id=dispatch_id, principal=principal, lane=lane, queue_mode=queue_mode
        )

    async def _deliver(self, request: CallerRequest, agent: str, row: SessionRow | None, lane: str) -> Accepted:
        """Deliver to a session that is named by its id, which may be that of a lane."""
        if (first := await self._store.first(request.delivery())) is not None:
            return await self._signalled(first)
        if row is None or row.run is not None:
            raise SessionNotFound
        if row.agent != agent:
            raise Invalid(f"This session is of another agent than {quoted(agent)!r}.")
        token_hash = await self._store.token_of(row.session_id)
        if token_hash is None:
            raise NoActiveSession
        if lane != MAIN:
            return await self._lanes.deliver(row, request, self._accept)
        try:
            return await self._accept(replace(request, token_hash=token_hash))
        except SessionGone:
            raise NoActiveSession from None

    async def _accept(self, request: CallerRequest) -> Accepted:
        return await self._signalled(await self._store.accept(request.delivery()))

    async def _deliver_or_start(self, request: CallerRequest, agent: str, lane: str) -> Accepted:
        for _ in range(_TRIES):
            owner = await self._store.route(request.token_hash)
            new = self._new_session(request, agent)
            delivery = replace(request, session_id=owner or new.session_id).delivery()
            # Before anything begins. With an owner and no lane, accepting it finds that as well.
            if (owner is None or lane != MAIN) and (first := await self._store.first(delivery)) is not None:
                return await self._signalled(first)
            try:
                if lane != MAIN and (main := await self._main(owner, new)) is not None:
                    return await self._lanes.deliver(main, request, self._accept)
                if owner is not None:
                    return await self._signalled(await self._store.accept(delivery))
                # Only a new session needs it: one that runs may be of an agent that this process does not know.
                self._signals.known_limits(agent)
                accepted = await self._store.create_session(new, delivery)
            except (NoActiveSession, SessionGone, TokenConflict):
                # The session has ended, or another caller has started one: the next try finds that.
                continue
            assert accepted is not None
            if not accepted.fresh:
                return await self._signalled(accepted)
            await self._signals.start(new, reference(accepted.delivery))
            return accepted
        raise Unavailable("Sessions that own this token come and go too quickly; try again.")

    async def _main(self, owner: str | None, new: NewSession) -> SessionRow | None:
        """The session whose lane is meant. If there is none it begins here, without a delivery of its own."""
        if owner is None:
            self._signals.known_limits(new.agent)
            await self._store.create_session(new, None)
            # What bounds the session in time is its driver, which no delivery starts.
            await self._signals.deliver_all(new.session_id)
        return await self._store.session(owner or new.session_id)

    def _new_session(self, request: CallerRequest, agent: str) -> NewSession:
        return NewSession(
            session_id=session_id(),
            agent=agent,
            mode="conversation",
            token_hash=request.token_hash,
            named=True,
            principal=request.principal,
            capabilities=Capabilities(request_input=True),
            title=title_of(request.body),
            bounds=bounds_of(self._signals.limits(agent)),
        )

    async def _signalled(self, accepted: Accepted) -> Accepted:
        """Signal it, if no turn has read it; the process that accepted it first may have died before its signal."""
        if accepted.delivery.unread:
            # With one that interrupts, the cancel request goes that it has made.
            interrupts = accepted.delivery.mode == "interrupt"
            unsignalled = accepted.unsignalled or not accepted.fresh or interrupts
            # What fails now is signalled by the sweeper.
            await self._signals.deliver(accepted.delivery, unsignalled=unsignalled)
        return accepted


def _same_mode(mode: QueueMode | None) -> tuple[str, ...]:
    """What the mode adds to the identity of a dispatch. Two words, so that no lane is taken for it."""
    return ("mode", *same_request(mode)) if same_request(mode) else ()


def _kept_receipt(again: NewDelivery, deleted: SessionDeleted) -> DispatchReceipt:
    """The receipt of a delivery whose session was deleted."""
    known = deleted.details
    if known.get("accepted_at") is None:
        # It was deleted by a build that kept no receipts.
        raise deleted
    if known["digest"] != again.digest:
        raise IdempotencyConflict(meta={"submissionId": known["delivery_id"]})
    return DispatchReceipt(
        dispatch_id=again.idempotency_key or known["delivery_id"],
        accepted_at=known["accepted_at"],
        session_id=known["session_id"],
        delivery_id=known["delivery_id"],
        deduplicated=True,
    )
