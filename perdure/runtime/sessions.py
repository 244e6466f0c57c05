"""Sessions from the outside: start one, deliver to one, look at them.

This is what the HTTP API stands on, and what trusted code uses directly:

    try:
        await sessions.deliver(token, "hello")
    except NoActiveSession:
        await sessions.start("concierge", "hello", token=token)

or `deliver_or_start`, which does the same without a race.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TypedDict

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError

from perdure.agents.agent import DEMO
from perdure.agents.registry import AgentRegistry
from perdure.errors import NoActiveSession, SessionGone, SessionNotFound, TokenConflict, Unavailable
from perdure.protocol import names
from perdure.protocol.deliveries import Capabilities, DeliveryBody, Message, Mode, Receipt, summary
from perdure.protocol.principals import LOCAL, Principal
from perdure.session import tokens
from perdure.session.state import SessionState
from perdure.store.base import Accepted, NewSession, SessionPage, SessionQuery, SessionRow, Store

from . import ids
from .answers import Answers
from .asked import Asked, first_reference, unheard
from .cancelling import Cancellation, Cancelled
from .driver import AWAY, RPC_PATIENCE, Driver
from .inputs import Inputs
from .sweeper import Sweeper


@dataclass(frozen=True)
class Description:
    """A session as an operator sees it."""

    row: SessionRow
    workflow_id: str
    # None when Temporal cannot say right now.
    run_id: str | None
    workflow_status: str | None
    ui_url: str


class _Once(TypedDict):
    body: DeliveryBody
    principal: Principal
    idempotency_key: str | None
    same_as: tuple[str, ...]


class Sessions:
    """The way in. One instance serves any number of callers."""

    def __init__(
        self,
        store: Store,
        client: Client,
        *,
        secret: bytes,
        task_queue: str = "perdure",
        ui_url: str = "http://127.0.0.1:8233",
        ui_detail: bool = True,
        agents: AgentRegistry | None = None,
    ) -> None:
        """`agents`: those whose approvals may be changed, and who say what a message does while they wait."""
        self._store = store
        self._client = client
        self._secret = secret
        self._task_queue = task_queue
        self._ui_url = ui_url.rstrip("/")
        self._ui_detail = ui_detail
        self._driver = Driver(client)
        self._agents = agents
        self._answers = Answers(store, self._driver, agents)
        self._cancellation = Cancellation(store, self._driver)
        self.inputs = Inputs(store, self._answers)
        self.sweeper = Sweeper(store, self._driver)

    # --- in -------------------------------------------------------------------------------------------------

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
    ) -> Receipt:
        """Start a session with its first delivery. `TokenConflict` when a live session owns `token`.

        Two requests with one key are the same if their bodies are, and `same_as`: by default, what is asked for.
        """
        body = body or DeliveryBody(message=message, principal=principal)
        session_id = ids.session_id()
        session = NewSession(
            session_id=session_id,
            agent=agent,
            mode=mode,
            token_hash=tokens.hashed(token or tokens.derive(self._secret, session_id)),
            principal=principal,
            capabilities=capabilities or Capabilities(request_input=mode == "conversation"),
            title=_title(body),
        )
        about = same_as or ("start", agent, mode, token or "")
        delivery = Asked(session_id, body, principal, about, idempotency_key).delivery()
        accepted = await self._store.create_session(session, delivery)
        if accepted is not None and not accepted.fresh:
            return await self._started_before(accepted.delivery.session_id, accepted.delivery.delivery_id, token)
        await self._launch(session, delivery.delivery_id)
        return self._start_receipt(session_id, delivery.delivery_id, token)

    async def deliver(
        self,
        token: str,
        message: Message | None = None,
        *,
        body: DeliveryBody | None = None,
        session_id: str | None = None,
        principal: Principal = LOCAL,
        idempotency_key: str | None = None,
        coalesce: bool = False,
        same_as: tuple[str, ...] | None = None,
    ) -> Receipt:
        """Deliver to the session that owns `token`; `NoActiveSession` when there is none.

        With `session_id` the token must belong to that session.
        """
        body = body or DeliveryBody(message=message, principal=principal)
        token_hash = tokens.hashed(token)
        owner = await self._store.route(token_hash)
        about = same_as or ("deliver", token_hash, str(coalesce))
        if owner is None and session_id is not None and idempotency_key is not None:
            asked = Asked(session_id, body, principal, about, idempotency_key, token_hash, coalesce)
            return await self._delivered_before(asked)
        if owner is None or (session_id is not None and owner != session_id):
            raise NoActiveSession
        asked = Asked(owner, body, principal, about, idempotency_key, token_hash, coalesce)
        return await self._answers.take(asked) or await self._deliver(asked)

    async def deliver_or_start(
        self,
        token: str,
        agent: str,
        message: Message | None = None,
        *,
        body: DeliveryBody | None = None,
        principal: Principal = LOCAL,
        idempotency_key: str | None = None,
    ) -> Receipt:
        """Deliver to the owner of `token`, or start a session that owns it. Many callers at once: one session."""
        body = body or DeliveryBody(message=message, principal=principal)
        # Whether the first try started or delivered must not decide what a repeated one is told.
        once: _Once = {
            "body": body,
            "principal": principal,
            "idempotency_key": idempotency_key,
            "same_as": (token, agent),
        }
        while True:
            try:
                return await self.deliver(token, **once)
            except NoActiveSession:
                pass
            try:
                return await self.start(agent, token=token, **once)
            except TokenConflict:
                # Somebody was faster: the token has an owner now, and the next delivery finds it.
                continue

    async def cancel(
        self, session_id: str, *, turn_id: str | None = None, principal: Principal | None = None
    ) -> Cancelled:
        """Stop the turn that runs, or withdraw what it waits for; `no_active_turn` when there is nothing to stop."""
        return await self._cancellation.cancel(await self.get(session_id, principal), turn_id)

    # --- look -----------------------------------------------------------------------------------------------

    async def get(self, session_id: str, principal: Principal | None = None) -> SessionRow:
        """The session, if it is the caller's; anybody else's does not exist for them."""
        row = await self._store.session(session_id)
        if row is None or (principal is not None and row.principal.owner != principal.owner):
            raise SessionNotFound
        return row

    async def list(self, query: SessionQuery) -> SessionPage:
        return await self._store.sessions(query)

    async def describe(self, session_id: str, principal: Principal | None = None) -> Description:
        row = await self.get(session_id, principal)
        run_id, status = await self._workflow(session_id)
        url = f"{self._ui_url}/namespaces/{self._client.namespace}/workflows/{session_id}"
        return Description(row=row, workflow_id=session_id, run_id=run_id, workflow_status=status, ui_url=url)

    async def _workflow(self, session_id: str) -> tuple[str | None, str | None]:
        try:
            found = await self._client.get_workflow_handle(session_id).describe(rpc_timeout=timedelta(seconds=2))
        except AWAY:
            return None, None
        return found.run_id, found.status.name.lower() if found.status else None

    # --- deliveries -----------------------------------------------------------------------------------------

    async def _deliver(self, asked: Asked) -> Receipt:
        try:
            accepted = await self._store.accept(asked.delivery())
        except SessionGone:
            raise NoActiveSession from None
        # Also when the delivery is an old one: whoever accepted it may have died before the signal. The driver hears
        # an id once.
        if unheard(accepted.delivery):
            await self._signal(asked, accepted)
        return await self._receipt(asked, accepted)

    async def _signal(self, asked: Asked, accepted: Accepted) -> None:
        row = accepted.delivery
        try:
            await self._driver.deliver(row.session_id, asked.ref(row))
        except (NoActiveSession, Unavailable):
            # Too late to take back: a turn has heard it, so it was delivered.
            if accepted.fresh and not await self._store.withdraw(row.session_id, row.delivery_id):
                return
            raise

    async def _receipt(self, asked: Asked, accepted: Accepted) -> Receipt:
        row = accepted.delivery
        # The first time it may have been an answer: then the receipt said what it answered.
        inputs = () if accepted.fresh else await self._answers.outcomes(asked, row.delivery_id)
        return Receipt(
            session_id=row.session_id, delivery_id=row.delivery_id, inputs=inputs, deduplicated=not accepted.fresh
        )

    async def _delivered_before(self, asked: Asked) -> Receipt:
        """The first receipt of a repeated request whose token has lost its session since."""
        try:
            accepted = await self._store.accept(asked.delivery())
        except SessionGone:
            raise NoActiveSession from None
        if accepted.fresh:
            # It was not a repeated one. No signal went out, so nobody has heard it.
            await self._store.withdraw(asked.session_id, accepted.delivery.delivery_id)
            raise NoActiveSession
        return await self._receipt(asked, accepted)

    # --- Temporal -------------------------------------------------------------------------------------------

    async def _started_before(self, session_id: str, delivery_id: str, token: str | None) -> Receipt:
        row = await self._store.session(session_id)
        if row is not None and row.status == "starting":
            # Whoever wrote the row may have died before Temporal heard of it. Starting twice is starting once.
            await self._launch(
                NewSession(
                    session_id=session_id,
                    agent=row.agent,
                    mode=row.mode,
                    token_hash=tokens.hashed(token or tokens.derive(self._secret, session_id)),
                    principal=row.principal,
                    capabilities=row.capabilities,
                ),
                delivery_id,
                discard=False,
            )
        receipt = self._start_receipt(session_id, delivery_id, token)
        return receipt.model_copy(update={"deduplicated": True})

    async def _launch(self, session: NewSession, delivery_id: str, *, discard: bool = True) -> None:
        state = SessionState(
            session_id=session.session_id,
            agent=session.agent,
            model=self._model(session.agent),
            mode=session.mode,
            capabilities=session.capabilities,
            token_hash=session.token_hash,
        ).hears(first_reference(delivery_id, session.token_hash))
        try:
            await self._client.start_workflow(
                names.SESSION_WORKFLOW,
                state.model_dump(mode="json"),
                id=session.session_id,
                task_queue=names.queue(self._task_queue, names.SESSIONS_QUEUE),
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                static_summary=self._summary(session),
                task_timeout=timedelta(seconds=names.DECISION_SECONDS),
                memo={"agent": session.agent, "model": state.model, "mode": session.mode},
                rpc_timeout=RPC_PATIENCE,
            )
        except WorkflowAlreadyStartedError:
            return
        except AWAY as error:
            if discard:
                # If Temporal did take it after all, its first turn finds no session, and ends without a trace.
                await self._store.discard_session(session.session_id)
            raise Unavailable("The session could not be started; try again.") from error

    def _start_receipt(self, session_id: str, delivery_id: str, token: str | None) -> Receipt:
        return Receipt(
            session_id=session_id,
            delivery_id=delivery_id,
            continuation_token=token or tokens.derive(self._secret, session_id),
        )

    def _model(self, name: str) -> str | None:
        """What the Temporal UI shows until a model has answered."""
        agent = self._agents.get(name) if self._agents else None
        return (agent.model or DEMO) if agent else None

    def _summary(self, session: NewSession) -> str:
        if not self._ui_detail or not session.title:
            return session.agent
        return f"{session.agent}: {session.title}"


def _title(body: DeliveryBody) -> str | None:
    """The first words, for lists and for the Temporal UI."""
    if body.message is None:
        return None
    words = " ".join(summary(body.message)[:400].split())
    return words if len(words) <= 80 else words[:79] + "…"
