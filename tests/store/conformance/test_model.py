"""The store against a model of it that fits on a page: whatever one does to both, they stay alike."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from perdure.errors import InboxFull, SessionGone, Superseded, TurnCancelled
from perdure.store.base import Store
from perdure.store.deliveries import CancelRequest
from perdure.store.open import open_store
from perdure.store.values import Commit, Committed, Consumption, Hold, InputChanges
from tests.support import given
from tests.support.examples import at_least

T = TypeVar("T")

names = st.sampled_from(["a", "b", "c", "d"])
places = st.tuples(st.integers(0, 1), st.integers(0, 1), names)
generations = st.integers(1, 3)


@dataclass
class Model:
    """One session, kept in memory the simple way."""

    records: dict[tuple[int, int, str], str] = field(default_factory=dict[tuple[int, int, str], str])
    events: list[str] = field(default_factory=list[str])
    fences: dict[str, int] = field(default_factory=dict[str, int])

    def emit(self, keys: list[str]) -> None:
        for key in keys:
            if key not in self.events:
                self.events.append(key)

    def may_write(self, scope: str, hold: Hold, generation: int) -> bool:
        standing = self.fences.get(scope)
        if hold is Hold.RAISE:
            return standing is None or standing <= generation
        return standing == generation

    def hold(self, scope: str, hold: Hold, generation: int) -> bool:
        """Take the fence; True when an older attempt lost it."""
        standing = self.fences.get(scope)
        if hold is Hold.RELEASE:
            del self.fences[scope]
        else:
            self.fences[scope] = generation
        return standing is not None and standing < generation


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, runner: asyncio.Runner, stores: list[Store], session_id: str) -> None:
        super().__init__()
        self._runner = runner
        self._stores = stores
        self._session_id = session_id
        self._turn = 0
        self._model = Model()

    @initialize()
    def create(self) -> None:
        self._runner.run(self._store.create_session(given.session(self._session_id)))

    @rule(keys=st.lists(names, max_size=3), record=st.none() | places, text=names)
    def write(self, keys: list[str], record: tuple[int, int, str] | None, text: str) -> None:
        self._commit(
            Commit(self._session_id, events=[given.event(key) for key in keys], records=_records(record, text))
        )

        self._model.emit(keys)
        if record is not None:
            self._model.records.setdefault(record, text)

    @rule(unless=places, text=names, key=names)
    def write_unless(self, unless: tuple[int, int, str], text: str, key: str) -> None:
        committed = self._commit(
            Commit(self._session_id, unless=unless, records=_records(unless, text), events=[given.event(key)])
        )

        winner = self._model.records.get(unless)
        assert (committed.existing and committed.existing.body["text"]) == winner
        if winner is None:
            self._model.records[unless] = text
            self._model.emit([key])

    @rule(scope=names, hold=st.sampled_from(Hold), generation=generations, key=names)
    def write_fenced(self, scope: str, hold: Hold, generation: int, key: str) -> None:
        commit = Commit(
            self._session_id,
            fence=given.fence(hold, generation, scope=scope),
            superseding=given.event(f"superseded {scope} {generation}"),
            events=[given.event(key)],
        )
        if not self._model.may_write(scope, hold, generation):
            try:
                self._commit(commit)
            except Superseded:
                return
            raise AssertionError("the store let an attempt write that lost its fence")

        committed = self._commit(commit)

        assert committed.superseded == self._model.hold(scope, hold, generation)
        self._model.emit([f"superseded {scope} {generation}"] * committed.superseded + [key])

    @rule()
    def close_turn(self) -> None:
        self._commit(Commit(self._session_id, close_turn=0))

        self._model.fences.clear()

    @invariant()
    def the_events_are_alike(self) -> None:
        events = self._runner.run(given.everything(self._store, self._session_id))
        assert [event.key for event in events] == self._model.events
        assert [event.index for event in events] == list(range(len(events)))

    @invariant()
    def the_records_are_alike(self) -> None:
        records = self._runner.run(self._store.records(self._session_id))
        found = {(record.turn, record.step, record.key): record.body["text"] for record in records}
        assert found == self._model.records
        assert list(found) == sorted(self._model.records)

    @property
    def _store(self) -> Store:
        """Now this store, now the other one."""
        self._turn += 1
        return self._stores[self._turn % len(self._stores)]

    def _commit(self, commit: Commit) -> Committed:
        return self._runner.run(self._store.commit(commit))


@dataclass
class Life:
    """The life of one session, kept in memory the simple way."""

    status: str = "starting"
    turns: int = 0
    cancel: int | None = None
    attention: str | None = None
    # What waits to be read, in order; and what became of the rest.
    waiting: list[str] = field(default_factory=list[str])
    fates: dict[str, int | str] = field(default_factory=dict[str, int | str])
    asked: bool = False
    emitted: list[str] = field(default_factory=list[str])
    since: int = 0

    @property
    def ended(self) -> bool:
        return self.status == "completed"

    @property
    def turn(self) -> int | None:
        """The turn that a cancellation would stop."""
        match self.status:
            case "running":
                return self.turns - 1
            case "starting":
                return self.turns
            case "waiting" if self.asked:
                return self.turns - 1
            case "waiting" if self.waiting:
                return self.turns
            case _:
                return None

    def emit(self, key: str) -> None:
        if key not in self.emitted:
            self.emitted.append(key)

    def settle_cancel(self) -> None:
        """The cancel request of an ended turn is settled; one for a later turn stays."""
        if self.cancel is not None and self.cancel < self.turns:
            self.cancel = None

    def recover(self) -> None:
        if self.attention is not None:
            self.emit(f"session/attention/{self.since}/recovered")
            self.attention = None


class LifeMachine(RuleBasedStateMachine):
    """Deliveries, turns, cancellations, attentions and the end of a session, in any order."""

    def __init__(self, runner: asyncio.Runner, stores: list[Store], session_id: str) -> None:
        super().__init__()
        self._runner = runner
        self._stores = stores
        self._id = session_id
        self._calls = 0
        self._deliveries = count()
        self._life = Life()

    @initialize()
    def create(self) -> None:
        self._run(self._store.create_session(given.session(self._id)))

    @rule(limit=st.sampled_from([None, None, 1, 3]))
    def accept(self, limit: int | None) -> None:
        # Backwards: the ids must not decide the order.
        name = f"d{999 - next(self._deliveries)}"
        try:
            accepted = self._run(self._store.accept(given.delivery(name, session_id=self._id, limit=limit)))
        except SessionGone:
            assert self._life.ended
            return
        except InboxFull:
            assert limit is not None
            assert len(self._life.waiting) >= limit
            return
        assert accepted.fresh
        assert not self._life.ended
        assert limit is None or len(self._life.waiting) < limit
        self._life.waiting.append(name)

    @rule(last=st.booleans())
    def refuse(self, last: bool) -> None:
        life = self._life
        name = life.waiting[-1 if last else 0] if life.waiting else "unknown"
        assert self._run(given.refuse(self._store, name, self._id))
        if life.waiting:
            life.waiting.remove(name)
            life.fates[name] = "STALE_TOKEN"
        if not life.ended:
            life.emit(f"refused/{name}")
        if life.status != "running" and not life.asked and not life.waiting:
            life.cancel = None

    @rule(known=st.sampled_from([True, True, True, False]))
    def cancel(self, known: bool) -> None:
        life = self._life
        turn = life.turn
        asked = self._run(given.cancel(self._store, self._id, None if known or turn is None else f"turn_{turn + 1}"))
        if turn is None or not known:
            assert asked is None
            return
        assert asked == CancelRequest(self._id, turn)
        life.cancel = turn
        life.emit(f"t{turn}/cancel")

    @rule(code=st.sampled_from(["ONE", "TWO"]))
    def attend(self, code: str) -> None:
        life = self._life
        is_new = not life.ended and life.attention != code
        assert self._run(given.attend(self._store, code, self._id)) == is_new
        if not life.ended and life.attention != code:
            life.attention, life.since = code, len(life.emitted)
            life.emit(f"session/attention/{life.since}")

    @precondition(lambda self: self._life.status in ("starting", "waiting"))
    @rule()
    def begin(self) -> None:
        """A turn begins, and reads what waits; one that is to be stopped ends instead."""
        life = self._life
        turn = life.turns
        reading = Commit(
            self._id, consume=Consumption(turn, [*life.waiting]), inputs=InputChanges(withdraws=[self._request])
        )
        begin = replace(reading, unless_cancelled=turn, fence=given.raising(1).fence, change=given.running(turn).change)
        stopped = self._stopped(begin, turn)
        if stopped:
            end = given.ending(turn)
            self._commit(replace(reading, events=end.events, change=end.change))
        life.recover()
        life.fates.update(dict.fromkeys(life.waiting, turn))
        life.waiting.clear()
        life.turns, life.asked = turn + 1, False
        life.status = "waiting" if stopped else "running"
        if stopped:
            life.emit(f"t{turn}/end")
            life.settle_cancel()

    @precondition(lambda self: self._life.status == "running")
    @rule(parks=st.booleans())
    def end(self, parks: bool) -> None:
        """The turn ends; one that is to be stopped does not park."""
        life = self._life
        turn = life.turns - 1
        end = given.ending(turn, self._id)
        asks = given.parking(self._request, turn=turn, session_id=self._id)
        if self._stopped(asks if parks else end, turn):
            parks = False
            self._commit(replace(end, unless_cancelled=None))
        life.recover()
        life.emit(f"t{turn}/end")
        life.status, life.asked = "waiting", parks
        life.settle_cancel()

    @precondition(lambda self: self._life.status == "waiting")
    @rule()
    def end_again(self) -> None:
        """The last turn ends once more, as a retried activity writes it."""
        life = self._life
        self._commit(replace(given.ending(life.turns - 1, self._id), unless_cancelled=None))
        life.recover()
        life.settle_cancel()

    @precondition(lambda self: self._life.cancel is not None)
    @rule()
    def settle(self) -> None:
        life = self._life
        self._commit(Commit(self._id, settles_cancel=True))
        if not (life.waiting or life.asked):
            life.cancel = None

    @precondition(lambda self: self._life.turns > 2 and not self._life.ended)
    @rule()
    def close(self) -> None:
        life = self._life
        self._commit(
            replace(given.closing(self._id), inputs=InputChanges(resolved={self._request: given.event("withdrawn")}))
        )
        life.recover()
        if life.asked:
            life.emit("withdrawn")
        # A database returns them in any order.
        events = self._run(given.keys(self._store, self._id))
        refused = events[len(life.emitted) : -1]
        assert sorted(refused) == sorted(f"session/refused/{each}" for each in life.waiting)
        life.emitted += [*refused, "session/completed"]
        life.fates.update(dict.fromkeys(life.waiting, "session_not_active"))
        life.waiting.clear()
        life.status, life.asked, life.cancel = "completed", False, None

    @invariant()
    def the_rows_are_alike(self) -> None:
        life, row = self._life, self._run(self._store.session(self._id))
        if row is None:
            return
        attention = row.attention and row.attention["code"]
        assert (row.status, row.turns, row.cancel_turn, attention, row.events) == (
            life.status,
            life.turns,
            life.cancel,
            life.attention,
            len(life.emitted),
        )

    @invariant()
    def the_logs_are_alike(self) -> None:
        events = self._run(given.everything(self._store, self._id))
        assert [event.key for event in events] == self._life.emitted
        assert [event.index for event in events] == list(range(len(events)))

    @invariant()
    def the_deliveries_are_alike(self) -> None:
        assert [row.delivery_id for row in self._run(self._store.unread(self._id))] == self._life.waiting
        fates = self._run(self._store.deliveries(self._id, list(self._life.fates)))
        assert {row.delivery_id: row.refused if row.turn is None else row.turn for row in fates} == self._life.fates

    def _stopped(self, commit: Commit, turn: int) -> bool:
        """Commit; whether the turn is to be stopped, and so nothing was written."""
        expected = self._life.cancel is not None and self._life.cancel <= turn
        try:
            self._commit(commit)
        except TurnCancelled:
            assert expected
            return True
        assert not expected
        return False

    @property
    def _request(self) -> str:
        return f"{self._id}/r{self._life.turns - 1}"

    @property
    def _store(self) -> Store:
        self._calls += 1
        return self._stores[self._calls % len(self._stores)]

    def _commit(self, commit: Commit) -> Committed:
        return self._run(self._store.commit(commit))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)


def _records(place: tuple[int, int, str] | None, text: str) -> list[given.NewRecord]:
    if place is None:
        return []
    turn, step, slot = place
    return [given.record(slot, turn=turn, step=step, text=text)]


@pytest.mark.parametrize(("machine", "steps"), [(StoreMachine, 20), (LifeMachine, 60)])
def test_the_store_behaves_as_its_model(url: str, machine: type[StoreMachine] | type[LifeMachine], steps: int) -> None:
    with asyncio.Runner() as runner:
        stores = [runner.run(open_store(url)) for _ in range(2)]
        runner.run(stores[0].migrate())
        numbers = count()

        def make() -> RuleBasedStateMachine:
            return machine(runner, stores, f"s{next(numbers)}")

        try:
            run_state_machine_as_test(
                # Any callable will do.
                cast("type[RuleBasedStateMachine]", make),
                settings=settings(max_examples=at_least(12), stateful_step_count=steps, deadline=None),
            )
        finally:
            for store in stores:
                runner.run(store.close())
