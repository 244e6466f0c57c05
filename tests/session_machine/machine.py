"""What hypothesis plays: each rule is one thing that happens to a session. What readers see is checked after each."""

import sys
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from perdure.agents.agent import OnInterruptedReply, Turns, WhileWaiting
from perdure.faults import KillPoint
from perdure.protocol import names
from perdure.protocol.deliveries import Mode
from perdure.protocol.wire import JsonObject
from perdure.store.base import Store

from .invariants import Log, check_at_rest, check_now
from .processes import Fate, Pace, Process
from .script import Answer
from .world import START, World

_WORDS = ["look", "charge", "pay", "refund", "risky", "rekey", "ask"]
_ROUNDS = st.one_of(
    st.lists(st.sampled_from(_WORDS), min_size=1, max_size=3, unique=True).map(" ".join),
    st.sampled_from(["", "silent", "broken", "shaky look", "pay", "pay charge", "charge"]),
)
PLANS = st.lists(_ROUNDS, min_size=1, max_size=2).map("/".join)
FATES = st.sampled_from(["lives", "lives", "lives", "dies", "temporal is away", "answer is lost"])
PACES = st.sampled_from(["end", "end", "work", "write", "read"])
ASKING = st.sampled_from(["end", "end", "end", "write", "read"])
POINTS = st.sampled_from(get_args(KillPoint))
ANSWERS = st.sampled_from(["approve", "approve", "deny", "edit", "red", "nonsense"])


class Machine(RuleBasedStateMachine):
    """One session, from its start to its rest."""

    run: Callable[[Coroutine[Any, Any, None]], None]
    #: An empty store, with this clock.
    open: Callable[[Callable[[], str]], Awaitable[Store]]

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.plans = 0
        self.world: World | None = None
        self.log = Log()

    @property
    def it(self) -> World:
        assert self.world is not None
        return self.world

    @initialize(
        plan=PLANS,
        mode=st.sampled_from(["conversation", "conversation", "conversation", "task"]),
        waiting=st.sampled_from(["queue", "deny"]),
        fate=FATES,
        answers=st.booleans(),
        turns=st.sampled_from(["child", "inline"]),
        broken=st.sampled_from(["retract", "continue"]),
    )
    def begin(
        self,
        plan: str,
        mode: Mode,
        waiting: WhileWaiting,
        fate: Fate,
        answers: bool,
        turns: Turns = "child",
        broken: OnInterruptedReply = "retract",
    ) -> None:
        async def begin() -> None:
            self.world = World(await self.open(self._now), self.patch, waiting=waiting, turns=turns, broken=broken)
            await self.world.begin(self._plan(plan), mode, fate)

        self.answers = answers
        self._do(begin())

    # --- people ---

    @rule(plan=PLANS, coalesce=st.booleans(), old=st.booleans(), fate=FATES, pace=ASKING)
    def say(self, plan: str, coalesce: bool, old: bool, fate: Fate, pace: Pace) -> None:
        self._do(self.it.say(self._plan(plan), coalesce=coalesce, old=old, fate=fate, pace=pace))

    @precondition(lambda self: self.log.asks)
    @rule(which=st.integers(0, 5), how=ANSWERS, fate=FATES, pace=ASKING, by_token=st.booleans())
    def answer(self, which: int, how: Answer, fate: Fate, pace: Pace, by_token: bool) -> None:
        self._do(self.it.answer(which, how, fate, pace, by_token=by_token))

    @rule(which=st.integers(0, 9))
    def repeat(self, which: int) -> None:
        self._do(self.it.repeat(which))

    @rule(turn=st.sampled_from([None, None, None, -1, 0, 1]), fate=FATES, pace=ASKING)
    def cancel(self, turn: int | None, fate: Fate, pace: Pace) -> None:
        async def cancel() -> None:
            turn_id = None if turn is None else names.turn_id(max(0, (await self.it.row()).turns - 1 + turn))
            await self.it.cancel(turn_id, fate, pace)

        self._do(cancel())

    # --- processes ---

    @precondition(lambda self: self.it.processes.alive)
    @rule(which=st.integers(0, 3), pace=PACES)
    def go(self, which: int, pace: Pace) -> None:
        self._with(which, lambda process: self.it.processes.go(process, pace))

    @precondition(lambda self: self.it.processes.alive)
    @rule(times=st.integers(1, 4))
    def play(self, times: int) -> None:
        for _ in range(times):
            self._with(0, lambda process: self.it.processes.go(process, "end"))

    @precondition(lambda self: self.it.processes.alive)
    @rule()
    def play_all(self) -> None:
        self._do(self.it.run_all())

    @precondition(lambda self: self.it.processes.alive)
    @rule(which=st.integers(0, 3))
    def kill(self, which: int) -> None:
        self._with(which, self.it.processes.kill)

    @precondition(lambda self: self.it.processes.alive)
    @rule(which=st.integers(0, 3))
    def take_for_dead(self, which: int) -> None:
        async def lose(process: Process) -> None:
            if process.lost is not None and process.begun:
                process.lost()
            await self.it.processes.rest()

        self._with(which, lose)

    @rule(point=POINTS)
    def doom(self, point: str) -> None:
        self.it.dooms[point] += 1

    @precondition(lambda self: self.it.temporal.stopping())
    @rule(which=st.integers(0, 3))
    def notice(self, which: int) -> None:
        async def notice() -> None:
            if stopping := self.it.temporal.stopping():
                await self.it.notice(stopping[which % len(stopping)])

        self._do(notice())

    # --- everything else ---

    @rule(seconds=st.sampled_from([1, 40, 120, 700]))
    def later(self, seconds: int) -> None:
        self.it.now += seconds
        self._do(self.it.processes.rest())

    @rule()
    def sweep(self) -> None:
        self._do(self.it.sweep())

    @precondition(lambda self: self.it.session_id in self.it.temporal.runs)
    @rule(zombies=st.booleans())
    def lose_the_driver(self, zombies: bool) -> None:
        async def lose() -> None:
            for process in self.it.temporal.lose(self.it.session_id):
                if not zombies:
                    await self.it.processes.kill(process)
            await self.it.processes.rest()

        self._do(lose())

    @rule()
    def serve_or_not(self) -> None:
        self.it.agents.served = not self.it.agents.served

    @precondition(lambda self: self.it.session_id in self.it.temporal.runs)
    @rule()
    def grow_long(self) -> None:
        run = self.it.temporal.runs[self.it.session_id]
        for each in filter(None, (run, run.child)):
            each.long = True
        self._do(self.it.processes.rest())

    def start_again(self, data: JsonObject) -> None:
        """Start the driver with another state than its own."""

        async def start() -> None:
            self.it.temporal.start(data)
            await self.it.run_all()

        self._do(start())

    def signal(self, name: str, *data: Any) -> None:
        """No rule: the order of everything else is to stay as it is. See `test_no_signal_breaks_a_session`."""
        self.log.stopped_by_signal = self.log.stopped_by_signal or name != names.DELIVER
        self._do(self.it.signal(name, *data))

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            if sys.exc_info()[0] is None:
                self.run(self._finish())
        finally:
            self.close()

    def close(self) -> None:
        world, self.world = self.world, None
        if world is not None:
            self.run(world.end())
            self.patch.undo()

    async def _finish(self) -> None:
        world = self.it
        await world.finish(answers=self.answers)
        await check_at_rest(world, self.log)
        if not (await world.row()).ended:
            # It consumes the next message, and the model is asked with a prompt that is whole.
            await world.say(self._plan(""), coalesce=False, old=False, fate="lives", pace="end")
            await world.finish(answers=True)
            await check_at_rest(world, self.log)
            assert self.log.last_end == "completed"

    def _plan(self, plan: str) -> str:
        self.plans += 1
        return f"plan {self.plans}:{plan}"

    def _now(self) -> str:
        moment = datetime.fromtimestamp(START if self.world is None else self.world.now, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _with(self, which: int, do: Callable[[Process], Awaitable[None]]) -> None:
        alive = self.it.processes.alive
        if alive:
            self._do(do(alive[which % len(alive)]))

    def _do(self, work: Awaitable[None]) -> None:
        async def do() -> None:
            await work
            await check_now(self.it, self.log)

        self.run(do())
