"""Sessions from outside: start one, deliver to one, read them.

This is what the HTTP API uses, and what `perdure.connect` gives to trusted code:

    try:
        await sessions.deliver(token, "hello")
    except NoActiveSession:
        await sessions.start("concierge", "hello", token=token)

or `deliver_or_start`, which does the same without a race.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TypedDict, Unpack, get_args

from temporalio.client import Client

from perdure.agents.registry import AgentRegistry, bounds_of
from perdure.agents.run import RunRegistry
from perdure.bounds import whole
from perdure.errors import Invalid, NoActiveSession, SessionGone, SessionNotFound, TokenConflict, Unavailable
from perdure.protocol.deliveries import (
    CLEAR,
    COMPACT,
    LOCAL,
    MAIN,
    RESET,
    Capabilities,
    DeliveryBody,
    InputResponse,
    Message,
    Mode,
    Principal,
    QueueMode,
    Receipt,
)
from perdure.protocol.events import Event
from perdure.protocol.wire import JsonObject
from perdure.session.queue import checked_mode, same_request
from perdure.session.state import derive_token, hash_token
from perdure.store.base import Store
from perdure.store.deliveries import Accepted, DeliveryRow
from perdure.store.engine.cursors import SessionSearch, search_sessions
from perdure.store.follow import events_of
from perdure.store.inputs import Waits
from perdure.store.lifecycle import Deletion
from perdure.store.values import NewSession, SessionPage, SessionQuery, SessionRow, ShownStatus

from . import deliveries
from .dead_letters import DeadLetters
from .deletions import Deletions
from .deliveries import CallerRequest, checked_bounds, message_body, new_tags, reference, title_of, with_extras
from .drivers.client import DriverClient
from .drivers.liveness import Description, Liveness, description_of
from .forks import ForkPlace, ForkReceipt, Forks
from .inbox import Dispatches, Executions, Inbox, LaneChange, Lanes, ShownLane
from .inputs import Answers, Inputs
from .progress import Checkpoints
from .reconciler import Reconciler
from .remote.callbacks import Callbacks
from .reports.family import Family, family_of
from .reports.health import Health
from .reports.why import Why, why
from .runs import Runs
from .signals import Cancelled, Signals, cancel_turn
from .streams.instances import Instances
from .sweeper import Sweeper

_NEWEST = SessionQuery()
#: How often a token may find and lose its session while one request is served.
_TRIES = 5


class _Arguments(TypedDict):
    """The arguments that `start` and `deliver` have in common."""

    body: DeliveryBody
    principal: Principal
    idempotency_key: str | None
    same_as: tuple[str, ...]
    queue_mode: QueueMode | None


class Sessions:
    """Starts sessions, delivers to them, answers, cancels and shows them. One serves any number of callers."""

    def __init__(
        self,
        store: Store,
        client: Client,
        *,
        secret: bytes,
        task_queue: str = "perdure",
        ui_url: str = "http://127.0.0.1:8233",
        ui_detail: bool = True,
        inbox_limit: int = 100,
        agents: AgentRegistry | None = None,
        runs: RunRegistry | None = None,
    ) -> None:
        """`agents`: needed to validate changed arguments of approvals, and for `while_waiting` of an agent."""
        self._store = store
        self._client = client
        self._task_queue, self._serves_runs = task_queue, bool(runs)
        self._secret = secret
        self._ui_url = ui_url.rstrip("/")
        self._inbox_limit = inbox_limit
        self._driver = driver = DriverClient(client, task_queue)
        self._signals = Signals(store, driver, agents, ui_detail=ui_detail)
        self._answers = Answers(store, self._signals, agents)
        self.inbox = Inbox(store, self._signals)
        self.lanes = Lanes(store, self._signals)
        self.dispatch = Dispatches(store, self._signals, limit=inbox_limit).dispatch
        self.execute = Executions(store, self._signals).execute
        self.inputs = Inputs(store, self._answers, inbox_limit=inbox_limit)
        self._forks = Forks(store, self._signals, secret)
        self.runs = Runs(store, self._signals, runs)
        self.dead_letters = DeadLetters(store, self._signals)
        self.sweeper = Sweeper(store, self._signals)
        self.reconciler = Reconciler(store, driver)
        self.liveness = Liveness(driver)
        self.deletions = Deletions(store, driver, client)
        self.callbacks = Callbacks(store, self._signals)
        progress = Checkpoints(store, self.get)
        self.plan, self.snapshot, self.tag = progress.plan, progress.snapshot, progress.tag
        self.checkpoints, self.checkpoint = progress.list, progress.find
        self.roll_back = progress.roll_back
        self.instances = Instances(store, secret, self.deliver_or_start)

    # --- write ----------------------------------------------------------------------------------------------

    async def start(
        self,
        agent: str,
        message: Message | None = None,
        *,
        body: DeliveryBody | None = None,
        mode: Mode = "conversation",
        token: str | None = None,
        principal: Principal = LOCAL,
        capabilities: Capabilities | None = None,
        idempotency_key: str | None = None,
        same_as: tuple[str, ...] | None = None,
        deadline: datetime | None = None,
        idle_seconds: float | None = None,
        callback: JsonObject | None = None,
        depth: int | None = None,
        queue_mode: QueueMode | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Receipt:
        """Start a session with its first delivery. `TokenConflict` when a live session owns `token`.

        It ends at `deadline`, or after `idle_seconds` in which nothing happens in it, if its agent does not end it
        earlier.
        `queue_mode`: of its first message, as `deliver` takes it. `tags`: a few short texts by name, to find it by.
        `callback`: where its end is reported; `depth`: how many sessions are above it on other servers.
        Two requests with one idempotency key are the same if their bodies and `same_as` are equal. The default of
        `same_as` is made of the other arguments.
        """
        body = body or message_body(message, principal)
        if not agent or not agent.isprintable():
            raise Invalid("A session is started for an agent, by its name.")
        if mode not in get_args(Mode):
            raise Invalid(f"A session's mode is one of {', '.join(get_args(Mode))}.")
        ends_at = checked_bounds(deadline, idle_seconds)
        session_id = deliveries.session_id()
        session = NewSession(
            session_id=session_id,
            agent=agent,
            mode=mode,
            token_hash=hash_token(token or derive_token(self._secret, session_id)),
            named=token is not None,
            principal=principal,
            capabilities=capabilities or Capabilities(request_input=mode == "conversation"),
            title=title_of(body),
            bounds=bounds_of(self._signals.limits(agent), deadline=ends_at, idle_seconds=idle_seconds, depth=depth),
            callback=callback,
            tags=new_tags(tags),
        )
        about = same_as or ("start", agent, mode, token or "", *same_request(queue_mode))
        if deadline is not None or idle_seconds is not None:
            about = (*about, str(ends_at), str(idle_seconds))
        about = with_extras(about, callback=callback, tags=dict(session.tags))
        waits_as = checked_mode(queue_mode) or self._signals.lane(agent).mode
        request = CallerRequest(session_id, body, principal, about, idempotency_key, session.token_hash, waits_as)
        if ends_at is not None and ends_at <= time.time():
            return await self._too_late(request, token)
        accepted = await self._store.create_session(session, request.delivery())
        assert accepted is not None
        first = accepted.delivery
        if not accepted.fresh:
            return await self._repeated_start(first, token)
        signalled = await self._signals.start(session, reference(first))
        return self._start_receipt(first, token, delayed=not signalled)

    async def deliver(
        self,
        token: str,
        message: Message | None = None,
        *,
        body: DeliveryBody | None = None,
        session_id: str | None = None,
        principal: Principal = LOCAL,
        idempotency_key: str | None = None,
        queue_mode: QueueMode | None = None,
        coalesce: bool = False,
        same_as: tuple[str, ...] | None = None,
        lane: str = MAIN,
    ) -> Receipt:
        """Deliver to the session that owns `token`; `NoActiveSession` when there is none.

        `queue_mode`: what a message does while the session is busy; the default is that of its agent. `coalesce` is the
        mode `collect`. With `session_id` the token must belong to that session. A repeated request gets its first
        receipt, also when the token has another owner now. `lane`: the lane of the session that reads it, which begins
        with this if need be; the receipt names that.
        """
        body = body or message_body(message, principal)
        token_hash = hash_token(token)
        queue_mode = "collect" if coalesce else queue_mode
        collects = queue_mode == "collect"
        about = same_as or ("deliver", token_hash, str(collects), *(() if collects else same_request(queue_mode)))
        about = (*about, *(() if lane == MAIN else ("lane", lane)))
        owner = await self._owner(token_hash, session_id)
        settings = await self._signals.lane_of(owner, lane)
        request = CallerRequest(
            owner or session_id or "",
            body,
            principal,
            about,
            idempotency_key,
            token_hash,
            mode=checked_mode(queue_mode) or settings.mode,
            limit=settings.room(self._inbox_limit),
            overflow=settings.overflow,
            lane=lane,
        )
        if owner is None:
            return await self._repeated_delivery(request)
        return await (self._accept(request) if lane == MAIN else self._deliver_to_lane(request))

    async def deliver_or_start(
        self,
        token: str,
        agent: str,
        message: Message | None = None,
        *,
        body: DeliveryBody | None = None,
        principal: Principal = LOCAL,
        idempotency_key: str | None = None,
        queue_mode: QueueMode | None = None,
    ) -> Receipt:
        """Deliver to the owner of `token`, or start a session that owns it. Many callers at once: one session."""
        body = body or message_body(message, principal)
        # Whether the first try started or delivered must not decide the receipt of a repeated one.
        arguments: _Arguments = {
            "body": body,
            "principal": principal,
            "idempotency_key": idempotency_key,
            "same_as": (token, agent, *same_request(queue_mode)),
            "queue_mode": queue_mode,
        }
        for _ in range(_TRIES):
            if await self._owner(hash_token(token)) is not None:
                try:
                    return await self.deliver(token, **arguments)
                except NoActiveSession:
                    pass
            try:
                return await self.start(agent, token=token, **arguments)
            except TokenConflict:
                # Another caller was faster: the token has an owner now, and the next try delivers to it.
                continue
        raise Unavailable("Sessions that own this token come and go too quickly; try again.")

    async def cancel(
        self, session_id: str, *, turn_id: str | None = None, principal: Principal | None = None
    ) -> Cancelled:
        """Stop the turn that runs, or withdraw its input requests; `no_active_turn` when there is nothing to stop."""
        row = await self.get(session_id, principal)
        return await cancel_turn(self._store, self._signals, row.session_id, turn_id)

    async def compact(
        self, session_id: str, *, principal: Principal | None = None, idempotency_key: str | None = None
    ) -> Receipt:
        """Summarise the model's history between two turns, after what was delivered before."""
        return await self._control(COMPACT, session_id, principal, idempotency_key)

    async def clear(
        self, session_id: str, *, principal: Principal | None = None, idempotency_key: str | None = None
    ) -> Receipt:
        """Drop the model's history between two turns; open input requests are withdrawn. Nothing is deleted."""
        return await self._control(CLEAR, session_id, principal, idempotency_key)

    async def reset(
        self, session_id: str, *, principal: Principal | None = None, idempotency_key: str | None = None
    ) -> Receipt:
        """End the session after what was delivered before; open input requests are withdrawn."""
        return await self._control(RESET, session_id, principal, idempotency_key)

    async def answer(
        self,
        request_id: str,
        answer: str,
        *,
        arguments: JsonObject | None = None,
        reason: str | None = None,
        principal: Principal = LOCAL,
        idempotency_key: str | None = None,
    ) -> Receipt:
        """Answer one request: `approve` or `deny`, an option of a question, or text.

        `arguments` changes what is approved; `inputs.waiting` lists what a session asks. `ForbiddenResponder` when the
        request is for somebody else, `InputClosed` or `InputExpired` when it has another outcome.
        """
        row = await self.inputs.get(request_id, principal)
        chosen = "option_id" if row.request.kind == "approval" else "text"
        response = InputResponse(
            request_id=request_id,
            arguments=arguments,
            reason=None if reason is None else whole(reason),
            **{chosen: whole(answer)},
        )
        return await self.inputs.answer(response, principal, idempotency_key=idempotency_key)

    async def fork(
        self,
        session_id: str,
        turn: int | None = None,
        *,
        step: int | None = None,
        checkpoint: str | None = None,
        principal: Principal | None = None,
        idempotency_key: str | None = None,
    ) -> ForkReceipt:
        """Start a session that shares the turns of this one up to the end of `turn`, and continues from there.

        With `step`, only the steps of that turn up to this one are shared; `checkpoint` stands for the step in which it
        was taken. `ForkRefused` when that is no boundary, with the next earlier one. The fork has the session's owner.
        """
        place = ForkPlace(turn, step, checkpoint)
        owner = principal or (await self.get(session_id)).principal
        # Before its parent, which may have been deleted since.
        if (first := await self._forks.first(session_id, place, owner, idempotency_key)) is not None:
            return first
        return await self._forks.fork(await self.get(session_id, principal), place, owner, idempotency_key)

    async def configure_lane(
        self, session_id: str, lane: str, *, principal: Principal | None = None, **changes: Unpack[LaneChange]
    ) -> ShownLane:
        """Set `mode`, `cap` or `overflow` of a lane of this session, for what is accepted from now on.

        None takes one back to what the agent declares. The lane need not have begun.
        """
        return await self.lanes.configure(await self.get(session_id, principal), lane, changes)

    async def delete(self, session_id: str, *, principal: Principal | None = None, patience: float = 10.0) -> Deletion:
        """Delete the session for good; the result says how much there was.

        A turn that runs is stopped first. The result has no `finished_at` while something is left: Temporal needs about
        half a minute for the executions. An API process finishes the deletion; repeat the call to see its result.
        """
        if principal is not None and session_id.startswith("run_"):
            raise SessionNotFound
        return await self.deletions.delete(session_id, principal, patience)

    # --- look -----------------------------------------------------------------------------------------------

    async def get(self, session_id: str, principal: Principal | None = None) -> SessionRow:
        """The session, if the caller owns it; else `SessionNotFound`, as for an unknown one."""
        row = await self._store.session(session_id)
        if row is None or row.run is not None or (principal is not None and row.principal.owner != principal.owner):
            raise SessionNotFound
        return row

    async def list(self, query: SessionQuery = _NEWEST) -> SessionPage:
        """One page of the sessions that the query asks for, newest first."""
        if query.limit < 1:
            raise Invalid("A page has at least one session.")
        if query.status is not None and query.status not in get_args(ShownStatus):
            raise Invalid(f"A session's status is one of {', '.join(get_args(ShownStatus))}.")
        return await self._store.sessions(query)

    async def search(self, search: SessionSearch) -> SessionPage:
        """One page of the sessions that the search finds, newest first; short if it has looked at many others."""
        return await search_sessions(self._store, search)

    async def family(self, session_id: str, principal: Principal | None = None) -> Family:
        """The session, and all sessions that were started from the same root."""
        return await family_of(self._store, await self.get(session_id, principal))

    async def events(
        self, session_id: str, start: int = 0, *, follow: bool = True, principal: Principal | None = None
    ) -> AsyncGenerator[Event]:
        """The session's events from index `start` on. With `follow` it waits for more until the session has ended.

        A conversation waits for its next message without an end: leave the loop at `session.waiting`.
        """
        if start < 0:
            raise Invalid("The index of the first event is 0 or more.")
        await self.get(session_id, principal)
        async for event in events_of(self._store, session_id, start, follow=follow):
            yield event

    async def waits(self, session_ids: Sequence[str]) -> Mapping[str, Waits]:
        """What sessions wait for: people who are asked, or a turn that reads deliveries."""
        return await self._store.waits(session_ids) if session_ids else {}

    async def describe(self, session_id: str, principal: Principal | None = None) -> Description:
        """The session, and what Temporal says of its workflow; `SessionNotFound` when there is none."""
        return await description_of(self._client, await self.get(session_id, principal), self._ui_url)

    def health(self, pools: Sequence[str] = ()) -> Health:
        """What says how the deployment is. `pools`: those that the agents' tools need."""
        return Health(self._store, self._client, task_queue=self._task_queue, pools=pools, runs=self._serves_runs)

    async def why(self, session_id: str, principal: Principal | None = None) -> Why:
        """Why the session does not move: what it waits for, and who can help."""
        return await why(self._store, self._client, self._driver, await self.get(session_id, principal))

    # --- deliveries -----------------------------------------------------------------------------------------

    async def _owner(self, token_hash: str, session_id: str | None = None) -> str | None:
        """The session that owns the token; None when it is not `session_id`."""
        owner = await self._store.route(token_hash)
        return owner if session_id in (None, owner) else None

    async def _control(self, kind: str, session_id: str, principal: Principal | None, key: str | None) -> Receipt:
        """Deliver a control; `NoActiveSession` when the session has ended."""
        row = await self.get(session_id, principal)
        who = principal or row.principal
        body = DeliveryBody(kind=kind, principal=who)
        request = CallerRequest(row.session_id, body, who, (kind,), key, limit=self._inbox_limit)
        return await self._deliver(request)

    async def _accept(self, request: CallerRequest) -> Receipt:
        # A message may answer what the session asks, but not one that stops the turn that asks.
        answers = request.mode != "interrupt" or bool(request.body.input_responses)
        return (await self._answers.take(request) if answers else None) or await self._deliver(request)

    async def _deliver_to_lane(self, request: CallerRequest) -> Receipt:
        # Before the lane begins: the first request may have been read by one that has ended since.
        if request.idempotency_key is not None and (first := await self._store.first(request.delivery())) is not None:
            return await self._deliver(replace(request, session_id=first.delivery.session_id))
        return await self.lanes.deliver(await self.get(request.session_id), request, self._accept)

    async def _deliver(self, request: CallerRequest) -> Receipt:
        try:
            accepted = await self._store.accept(request.delivery())
        except SessionGone:
            raise NoActiveSession from None
        # It is accepted from here on, whatever fails. An earlier one is signalled again: the process that accepted it
        # may have died before the signal, and the driver ignores an id that it knows.
        row = accepted.delivery
        # With one that interrupts, the cancel request goes that it has made.
        unsignalled = accepted.unsignalled or row.mode == "interrupt"
        signalled = not row.unread or await self._signals.deliver(row, unsignalled=unsignalled)
        return await self._receipt(request, accepted, delayed=not signalled)

    async def _receipt(self, request: CallerRequest, accepted: Accepted, *, delayed: bool = False) -> Receipt:
        row = accepted.delivery
        # The first request may have been an answer; then its receipt had the outcomes.
        inputs = () if accepted.fresh else await self._answers.outcomes(request, row.delivery_id)
        return Receipt(
            session_id=row.session_id,
            delivery_id=row.delivery_id,
            inputs=inputs,
            deduplicated=not accepted.fresh,
            delayed=delayed,
        )

    async def _repeated_delivery(self, request: CallerRequest) -> Receipt:
        """The first receipt of a repeated request whose token has no session any more."""
        first = await self._store.first(request.delivery()) if request.idempotency_key is not None else None
        if first is None:
            raise NoActiveSession
        return await self._receipt(request, first)

    async def _too_late(self, request: CallerRequest, token: str | None) -> Receipt:
        """The first receipt of a repeated request whose deadline has passed meanwhile."""
        first = await self._store.first(request.delivery()) if request.idempotency_key is not None else None
        if first is None:
            raise Invalid("A session's deadline must be in the future.")
        return await self._repeated_start(first.delivery, token)

    async def _repeated_start(self, first: DeliveryRow, token: str | None) -> Receipt:
        """Signal again: the first process may have died before it started the workflow. Starting is idempotent."""
        signalled = not first.unread or await self._signals.deliver(first, unsignalled=True)
        return self._start_receipt(first, token, delayed=not signalled, deduplicated=True)

    def _start_receipt(
        self, first: DeliveryRow, token: str | None, *, delayed: bool, deduplicated: bool = False
    ) -> Receipt:
        own = token or derive_token(self._secret, first.session_id)
        known = Receipt(session_id=first.session_id, delivery_id=first.delivery_id, continuation_token=own)
        return known.model_copy(update={"delayed": delayed, "deduplicated": deduplicated})
