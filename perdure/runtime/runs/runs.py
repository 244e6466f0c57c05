"""Runs from outside. This is what the HTTP API uses, the commands, and `perdure.connect`.

started = await sessions.runs.start("nightly", {"day": "2027-01-31"})
record = await sessions.runs.wait(started.run_id)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, cast

from opentelemetry import propagate
from pydantic import ValidationError

from perdure.agents.run import RunRegistry
from perdure.agents.signature import problems
from perdure.bounds import DEEPEST, deeper_than, quoted
from perdure.errors import Invalid, RunNotFound, RunUnknown
from perdure.protocol import names
from perdure.protocol.deliveries import LOCAL, RUN, Capabilities, DeliveryBody, DeliveryRef, Principal
from perdure.protocol.dispatch import bounded_input
from perdure.protocol.events import Event
from perdure.runtime.deliveries import delivery_id, ulid
from perdure.runtime.signals import Signals, cancel_turn
from perdure.store.base import Store
from perdure.store.deliveries import Accepted, NewDelivery
from perdure.store.engine.cursors import packed, unpacked
from perdure.store.follow import events_of, looked_at_until
from perdure.store.runs import NewRun, RunPage, RunQuery, RunRecord
from perdure.store.values import NewSession, SessionRow


@dataclass(frozen=True)
class RunStarted:
    """The receipt of a run."""

    run_id: str
    deduplicated: bool = False
    # It is accepted, and its workflow is started later.
    delayed: bool = False


class Runs:
    """Starts, cancels and shows runs. One serves any number of callers."""

    def __init__(self, store: Store, signals: Signals, runs: RunRegistry | None = None) -> None:
        """`runs`: with them, unknown names and inputs that do not fit are refused here."""
        self._store = store
        self._signals = signals
        self._runs = runs

    def check_name(self, name: str) -> None:
        """Raise `RunUnknown` if this process knows its runs, and this is none of them."""
        if not name.isprintable() or (self._runs is not None and name not in self._runs):
            raise RunUnknown(f"No workflow named {quoted(name)!r} is served here.", name=name)

    async def start(
        self,
        name: str,
        input: Any = None,
        *,
        principal: Principal = LOCAL,
        idempotency_key: str | None = None,
    ) -> RunStarted:
        """Start a run. `Invalid` when the input does not fit; the same key and input get the same run."""
        self.check_name(name)
        given = self._checked(name, {} if input is None else input)
        run_id = f"{names.RUN_ID}{ulid()}"
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        session = NewSession(
            session_id=run_id,
            agent=name,
            mode="task",
            # No token has this hash: nobody delivers to a run.
            token_hash=f"run/{run_id}",
            principal=principal,
            capabilities=Capabilities(request_input=True),
            title=name,
            run=NewRun(name, given, cast("dict[str, Any]", carrier) or None),
        )
        accepted = await self._store.create_session(session, _delivery(session, given, idempotency_key))
        assert accepted is not None
        if accepted.fresh:
            return RunStarted(run_id, delayed=not await self._signals.start_run(session))
        return await self._repeated(accepted)

    async def _repeated(self, accepted: Accepted) -> RunStarted:
        """Signal again: the first process may have died before it started the workflow."""
        row = accepted.delivery
        signalled = not row.unread or await self._signals.deliver_all(row.session_id)
        return RunStarted(row.session_id, deduplicated=True, delayed=not signalled)

    def _checked(self, name: str, given: Any) -> Any:
        if deeper_than(given, DEEPEST):
            raise Invalid(f"The input is nested deeper than {DEEPEST} levels.")
        given = bounded_input(given)
        run = self._runs.get(name) if self._runs is not None else None
        if run is not None:
            try:
                run.read_input(given)
            except ValidationError as invalid:
                raise Invalid(f"Invalid input for {name}: {problems(invalid)}") from None
        return given

    async def cancel(self, run_id: str, *, principal: Principal | None = None) -> bool:
        """Stop the run, and what it waits for; False when it has ended. It ends with `run.cancelled`."""
        row = await self._row(run_id, principal)
        return (await cancel_turn(self._store, self._signals, row.session_id, None)).status == "accepted"

    async def get(self, run_id: str, principal: Principal | None = None) -> RunRecord:
        """The record of the run, if the caller owns it; else `RunNotFound`, as for an unknown one."""
        row = await self._row(run_id, principal)
        return await self._record(row.session_id)

    async def _record(self, run_id: str) -> RunRecord:
        record = await self._store.run(run_id)
        if record is None:
            raise RunNotFound
        return record

    async def needs(self, run_id: str) -> str | None:
        """The code for which the run needs the attention of an operator, if it does."""
        row = await self._store.session(run_id)
        return None if row is None or row.attention is None else row.attention["code"]

    async def list(self, query: RunQuery) -> RunPage:
        """One page of the runs that the query asks for, newest first."""
        return await self._store.runs(query)

    async def wait(self, run_id: str, within: float | None = None, *, principal: Principal | None = None) -> RunRecord:
        """The record of the run when it has ended, or after so many seconds."""
        await self._row(run_id, principal)
        return await looked_at_until(
            self._store, run_id, lambda: self._record(run_id), lambda record: record.ended, within
        )

    async def events(
        self, run_id: str, start: int = 0, *, follow: bool = True, principal: Principal | None = None
    ) -> AsyncGenerator[Event]:
        """The events of the run from index `start` on; with `follow`, until it has ended."""
        row = await self._row(run_id, principal)
        async for event in events_of(self._store, row.session_id, start, follow=follow):
            yield event

    async def _row(self, run_id: str, principal: Principal | None) -> SessionRow:
        row = await self._store.session(run_id)
        if row is None or row.run is None or (principal is not None and row.principal.owner != principal.owner):
            raise RunNotFound
        return row


def _delivery(session: NewSession, given: Any, key: str | None) -> NewDelivery:
    ref = DeliveryRef(id=delivery_id(), kind=RUN, token_hash=session.token_hash)
    digest = None
    if key is not None:
        digest = hashlib.sha256(json.dumps(["run", session.agent, given], sort_keys=True).encode()).hexdigest()
    return NewDelivery(
        session_id=session.session_id,
        delivery_id=ref.id,
        body=DeliveryBody(kind=RUN).model_dump(mode="json", exclude_none=True),
        owner=session.principal.owner,
        idempotency_key=key,
        digest=digest,
        ref=ref.model_dump(mode="json"),
    )


def write_cursor(place: tuple[str, str]) -> str:
    return packed(json.dumps({"s": place[0], "r": place[1]}, separators=(",", ":")))


def read_cursor(cursor: str | None) -> tuple[str, str] | None:
    """The place of a cursor; one that cannot be read is none."""
    match None if cursor is None else unpacked(cursor):
        case {"s": str(at), "r": str(run_id)} if (at + run_id).isascii() and (at + run_id).isprintable():
            return at, run_id
        case _:
            return None
