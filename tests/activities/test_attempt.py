"""What an attempt says to Temporal: its errors, with or without another try, and the deaths before it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import TypeAlias

import pytest
from temporalio.api.failure.v1 import Failure
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.testing import ActivityEnvironment

from activities.attempt import HANDED_BACK, attempt, current_attempt
from perdure.errors import (
    AgentGone,
    Invalid,
    ModelFailed,
    NeedsAttention,
    PerdureError,
    SessionGone,
    StoreBehind,
    Superseded,
    TokenConflict,
    ToolFailed,
    TurnCancelled,
    Unavailable,
    UnreadableState,
    WrongPool,
)
from perdure.protocol import names
from perdure.runtime.connect import DATA_CONVERTER
from perdure.store.values import Attempt
from tests.support.waiting import until

#: Whether a test has seen what it waits for.
Enough: TypeAlias = Callable[[], object]


async def failing(
    error: BaseException,
    *,
    number: int = 1,
    workflow: str = names.TURN_WORKFLOW,
    name: str = names.CONCLUDE_TURN,
    attended: list[NeedsAttention] | None = None,
) -> ApplicationError:
    """What an attempt that fails with this error is reported as."""
    environment = ActivityEnvironment()
    info = replace(environment.info, attempt=number, workflow_type=workflow, activity_type=name)
    environment.info = replace(info, heartbeat_timeout=None)

    async def attend(need: NeedsAttention) -> None:
        if attended is not None:
            attended.append(need)

    async def work() -> None:
        async with attempt(attend):
            raise error

    with pytest.raises(ApplicationError) as raised:
        await environment.run(work)
    return raised.value


@pytest.mark.parametrize("error", [AgentGone(), UnreadableState(), StoreBehind(), SessionGone(), WrongPool()])
async def test_what_one_worker_cannot_serve_is_handed_to_others_and_then_held(error: NeedsAttention) -> None:
    first, last = await failing(error), await failing(error, number=HANDED_BACK)

    assert (first.non_retryable, last.non_retryable) == (False, True)
    assert first.next_retry_delay == timedelta(seconds=0.2)
    assert last.details[0]["held"] is True
    assert last.type == error.code


@pytest.mark.parametrize("error", [AgentGone(), Invalid(), TokenConflict(), ModelFailed("no")])
async def test_a_driver_never_gets_a_permanent_failure(error: PerdureError) -> None:
    report = await failing(error, number=1000, workflow=names.SESSION_WORKFLOW)

    assert not report.non_retryable


@pytest.mark.parametrize("step", sorted(names.STEPS))
async def test_a_step_of_an_inline_turn_fails_as_that_of_another_turn(step: str) -> None:
    refused, transient = ModelFailed("no"), ModelFailed("busy", transient=True)
    reports = [await failing(each, workflow=names.SESSION_WORKFLOW, name=step) for each in (refused, transient)]
    held = await failing(AgentGone(), number=HANDED_BACK, workflow=names.SESSION_WORKFLOW, name=step)

    assert [report.non_retryable for report in reports] == [True, False]
    assert (held.non_retryable, held.details[0]["held"]) == (True, True)


async def test_a_driver_waits_longer_and_longer_and_attention_is_asked_for() -> None:
    attended: list[NeedsAttention] = []

    reports = [
        await failing(AgentGone(), number=number, workflow=names.SESSION_WORKFLOW, attended=attended)
        for number in range(1, 20)
    ]

    delays = [report.next_retry_delay for report in reports]
    assert delays == sorted(delays, key=lambda delay: delay or timedelta())
    assert delays[-1] == timedelta(seconds=60)
    # Not at one attempt only: just that one may fail in another way.
    assert len(attended) == 20 - HANDED_BACK


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Superseded(), True),
        (Unavailable(), True),
        (ModelFailed("busy", transient=True), True),
        (ModelFailed("no"), False),
        (TurnCancelled(), False),
        (TokenConflict(), False),
        (Invalid(), False),
    ],
)
async def test_other_errors_are_retried_as_they_declare(error: PerdureError, again: bool) -> None:
    report = await failing(error)

    assert report.non_retryable is not again
    assert report.details[0]["held"] is False


async def test_a_cancel_and_what_a_tool_raised_are_no_faults_to_the_engine() -> None:
    benign = [error for error in (TurnCancelled(), ToolFailed(), Unavailable(), Invalid()) if await is_benign(error)]

    assert [type(error) for error in benign] == [TurnCancelled, ToolFailed]


async def is_benign(error: PerdureError) -> bool:
    return (await failing(error)).category is ApplicationErrorCategory.BENIGN


@pytest.mark.parametrize("kind", [LookupError, SystemExit])
async def test_an_error_of_no_known_kind_is_reported_by_its_name_and_logged_under_an_id(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    report = await failing(kind("what somebody said"))

    assert (report.type, report.non_retryable) == (kind.__name__, False)
    assert report.details[0]["details"]["errorId"] in caplog.text
    assert "what somebody said" in caplog.text


@pytest.mark.parametrize(
    "error",
    [LookupError("said"), ToolFailed("said", said="said"), ModelFailed("no", reason="said"), ApplicationError("said")],
)
async def test_no_text_of_an_error_goes_to_the_engine(error: Exception) -> None:
    error.__cause__ = ValueError("said")

    failure = Failure()
    await DATA_CONVERTER.encode_failure(await failing(error), failure)

    assert b"said" not in failure.SerializeToString()


def test_workflows_share_one_converter_and_the_types_that_it_has_seen() -> None:
    make = DATA_CONVERTER.payload_converter_class

    assert make() is make()


async def test_neither_texts_nor_causes_nor_traces_leave_a_workflow() -> None:
    failure = Failure()
    try:
        try:
            raise ValueError("said")
        except ValueError as cause:
            raise LookupError("said") from cause
    except LookupError as error:
        await DATA_CONVERTER.encode_failure(error, failure)

    assert (failure.message, failure.cause.message, failure.stack_trace) == ("LookupError", "ValueError", "")
    assert b"said" not in failure.SerializeToString()


async def test_a_provider_says_when_to_come_again() -> None:
    report = await failing(ModelFailed("busy", transient=True, retry_after=7))

    assert report.next_retry_delay == timedelta(seconds=7)


# --- attempts that fell silent ------------------------------------------------------------------------------


def beating(number: int, *said: dict[str, int]) -> tuple[ActivityEnvironment, list[dict[str, int]]]:
    """An attempt whose predecessors' last heartbeat said this, and the heartbeats that it sends itself."""
    environment = ActivityEnvironment()
    sent: list[dict[str, int]] = []
    environment.info = replace(
        environment.info,
        attempt=number,
        heartbeat_details=list(said),
        heartbeat_timeout=timedelta(seconds=60),
        start_to_close_timeout=timedelta(minutes=30),
    )
    environment.on_heartbeat = lambda *details: sent.append(dict(details[0]))
    return environment, sent


@pytest.mark.parametrize(
    ("number", "said", "deaths"),
    [
        pytest.param(1, [], 0, id="the first one"),
        pytest.param(2, [], 1, id="died before a heartbeat"),
        pytest.param(3, [], 0, id="of an older build"),
        pytest.param(2, [{"deaths": 0, "ended": True}], 0, id="ended with an error"),
        pytest.param(3, [{"deaths": 1, "ended": False}], 2, id="died twice"),
        pytest.param(4, [{"deaths": 1, "ended": True}], 1, id="died once and failed"),
        pytest.param(7, [{"deaths": 1, "ended": True}], 1, id="died once and failed, also on older builds"),
        pytest.param(2, [{"others": 7}], 1, id="of another build"),
    ],
)
async def test_an_attempt_knows_how_many_before_it_fell_silent(
    number: int, said: list[dict[str, int]], deaths: int
) -> None:
    environment, sent = beating(number, *said)

    async def work() -> Attempt:
        async with attempt():
            return current_attempt()

    assert (await environment.run(work)).deaths == deaths
    assert sent == ([{"deaths": deaths, "ended": False}] if number > 1 else [])


@pytest.mark.parametrize("error", [Unavailable(), ValueError(), asyncio.CancelledError()])
async def test_one_that_ends_with_an_error_says_so(error: BaseException) -> None:
    environment, sent = beating(1)

    async def work() -> None:
        async with attempt():
            raise error

    with pytest.raises((ApplicationError, asyncio.CancelledError)):
        await environment.run(work)

    assert sent == [{"deaths": 0, "ended": True}]


async def test_steps_that_may_have_killed_workers_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("activities.attempt._BEAT", 0.01)
    environments = [beating(3, {"deaths": 1, "ended": False}) for _ in range(2)]
    innocent, _ = beating(2)
    begun: list[str] = []
    over = asyncio.Event()

    async def work(name: str) -> None:
        async with attempt():
            begun.append(name)
            await over.wait()

    first, second = (
        asyncio.create_task(environment.run(work, name))
        for name, (environment, _) in zip("ab", environments, strict=True)
    )
    other = asyncio.create_task(innocent.run(work, "c"))
    await until(lambda: len(begun) == 2 and environments[1][1])
    waiting = list(environments[1][1])
    over.set()
    await asyncio.gather(first, second, other)

    assert (sorted(begun[:2]), begun[2:]) == (["a", "c"], ["b"])
    # The death of the worker would not have been counted against the one that waited.
    assert waiting == [{"deaths": 2, "ended": True}]
    assert environments[1][1][-1] == {"deaths": 2, "ended": False}


async def test_one_that_runs_long_holds_up_no_other_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has lived long enough: a death beside the other one is not counted against it any more."""
    for name in ("_SUSPECT_PATIENCE", "_BEAT"):
        monkeypatch.setattr(f"activities.attempt.{name}", 0.01)
    over = asyncio.Event()
    holder, said = beating(3, {"deaths": 1, "ended": False})
    holder.info = replace(holder.info, heartbeat_timeout=timedelta(seconds=0.04))

    async def endless() -> None:
        async with attempt():
            await over.wait()

    async def short() -> str:
        async with attempt():
            await until(lambda: said[-1] == {"deaths": 2, "ended": True})
            return "done"

    long = asyncio.create_task(holder.run(endless))
    await until(lambda: said)
    late, beats = beating(3, {"deaths": 1, "ended": False})
    assert await late.run(short) == "done"
    over.set()
    await long
    assert [each["ended"] for each in beats] == [True, False]


async def renewals(monkeypatch: pytest.MonkeyPatch, renew: Callable[[float], Awaitable[None]], enough: Enough) -> None:
    """Run an attempt with a heartbeat timeout of 40 ms, whose lease may be noted every 50 ms, until that is enough."""
    monkeypatch.setattr("activities.attempt._RENEWAL", 0.05)
    environment, _ = beating(1)
    environment.info = replace(environment.info, heartbeat_timeout=timedelta(seconds=0.04))

    async def work() -> None:
        async with attempt(renew=renew):
            await until(enough)

    await environment.run(work)


async def test_an_attempt_notes_its_lease_no_sooner_than_after_one_heartbeat_and_then_at_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = time.monotonic()
    noted: list[tuple[float, float]] = []

    async def renew(left: float) -> None:
        noted.append((time.monotonic() - began, left))

    await renewals(monkeypatch, renew, lambda: len(noted) == 3)

    times, left = zip(*noted, strict=True)
    assert times[0] >= 0.04
    assert all(later - earlier >= 0.05 for earlier, later in pairwise(times))
    # Never longer than Temporal waits for the next heartbeat.
    assert max(left) <= 0.04


async def test_a_lease_that_cannot_be_noted_does_not_end_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []

    async def renew(left: float) -> None:
        tries.append(left)
        raise Unavailable

    await renewals(monkeypatch, renew, lambda: len(tries) == 2)


async def test_a_database_that_does_not_answer_delays_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    environment, sent = beating(1)
    environment.info = replace(environment.info, heartbeat_timeout=timedelta(seconds=0.04))
    asked = asyncio.Event()

    async def renew(left: float) -> None:
        asked.set()
        await asyncio.Event().wait()

    async def work() -> None:
        async with attempt(renew=renew):
            await asked.wait()
            before = len(sent)
            await until(lambda: len(sent) >= before + 3)

    await environment.run(work)


async def test_an_attempt_knows_who_makes_it_and_when_it_counts_as_dead() -> None:
    environment, _ = beating(1)

    async def work() -> Attempt:
        return current_attempt("host:1:b")

    before = time.time()
    made = await environment.run(work)

    assert made.worker == "host:1:b"
    assert made.lease_until is not None
    assert before + 60 <= made.lease_until <= time.time() + 60
