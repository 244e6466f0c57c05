"""The store against a model of it that fits on a page: whatever one does to both, they stay alike."""

import asyncio
from dataclasses import dataclass, field
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from perdure.errors import Superseded
from perdure.store.base import Commit, Committed, Hold, Store
from perdure.store.open import open_store
from tests.store import given

names = st.sampled_from(["a", "b", "c", "d"])
places = st.tuples(st.integers(0, 1), st.integers(0, 1), names)
generations = st.integers(1, 3)


@dataclass
class Model:
    """One session, kept in memory the simple way."""

    records: dict[tuple[int, int, str], str] = field(default_factory=dict[tuple[int, int, str], str])
    events: list[str] = field(default_factory=list[str])
    fences: dict[str, int] = field(default_factory=dict[str, int])

    def tell(self, keys: list[str]) -> None:
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

        self._model.tell(keys)
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
            self._model.tell([key])

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
        self._model.tell([f"superseded {scope} {generation}"] * committed.superseded + [key])

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
        found = {(record.turn, record.step, record.slot): record.body["text"] for record in records}
        assert found == self._model.records
        assert list(found) == sorted(self._model.records)

    @property
    def _store(self) -> Store:
        """Now this store, now the other one."""
        self._turn += 1
        return self._stores[self._turn % len(self._stores)]

    def _commit(self, commit: Commit) -> Committed:
        return self._runner.run(self._store.commit(commit))


def _records(place: tuple[int, int, str] | None, text: str) -> list[given.NewRecord]:
    if place is None:
        return []
    turn, step, slot = place
    return [given.record(slot, turn=turn, step=step, text=text)]


def test_the_store_behaves_as_its_model(url: str) -> None:
    with asyncio.Runner() as runner:
        stores = [runner.run(open_store(url)) for _ in range(2)]
        runner.run(stores[0].migrate())
        numbers = count()

        class Machine(StoreMachine):
            def __init__(self) -> None:
                super().__init__(runner, stores, f"s{next(numbers)}")

        try:
            run_state_machine_as_test(
                Machine, settings=settings(max_examples=30, stateful_step_count=20, deadline=None)
            )
        finally:
            for store in stores:
                runner.run(store.close())
