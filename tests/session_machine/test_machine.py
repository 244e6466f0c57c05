"""Any order of messages, answers, cancels, deaths, losses and pauses: what readers see stays consistent.

`make test` plays the same sessions each time. By hand, for sessions that were never played before:

    PERDURE_MACHINE_EXAMPLES=5000 pytest tests/session_machine [--hypothesis-seed N]

Only the played clock decides anything. A printed example fails each time: keep it here as a test that takes `state`.
"""

import asyncio
import contextlib
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from perdure.agents.agent import OnInterruptedReply
from perdure.protocol import names
from perdure.protocol.events import EventType
from perdure.protocol.wire import JsonObject
from perdure.session.state import derive_token, hash_token, load_session

from .machine import Machine
from .processes import Processes
from .world import SECRET

_EXAMPLES = os.environ.get("PERDURE_MACHINE_EXAMPLES")
_STEPS = int(os.environ.get("PERDURE_MACHINE_STEPS", "40"))

# To shorten an example that fails takes minutes; a long run takes as long as it was asked to.
pytestmark = pytest.mark.timeout(600 if _EXAMPLES is None else 0)


def test_on_sqlite(on_sqlite: type[Machine]) -> None:
    _play(on_sqlite, 40)


@pytest.mark.postgres
def test_on_postgres(on_postgres: type[Machine]) -> None:
    _play(on_postgres, 8)


@pytest.mark.parametrize("turns", [0, 100])
def test_an_access_waits_for_all_that_moves_however_long_the_store_takes(runner: asyncio.Runner, turns: int) -> None:
    happened: list[str] = []

    async def happens(what: str, after: int) -> None:
        for _ in range(after):
            await asyncio.sleep(0)
        happened.append(what)

    async def play() -> None:
        processes = Processes(lambda: 0.0)

        async def live() -> None:
            beside = asyncio.create_task(happens("beside", 10))
            await processes.access(lambda: happens("access", turns))
            await beside

        process = processes.start("one", live)
        await processes.rest()
        await processes.go(process, "end")

    runner.run(play())

    assert happened == ["beside", "access"]


def test_a_cancel_overtakes_the_answer_that_begins_its_turn(state: Machine) -> None:
    state.begin(plan="ask", mode="conversation", waiting="queue", fate="lives", answers=False)
    state.play_all()
    state.answer(which=0, how="red", fate="dies", pace="end", by_token=False)
    state.cancel(turn=None, fate="lives", pace="end")
    state.teardown()


def test_the_driver_is_lost_after_a_cancel_that_came_after_an_answer(state: Machine) -> None:
    state.begin(plan="ask", mode="conversation", waiting="queue", fate="lives", answers=False)
    state.play_all()
    state.answer(which=0, how="red", fate="dies", pace="end", by_token=False)
    state.cancel(turn=None, fate="dies", pace="end")
    state.lose_the_driver(zombies=False)
    state.teardown()


def test_a_forgotten_model_call_begins_while_the_driver_is_derived(state: Machine) -> None:
    state.begin(plan="", mode="conversation", waiting="queue", fate="lives", answers=False)
    state.play_all()
    state.say(plan="", coalesce=False, old=False, fate="lives", pace="end")
    state.go(which=0, pace="write")
    state.lose_the_driver(zombies=True)
    state.sweep()
    state.go(which=1, pace="read")
    state.go(which=1, pace="read")
    state.go(which=0, pace="write")
    state.teardown()


def test_temporal_is_restored_from_before_a_turn(state: Machine) -> None:
    state.begin(plan="", mode="conversation", waiting="queue", fate="lives", answers=False)
    state.play_all()
    copy = _driver(state)
    state.say(plan="", coalesce=False, old=False, fate="lives", pace="end")
    state.play_all()
    state.lose_the_driver(zombies=False)
    state.start_again(copy)
    state.say(plan="", coalesce=False, old=False, fate="lives", pace="end")
    state.play_all()
    state.teardown()


def test_temporal_is_restored_from_when_a_turn_was_parked_that_was_answered_since(state: Machine) -> None:
    state.begin(plan="ask", mode="conversation", waiting="queue", fate="lives", answers=True)
    state.play_all()
    copy = _driver(state)
    state.answer(which=0, how="red", fate="lives", pace="end", by_token=True)
    state.play_all()
    state.lose_the_driver(zombies=False)
    state.start_again(copy)
    for _ in range(3):
        state.say(plan="", coalesce=False, old=False, fate="lives", pace="end")
        state.play_all()
    state.teardown()


@pytest.mark.parametrize("broken", ["retract", "continue"])
@pytest.mark.parametrize("loses", ["its worker", "its driver"])
def test_a_reply_breaks_off_in_the_middle(state: Machine, broken: OnInterruptedReply, loses: str) -> None:
    state.begin(plan="", mode="conversation", waiting="queue", fate="lives", answers=False, broken=broken)
    state.go(which=0, pace="work")
    state.go(which=0, pace="work")
    assert state.log.events[-1].type == EventType.MESSAGE_APPENDED
    if loses == "its worker":
        state.kill(which=0)
    else:
        state.lose_the_driver(zombies=False)
        state.sweep()
    state.play_all()
    state.teardown()

    told = [event for event in state.log.events if event.type in (EventType.STEP_SUPERSEDED, EventType.STEP_RECOVERED)]
    assert [(event.data or {}).get("decision") for event in told] == [broken]
    # An attempt that a new driver begins has the number of the one that is lost.
    assert [event.attempt for event in told] == [2 if loses == "its worker" else 1]


def _driver(state: Machine) -> JsonObject:
    known = state.it.state
    assert known is not None
    return known.model_dump(mode="json")


def _chosen(examples: int) -> settings:
    return settings(
        max_examples=int(_EXAMPLES or examples),
        derandomize=_EXAMPLES is None,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.function_scoped_fixture,
        ],
    )


FIELDS = ["id", "kind", "tokenHash", "coalesce", "traceparent", "at", "version", "turnId", "how"]
ids = st.sampled_from(["dlv_x", "", "a\0b", "x" * 300, "\u202e"])
texts = st.text(max_size=20) | ids
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | texts, inner, max_size=4),
    max_leaves=8,
)
deliveries = st.fixed_dictionaries(
    {"id": ids, "tokenHash": st.just(hash_token(derive_token(SECRET, "ses_000001"))) | texts},
    optional={
        "kind": st.sampled_from(["message", "answer"]) | values,
        "coalesce": st.booleans() | values,
        "at": st.sampled_from(["2026-01-01T00:00:00Z", "z"]) | values,
        "traceparent": values,
        "version": values,
    },
)
orders = st.sampled_from(
    [*({"how": how} for how in ("retry", "rebuild", "fail", "sing")), {"turnId": "turn_0"}, {"turnId": "turn_1"}]
)
# A payload that is no JSON comes as bytes.
payloads = st.lists(deliveries | orders | values | st.binary(max_size=5), max_size=2).map(tuple)
signals = st.tuples(st.sampled_from([names.DELIVER, names.CANCEL, names.REPAIR]), payloads) | st.tuples(
    st.just(names.DELIVER), st.tuples(deliveries)
)


@_chosen(60)
@given(
    plan=st.sampled_from(["", "look", "pay"]),
    moves=st.lists(signals | st.sampled_from(["play", "say"]), min_size=1, max_size=5),
)
@example(plan="", moves=["play", (names.DELIVER, ({"id": "a\0b", "tokenHash": "x"},))])
def test_no_signal_breaks_a_session(
    on_sqlite: type[Machine], plan: str, moves: list[str | tuple[str, tuple[Any, ...]]]
) -> None:
    with contextlib.closing(on_sqlite()) as machine:
        machine.begin(plan=plan, mode="conversation", waiting="queue", fate="lives", answers=True)
        for move in moves:
            if isinstance(move, tuple):
                name, data = move
                machine.signal(name, *data)
            elif move == "say":
                machine.say(plan="", coalesce=False, old=False, fate="lives", pace="end")
            else:
                machine.play_all()

        # It continues until it is at rest, and all that was accepted was read once or refused once.
        machine.teardown()


@_chosen(60)
@given(came=st.lists(payloads, max_size=6))
@example(came=[(b"\xff",)])
@example(came=[({"id": "dlv_y", "tokenHash": 5},)])
def test_no_signal_breaks_a_state_that_cannot_be_read_yet(on_sqlite: type[Machine], came: list[Any]) -> None:
    with contextlib.closing(on_sqlite()) as machine:
        machine.begin(plan="", mode="conversation", waiting="queue", fate="lives", answers=True)
        before = machine.it.state
        assert before is not None
        machine.lose_the_driver(zombies=False)
        machine.start_again({**before.model_dump(mode="json"), "version": 999})

        for data in (*came, ({"id": "dlv_known", "tokenHash": "t"},)):
            machine.signal(names.DELIVER, *data)
        # It continues as new, and the new run is given all of it as JSON.
        machine.later(70)

        read = load_session({**machine.it.temporal.inputs[-1], "version": before.version})
        assert "dlv_known" in [delivery.id for delivery in read.inbox]


def _play(machine: type[Machine], examples: int) -> None:
    run_state_machine_as_test(machine, settings=settings(_chosen(examples), stateful_step_count=_STEPS))
