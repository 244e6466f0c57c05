"""What one attempt at the function of a run does with authors' code that is not as it should be."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from perdure import Agent, RunContext, RunStepFailed
from perdure.errors import AgentGone, RunDiverged, RunStuck, Unavailable, UnreadableState
from perdure.harness.runs import body
from perdure.protocol import names
from perdure.protocol.deliveries import LOCAL
from perdure.protocol.events import EventType, NewEvent
from perdure.store.lifecycle import Keep
from perdure.store.values import Commit, Consumption, NewRecord, SessionChange, SessionQuery
from tests.runs.played import PlayedRun, played
from tests.support import given

#: Longer than what is allowed to take long here, and shorter than a test.
_SECONDS = 20.0


class Halt(BaseException):
    """What `except Exception` does not catch."""


@contextlib.asynccontextmanager
async def in_time() -> AsyncGenerator[None]:
    async with asyncio.timeout(_SECONDS):
        yield


async def nothing() -> None:
    pass


async def halts() -> None:
    raise Halt("the key is 1234")


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


CALLS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "sleep-text": lambda ctx: ctx.sleep("5"),
    "sleep-bool": lambda ctx: ctx.sleep(True),
    "prompt-number": lambda ctx: ctx.prompt("clerk", 5),
    "prompt-list": lambda ctx: ctx.prompt(["clerk"], "hello"),
    "prompt-session": lambda ctx: ctx.prompt("clerk", "hello", session=5),
    "prompt-schema": lambda ctx: ctx.prompt("clerk", "hello", output_schema="text"),
    "ask-number": lambda ctx: ctx.ask(5),
    "ask-options": lambda ctx: ctx.ask("Which?", [1, 2]),
    "step-timeout": lambda ctx: ctx.step("step", nothing, timeout=float("nan")),
    "step-of-a-day": lambda ctx: ctx.step("step", nothing, timeout=86_400.0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
async def test_a_call_with_an_argument_of_another_type_raises_in_the_function(
    call: Callable[[Any], Awaitable[Any]],
) -> None:
    async def function(ctx: RunContext, _: Any) -> None:
        await call(ctx)

    async with played(function) as run, in_time():
        looked = await run.enter()

        assert looked.ended
        assert (await run.record()).error["name"] == "InvalidDeclaration"  # type: ignore[index]


async def test_a_sleep_that_no_number_of_seconds_describes_fails_as_a_step_does() -> None:
    async def function(ctx: RunContext, _: Any) -> list[str]:
        failures: list[str] = []
        for seconds in (-1, float("nan"), float("inf"), 10**400):
            try:
                await ctx.sleep(seconds)
            except RunStepFailed as failed:
                failures.append(failed.error)
        return failures

    async with played(function) as run, in_time():
        await run.enter()

        assert (await run.record()).result == ["ValueError"] * 4


@pytest.mark.parametrize(("step", "error"), [(halts, "Halt"), (cancels_itself, "CancelledError")])
async def test_a_step_that_raises_what_nobody_catches_has_failed_all_the_same(step: Any, error: str) -> None:
    async def function(ctx: RunContext, _: Any) -> str:
        try:
            await ctx.step("step", step)
        except RunStepFailed as failed:
            return failed.error
        return "nothing"

    async with played(function) as run, in_time():
        await run.enter()

        assert (await run.record()).result == error


async def test_a_function_that_raises_what_nobody_catches_ends_the_run() -> None:
    async def function(ctx: RunContext, _: Any) -> None:
        await halts()

    # Raised from here, its text would be written to Temporal.
    async with played(function) as run, in_time():
        looked = await run.enter()

        assert looked.ended
        assert (await run.record()).error == {"name": "Halt", "message": "the key is 1234"}


@pytest.fixture
async def stubborn(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Callable[[], Awaitable[None]]]:
    """A step that swallows what stops it, until the test is over."""
    monkeypatch.setattr(body, "_STOP_SECONDS", 0.1)
    over = asyncio.Event()

    async def step() -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    yield step
    over.set()


async def test_a_step_that_swallows_what_stops_it_is_over_when_its_time_is(stubborn: Any) -> None:
    async def function(ctx: RunContext, _: Any) -> str:
        try:
            await ctx.step("step", stubborn, timeout=0.1)
        except RunStepFailed as failed:
            return failed.error
        return "nothing"

    async with played(function) as run, in_time():
        await run.enter()

        assert (await run.record()).result == "TimeoutError"


async def test_an_attempt_ends_although_its_step_swallows_what_stops_it(stubborn: Any) -> None:
    begun = asyncio.Event()

    async def step() -> None:
        begun.set()
        await stubborn()

    async def function(ctx: RunContext, _: Any) -> None:
        await ctx.step("step", step)

    async with played(function) as run, in_time():
        attempt = asyncio.create_task(run.enter())
        await begun.wait()
        await run.request_cancel()
        attempt.cancel()
        await asyncio.wait((attempt,))
        looked = await run.enter()

        assert looked.ended
        assert (await run.record()).error["name"] == "RunCancelled"  # type: ignore[index]


async def test_a_step_ends_before_the_run_stops_for_a_call_that_cannot_be_made() -> None:
    begun, may_end, effects = asyncio.Event(), asyncio.Event(), list[str]()

    async def slow() -> None:
        begun.set()
        await may_end.wait()
        effects.append("done")

    async def function(ctx: RunContext, _: Any) -> None:
        await asyncio.gather(ctx.step("slow", slow), ctx.prompt("somebody", "hello"))

    async with played(function) as run, in_time():
        attempt = asyncio.create_task(run.enter())
        await begun.wait()
        # So long it goes on, although the other call has stopped the run.
        await asyncio.wait((attempt,), timeout=0.5)
        may_end.set()
        with pytest.raises(AgentGone):
            await attempt

        assert effects == ["done"]
        assert "run.step.completed" in [event.type for event in await run.events()]


RESULTS = {"large": "x" * 2_000_000, "many-digits": 10**5000, "an-object": object(), "half-a-character": "\ud800"}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS.keys())
async def test_a_result_that_cannot_be_kept_ends_the_run_as_errored(result: Any) -> None:
    async def function(ctx: RunContext, _: Any) -> Any:
        return result

    async with played(function) as run, in_time():
        looked = await run.enter()

        assert looked.ended
        assert (await run.record()).status == "errored"


class Old(BaseModel):
    day: str


class New(BaseModel):
    day: str
    region: str


async def test_a_run_waits_for_an_input_type_that_fits_again() -> None:
    async def function(ctx: RunContext, given: Old) -> str:
        await ctx.step("step", nothing)
        await ctx.ask("Which?", ["a"])
        return given.day

    async with played(function, {"day": "monday"}, input=Old) as run, in_time():
        await run.enter()
        run.serve(function, input=New)
        with pytest.raises(RunDiverged):
            await run.enter()

        assert (await run.record()).status == "active"


async def test_an_input_that_has_never_fitted_ends_the_run() -> None:
    async def function(ctx: RunContext, given: New) -> None:
        pass

    async with played(function, {"day": "monday"}, input=New) as run, in_time():
        looked = await run.enter()

        assert looked.ended
        assert "region" in (await run.record()).error["message"]  # type: ignore[index]


async def test_an_attempt_that_takes_too_long_goes_on_in_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_LONGEST_ATTEMPT", 0.3)

    async def function(ctx: RunContext, _: Any) -> int:
        for _ in range(5):
            await ctx.step("step", asyncio.sleep, 0.1)
        return 5

    async with played(function) as run, in_time():
        attempts = 1
        while not (await run.enter()).ended:
            attempts += 1

        assert attempts > 1
        assert (await run.record()).result == 5


@pytest.mark.parametrize("in_a_thread", [False, True])
async def test_what_a_step_logs_does_not_hide_what_is_logged_later(in_a_thread: bool) -> None:
    async def function(ctx: RunContext, _: Any) -> None:
        async def step() -> None:
            ctx.log("info", "in the step")

        def plain() -> None:
            ctx.log("info", "in the step")

        await ctx.step("step", plain if in_a_thread else step)
        await ctx.sleep(0.1)
        ctx.log("info", "after the sleep")

    async with played(function) as run, in_time():
        while not (await run.enter()).ended:
            await asyncio.sleep(0.05)

        logged = [(event.data or {})["message"] for event in await run.events() if event.type == "run.log"]
        assert logged == ["in the step", "after the sleep"]


async def test_a_step_that_makes_a_call_of_the_run_fails() -> None:
    async def function(ctx: RunContext, _: Any) -> str:
        async def outer() -> None:
            await ctx.step("inner", nothing)

        try:
            await ctx.step("outer", outer)
        except RunStepFailed as failed:
            return failed.error
        return "nothing"

    async with played(function) as run, in_time():
        await run.enter()

        assert (await run.record()).result == "InvalidDeclaration"


async def test_a_run_with_many_waits_names_some_of_them() -> None:
    async def function(ctx: RunContext, _: Any) -> None:
        await asyncio.gather(*(ctx.sleep(3600) for _ in range(200)))

    async with played(function) as run, in_time():
        await run.enter()

        waiting = (await run.record()).waiting_for
        assert waiting is not None
        assert waiting.endswith(", and 190 more")


async def test_a_run_whose_workers_die_is_entered_again_only_when_somebody_wants_that() -> None:
    async def function(ctx: RunContext, _: Any) -> int:
        return await ctx.step("step", int, effects="idempotent")

    async with played(function) as run, in_time():
        looked = await run.enter(deaths=10)

        # Without a time: the workflow waits for news.
        assert (looked.ended, looked.due) == (False, None)
        row = await run.store.session(run.id)
        assert row is not None
        assert row.attention is not None
        assert row.attention["code"] == "RUN_KILLS_WORKERS"
        assert (await run.enter()).ended


async def hands_over(ctx: RunContext, _: Any) -> str:
    return await ctx.prompt("clerk", "hello")


@pytest.mark.parametrize("session", [None, "desk"])
async def test_a_session_is_started_only_where_its_agent_is_known(
    session: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def function(ctx: RunContext, _: Any) -> Any:
        return await ctx.prompt("clerk", "hello", session=session)

    async def away(*_: Any) -> None:
        raise Unavailable

    async with played(function) as run, in_time():
        with monkeypatch.context() as before_the_session:
            before_the_session.setattr(run.store, "create_session", away)
            with pytest.raises(Unavailable):
                await run.enter()
        run.serve(function, agent=Agent("somebody"))

        # It would have none of the bounds that the agent declares.
        with pytest.raises(AgentGone):
            await run.enter()
        run.serve(function)
        await run.enter()
        assert len((await run.store.sessions(SessionQuery())).sessions) == 1


async def test_a_run_whose_records_nobody_can_read_is_cancelled_with_its_agents() -> None:
    async with played(hands_over) as run, in_time():
        await run.enter()
        of_a_newer_build = NewRecord(turn=0, step=1, key="step/next", format="perdure/run-settled/99", body={})
        await run.store.commit(Commit(run.id, records=[of_a_newer_build]))
        with pytest.raises(UnreadableState):
            await run.enter()
        await run.request_cancel()
        looked = await run.enter()

        assert looked.ended
        (child,) = (await run.store.sessions(SessionQuery(parent=run.id))).sessions
        assert child.cancel_turn == 0


async def test_a_run_whose_input_is_damaged_needs_attention(tmp_path: Path) -> None:
    file = tmp_path / "perdure.db"
    async with played(hands_over, url=f"sqlite:///{file}") as run, in_time():
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            database.execute("UPDATE runs SET input = '{'")

        with pytest.raises(UnreadableState):
            await run.enter()


# --- sessions with a name -----------------------------------------------------------------------------------


async def asks_the_desk(ctx: RunContext, _: Any) -> str:
    try:
        return await ctx.prompt("clerk", "hello", session="desk")
    except RunStepFailed as failed:
        return failed.error


async def the_desk(run: PlayedRun) -> str:
    (row,) = (await run.store.sessions(SessionQuery())).sessions
    return row.session_id


async def end(run: PlayedRun, session_id: str) -> None:
    await run.store.commit(Commit(session_id, close=True, change=SessionChange(status="completed")))


async def test_a_run_learns_that_the_session_it_waits_for_was_deleted() -> None:
    async with played(asks_the_desk) as run, in_time():
        await run.enter()
        desk = await the_desk(run)
        await run.store.begin_deletion(desk)
        await end(run, desk)
        while not await run.store.purge(desk, 100):
            pass
        looked = await run.enter()

        assert looked.ended
        assert (await run.record()).result == "SESSION_DELETED"
        assert not (await run.store.sessions(SessionQuery())).sessions


async def test_a_run_learns_that_the_session_it_waits_for_has_ended_before_it_read_the_message() -> None:
    async with played(asks_the_desk) as run, in_time():
        await run.enter()
        await end(run, await the_desk(run))
        await run.enter()

        assert (await run.record()).result == "session_not_active"


async def test_a_run_learns_that_the_result_it_waits_for_has_expired() -> None:
    async with played(asks_the_desk) as run, in_time():
        await run.enter()
        desk = await the_desk(run)
        (delivery,) = await run.store.unread(desk)
        completed = NewEvent(type=EventType.TURN_COMPLETED, key=names.turn_key(0, "completed"), turn=0)
        heard = Consumption(0, [delivery.delivery_id])
        await run.store.commit(Commit(desk, events=[completed], consume=heard))
        await end(run, desk)
        await run.store.expire(Keep(records=-60.0), None, 10)
        await run.enter()

        assert (await run.record()).result == "RESULT_EXPIRED"


async def test_a_run_that_looks_at_a_session_again_does_not_signal_it_again() -> None:
    async with played(asks_the_desk) as run, in_time():
        for _ in range(4):
            await run.enter()

        assert run.drivers.delivered == []


async def test_a_run_whose_message_has_a_key_that_was_used_before_needs_attention() -> None:
    async with played(asks_the_desk) as run, in_time():
        # Callers choose their keys.
        taken = given.delivery("taken", key=f"run/{run.id}/0", owner=LOCAL.owner)
        await run.store.create_session(given.session(), taken)

        with pytest.raises(RunStuck):
            await run.enter()
        await run.request_cancel()
        assert (await run.enter()).ended
