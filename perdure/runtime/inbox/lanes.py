"""Lanes: work of one session that goes on side by side.

A lane is a session of its own, with a workflow, a log and requests of its own, which belongs to the session. It begins
with a fork of what the session has said so far, when the first message comes for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TypedDict, TypeVar

from perdure.agents.agent import Lane
from perdure.agents.registry import bounds_of
from perdure.bounds import quoted
from perdure.errors import (
    ForkRefused,
    Invalid,
    InvalidDeclaration,
    NoActiveSession,
    SessionGone,
    SessionNotFound,
    TokenConflict,
    Unavailable,
    UnknownLane,
)
from perdure.protocol import names
from perdure.protocol.deliveries import MAIN, Overflow, QueueMode
from perdure.protocol.wire import JsonObject
from perdure.runtime.deliveries import CallerRequest
from perdure.runtime.deliveries import session_id as new_id
from perdure.runtime.signals import LANE_FIELDS, Signals
from perdure.session.queue import checked_mode
from perdure.store.base import Store
from perdure.store.lifecycle import NewFork, leaves_out
from perdure.store.values import LaneSettings, NewSession, SessionRow

T = TypeVar("T")

#: Lanes that every agent has.
OF_EVERY_AGENT = frozenset({MAIN, "cron", "heartbeat", "subagent"})
#: How often a lane may come and go while one message is delivered to it.
_TRIES = 5
#: How many turns back a place is looked for at which a lane can begin.
_LOOKED_AT = 20


#: No process accepts as many; a number of any size could not be stored.
_LARGEST_CAP = 1_000_000


@dataclass(frozen=True)
class OpenLane:
    """The session that is a lane of another one, and the token hash under which deliveries reach it.

    It is the hash of no token: who may deliver to the main session may deliver to its lanes.
    """

    session_id: str
    token_hash: str


class LaneChange(TypedDict, total=False):
    """What is set for a lane of one session; None: as its agent declares it. What is not named stays as it is."""

    mode: QueueMode | None
    cap: int | None
    overflow: Overflow | None


@dataclass(frozen=True)
class ShownLane:
    """A lane of a session, or what was set for one that has not begun."""

    name: str
    # None: it has not begun, or has ended.
    row: SessionRow | None
    queued: int
    # What holds for the next message, and what of it was set for this session.
    settings: Lane
    overrides: JsonObject


class Lanes:
    def __init__(self, store: Store, signals: Signals) -> None:
        self._store = store
        self._signals = signals

    async def configure(self, row: SessionRow, name: str, changes: LaneChange) -> ShownLane:
        """Set what holds for a lane of this session from now on, also before it begins; `row` may be any lane of it.

        A message that was accepted before keeps its mode. `NoActiveSession` when the session has ended.
        """
        main = await self._main_of(row)
        if main is None:
            raise SessionNotFound
        self.check(main.agent, name)
        try:
            known = await self._store.set_lane(main.session_id, name, _checked(changes))
        except SessionGone:
            raise NoActiveSession("The session has ended; its lanes cannot be set.") from None
        return await self._shown(known, name, (await self.of(main)).get(name))

    async def shown(self, row: SessionRow) -> Sequence[ShownLane]:
        """The lanes of the session, the main one first, and those for which something was set."""
        begun = await self.of(row)
        main = begun[MAIN]
        known = await self._store.lane_settings(main.session_id) or LaneSettings(main.agent)
        names = (*begun, *sorted(known.lanes.keys() - begun.keys()))
        return [await self._shown(known, name, begun.get(name)) for name in names]

    async def _shown(self, known: LaneSettings, name: str, row: SessionRow | None) -> ShownLane:
        queued = 0 if row is None else await self._store.count_unread(row.session_id)
        return ShownLane(name, row, queued, self._signals.lane_as_set(known, name), known.lanes.get(name, {}))

    def check(self, agent: str, name: str) -> None:
        """Raise `UnknownLane` unless every agent has this lane, or this one declares it."""
        declared = self._signals.lanes(agent)
        if name not in OF_EVERY_AGENT and name not in declared:
            known = quoted(", ".join(sorted({*OF_EVERY_AGENT, *declared})))
            raise UnknownLane(f"The agent {quoted(agent)!r} has no lane {quoted(name)!r}; it has {known}.")

    async def of(self, row: SessionRow) -> Mapping[str, SessionRow]:
        """The lanes of the session by their names, the main one first; those that have ended are left out.

        `row` is the session, or any lane of it.
        """
        main = await self._main_of(row)
        if main is None:
            raise SessionNotFound
        found = {MAIN: main}
        for lane in await self._store.lanes(main.session_id) if main.lane == MAIN else ():
            living = None if lane.ended else await self._store.session(lane.session_id)
            if living is not None:
                found[lane.name] = living
        return found

    async def deliver(
        self, row: SessionRow, request: CallerRequest, accept: Callable[[CallerRequest], Awaitable[T]]
    ) -> T:
        """What `accept` makes of the request for the lane that it names."""
        for _ in range(_TRIES):
            found = await self.open(row, request.lane)
            try:
                return await accept(replace(request, session_id=found.session_id, token_hash=found.token_hash))
            except (NoActiveSession, SessionGone):
                # The lane has ended, and another one begins.
                continue
        raise Unavailable("This lane comes and goes too quickly; try again.")

    async def open(self, row: SessionRow, name: str) -> OpenLane:
        """The lane, which begins with this if it has not begun; `NoActiveSession` when the session has ended.

        `row` is the session, or any lane of it: tools name the one that they run in, and no lane has lanes of its own.
        """
        main = await self._main_of(row)
        if main is None:
            raise NoActiveSession
        self.check(main.agent, name)
        token_hash = names.token_of_lane(main.session_id, name)
        for _ in range(_TRIES):
            known = await self._store.route(token_hash)
            if known is not None:
                return OpenLane(known, token_hash)
            try:
                await self._begin(main, name, token_hash)
            except (SessionGone, SessionNotFound):
                raise NoActiveSession from None
            except TokenConflict:
                # Another caller has begun it.
                continue
        raise Unavailable("This lane comes and goes too quickly; try again.")

    async def _main_of(self, row: SessionRow) -> SessionRow | None:
        return row if row.lane_of is None else await self._store.session(row.lane_of)

    async def _begin(self, main: SessionRow, name: str, token_hash: str) -> None:
        session_id, bounds = new_id(), bounds_of(self._signals.limits(main.agent))
        async for turn in self._boundaries(main):
            try:
                await self._store.fork(NewFork(session_id, token_hash, main.session_id, turn, bounds=bounds, lane=name))
                return
            except ForkRefused:
                # What the session knew then is not known: it can begin earlier.
                continue
        new = NewSession(
            session_id=session_id,
            agent=main.agent,
            mode="conversation",
            token_hash=token_hash,
            principal=main.principal,
            capabilities=main.capabilities,
            title=main.title,
            bounds=bounds,
            lane=name,
            lane_of=main.session_id,
        )
        await self._store.create_session(new, None)

    async def _boundaries(self, main: SessionRow) -> AsyncGenerator[int]:
        """The turns after which everything was over, newest first; after them, the lane begins without a history."""
        # Imported late: an API loads the libraries of models only when it needs them, and serves others meanwhile.
        await asyncio.to_thread(import_module, "perdure.harness.rebuild")
        from perdure.errors import UnreadableState
        from perdure.harness.rebuild import boundary_problem, read_end

        if main.records_expired:
            return
        for turn in range(main.turns - 1, max(-1, main.turns - 1 - _LOOKED_AT), -1):
            if leaves_out(main.left_out, turn):
                continue
            try:
                problem = boundary_problem(turn, None, await read_end(self._store, main.session_id, turn))
            except (ForkRefused, UnreadableState):
                return
            if problem is None:
                yield turn


def _checked(changes: LaneChange) -> JsonObject:
    """The changes as they are stored; `Invalid` when there are none, or one cannot be."""
    checked: JsonObject = {name: value for name, value in changes.items() if name in LANE_FIELDS}
    if not checked:
        raise Invalid("Expected 'mode', 'cap' or 'overflow'.")
    if "mode" in checked:
        checked["mode"] = checked_mode(checked["mode"])
    try:
        Lane(**{name: value for name, value in checked.items() if value is not None})
    except InvalidDeclaration as wrong:
        raise Invalid(wrong.message) from None
    if (checked.get("cap") or 0) > _LARGEST_CAP:
        raise Invalid(f"A lane's cap is at most {_LARGEST_CAP}.")
    return checked
