"""Sessions from outside: start one, deliver to one, read them.

This is what the HTTP API uses, and what `perdure.connect` gives to trusted code:

    try:
        await sessions.deliver(token, "hello")
    except NoActiveSession:
        await sessions.start("concierge", "hello", token=token)

or `deliver_or_start`, which does the same without a race.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypedDict, get_args

from pydantic import ValidationError
from temporalio.client import Client

from perdure.agents.registry import AgentRegistry
from perdure.bounds import shortened, whole
from perdure.errors import Invalid, NoActiveSession, SessionGone, SessionNotFound, TokenConflict, Unavailable
from perdure.protocol import names
from perdure.protocol.deliveries import (
    LOCAL,
    Capabilities,
    DeliveryBody,
    FilePart,
    InputResponse,
    Message,
    Mode,
    Principal,
    Receipt,
    TextPart,
    summary,
)
from perdure.protocol.events import Event, EventType, NewEvent
from perdure.protocol.wire import JsonObject
from perdure.session.state import derive_token, hash_token
from perdure.store.base import Store, events_of
from perdure.store.values import Accepted, DeliveryRow, NewSession, SessionPage, SessionQuery, SessionRow, ShownStatus

from . import deliveries
from .connect import ABSENT, in_time
from .dead_letters import DeadLetters
from .deliveries import CallerRequest, reference
from .forks import ForkReceipt, Forks
from .inputs import Answers, Inputs
from .reconciler import Reconciler
from .signals import DriverClient, Signals
from .sweeper import Sweeper


@dataclass(frozen=True)
class Description:
    """A session as an operator sees it."""

    row: SessionRow
    workflow_id: str
    # None when Temporal does not answer.
    run_id: str | None
    workflow_status: str | None
    ui_url: str


_NEWEST = SessionQuery()

#: How often a token may find and lose its session while one request is served.
_TRIES = 5


class _Arguments(TypedDict):
    """The arguments that `start` and `deliver` have in common."""

    body: DeliveryBody
    principal: Principal
    idempotency_key: str | None
    same_as: tuple[str, ...]


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
    ) -> None:
        """`agents`: needed to validate changed arguments of approvals, and for `while_waiting` of an agent."""
        self._store = store
        self._client = client
        self._secret = secret
        self._ui_url = ui_url.rstrip("/")
        self._inbox_limit = inbox_limit
        driver = DriverClient(client, task_queue)
        self._signals = Signals(store, driver, agents, ui_detail=ui_detail)
        self._answers = Answers(store, self._signals, agents)
        self.inputs = Inputs(store, self._answers, inbox_limit=inbox_limit)
        self.dead_letters = DeadLetters(store, self._signals)
