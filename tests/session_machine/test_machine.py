"""Any order of messages, answers, cancels, deaths, losses and pauses: what readers see stays consistent.

`make test` plays the same sessions each time. By hand, for sessions that were never played before:

    PERDURE_MACHINE_EXAMPLES=5000 pytest tests/session_machine [--hypothesis-seed N]

Only the played clock decides anything. A printed example fails each time: keep it here as a test that takes `state`.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from perdure.protocol.wire import JsonObject

from .machine import Machine

_EXAMPLES = os.environ.get("PERDURE_MACHINE_EXAMPLES")
_STEPS = int(os.environ.get("PERDURE_MACHINE_STEPS", "40"))

# To shorten an example that fails takes minutes; a long run takes as long as it was asked to.
pytestmark = pytest.mark.timeout(600 if _EXAMPLES is None else 0)


def test_on_sqlite(on_sqlite: type[Machine]) -> None:
    _play(on_sqlite, 100)


@pytest.mark.postgres
def test_on_postgres(on_postgres: type[Machine]) -> None:
    _play(on_postgres, 30)


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
    state.set_the_driver_back(copy)
    state.say(plan="", coalesce=False, old=False, fate="lives", pace="end")
    state.play_all()
    state.teardown()


def test_temporal_is_restored_from_when_a_turn_was_parked_that_was_answered_since(state: Machine) -> None:
    state.begin(plan="ask", mode="conversation", waiting="queue", fate="lives", answers=True)
    state.play_all()
    copy = _driver(state)
    state.answer(which=0, how="red", fate="lives", pace="end", by_token=True)
    state.play_all()
    state.set_the_driver_back(copy)
    for _ in range(3):
        state.say(plan="", coalesce=False, old=False, fate="lives", pace="end")
        state.play_all()
    state.teardown()


def _driver(state: Machine) -> JsonObject:
    known = state.it.state
    assert known is not None
    return known.model_dump(mode="json")


def _play(machine: type[Machine], examples: int) -> None:
    chosen = settings(
        max_examples=int(_EXAMPLES or examples),
        stateful_step_count=_STEPS,
        derandomize=_EXAMPLES is None,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(machine, settings=chosen)
