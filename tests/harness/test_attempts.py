"""What the harness reports of its attempts: how each has ended and what it has used, without a commit of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from perdure import tool
from perdure.errors import AgentGone, ModelFailed, Superseded, ToolFailed, Unavailable
from perdure.models.base import Prompt
from perdure.protocol import deliveries
from perdure.protocol.events import Usage
from perdure.protocol.requests import Failure
from perdure.store.attempts import AttemptQuery, AttemptRow
from perdure.store.engine.database import Work
from perdure.testing import ScriptedModel, call
from tests.harness.test_usage import REPLIED, TOLD, Breaking, half_told, used
from tests.support.lab import SESSION, Lab, lab

BUSY = ModelFailed("The model busy answered 503.", transient=True)
SECRET = "sk-proj-abcdef123456"


async def attempts(it: Lab) -> list[AttemptRow]:
    return [*(await it.store.attempts.list(AttemptQuery(SESSION))).attempts]


async def ends(it: Lab) -> list[tuple[str, int, str, str | None]]:
    return [(each.key.scope, each.number, each.status, (each.error or {}).get("type")) for each in await attempts(it)]


async def spent(it: Lab) -> Usage:
    return sum((each.usage for each in await attempts(it)), Usage())


def counted(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The transactions that write, from now on."""
    database = store._database
    written: list[str] = []
    write: Callable[[Work[Any]], Awaitable[Any]] = database.write

    async def counting(work: Work[Any]) -> Any:
        written.append("commit")
        return await write(work)

    monkeypatch.setattr(database, "write", counting)
    return written


async def test_a_text_turn_costs_two_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One opens the step, and one records the reply: the attempt begins and ends with them."""
    async with lab(["Hello"]) as it:
        delivery = await it.deliver("Hi")
        written = counted(it.store, monkeypatch)

        await it.model(delivery)

        assert len(written) == 2
        assert await ends(it) == [("model", 1, "succeeded", None)]
        assert await spent(it) == await used(it) == REPLIED


async def test_a_tool_call_costs_two_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    @tool(effects="pure")
    def look() -> str:
        return "seen"

    async with lab([call("look")], look) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        written = counted(it.store, monkeypatch)

        await it.tool(ref)

        assert len(written) == 2
        assert (await ends(it))[0] == (f"call/{ref.call_id}", 1, "succeeded", None)


async def test_a_provider_that_answers_503_leaves_a_failed_attempt_for_each_try() -> None:
    async with lab([BUSY, BUSY, "Hello"]) as it:
        delivery = await it.deliver("Hi")
        for generation in (1, 2):
            with pytest.raises(ModelFailed):
                await it.model(delivery, generation=generation)

        await it.model(delivery, generation=3)

        assert await ends(it) == [
            ("model", 1, "failed", "MODEL_CALL_FAILED"),
            ("model", 2, "failed", "MODEL_CALL_FAILED"),
            ("model", 3, "succeeded", None),
        ]


async def test_a_failed_attempt_keeps_what_it_has_used() -> None:
    async with lab(Breaking(BUSY)) as it:
        delivery = await it.deliver("Hi")
        with pytest.raises(ModelFailed):
            await it.model(delivery, generation=1)
        it.models.now = ScriptedModel(["Hello"])

        await it.model(delivery, generation=2)

        assert [each.usage for each in await attempts(it)] == [TOLD, REPLIED]
        assert await spent(it) == await used(it)


async def test_the_last_attempt_fails_with_its_usage_once() -> None:
    async with lab(Breaking(BUSY)) as it:
        await it.model(await it.deliver("Hi"), number=6)

        assert await ends(it) == [("model", 6, "failed", "MODEL_CALL_FAILED")]
        assert await spent(it) == await used(it) == TOLD


async def test_a_cancelled_attempt_keeps_what_it_has_used() -> None:
    model = Breaking()
    async with lab(model) as it:
        step = asyncio.create_task(it.model(await it.deliver("Hi")))
        await model.told.wait()

        step.cancel()

        with pytest.raises(asyncio.CancelledError):
            await step
        assert await ends(it) == [("model", 1, "cancelled", "CANCELLED")]
        assert await spent(it) == await used(it) == TOLD


async def test_an_attempt_that_was_overtaken_keeps_what_it_has_used() -> None:
    model = Breaking()
    async with lab(model) as it:
        delivery, zombie = await half_told(it, model)
        it.models.now = ScriptedModel(["Hello"])
        await it.model(delivery, generation=2)

        zombie.cancel()

        with pytest.raises((asyncio.CancelledError, Superseded)):
            await zombie
        assert [each[2] for each in await ends(it)] == ["superseded", "succeeded"]
        assert [each.usage for each in await attempts(it)] == [TOLD, REPLIED]
        assert await spent(it) == await used(it)


async def test_a_summary_that_an_attempt_has_paid_for_is_in_its_report() -> None:
    async with lab(["Hello", "A summary", "Hello again"]) as it:
        await it.model(await it.deliver("Hi"))

        await it.control(deliveries.COMPACT, 1)
        await it.model(await it.deliver("And?"), turn=1, generation=2)

        assert await spent(it) == await used(it) == REPLIED + REPLIED + REPLIED
        assert [each[2] for each in await ends(it)] == ["succeeded", "succeeded", "succeeded"]


async def test_a_summary_that_fails_is_a_failed_attempt() -> None:
    async with lab(["Hello", ModelFailed("No.")]) as it:
        await it.model(await it.deliver("Hi"))

        await it.control(deliveries.COMPACT, 1)

        assert (await ends(it))[-1] == ("model", 1, "failed", "COMPACTION_FAILED")


async def test_a_failed_try_of_a_tool_keeps_its_error_without_secrets() -> None:
    @tool(effects="idempotent", retries=2)
    def ask() -> str:
        raise ValueError(f"refused with {SECRET}")

    async with lab([call("ask")], ask) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        with pytest.raises(ToolFailed):
            await it.tool(ref, generation=1)
        with pytest.raises(ToolFailed):
            await it.tool(ref, generation=2)

        await it.tool(ref, generation=3)

        tries = [each for each in await attempts(it) if each.key.scope != "model"]
        assert [each.status for each in tries] == ["failed", "failed", "failed"]
        assert {str(each.error) for each in tries} == {
            "{'type': 'ACTION_RESULT_FAILED', 'message': 'ValueError: refused with [redacted]'}"
        }


async def test_a_call_that_must_not_run_again_is_a_failed_attempt_after_a_superseded_one() -> None:
    @tool(effects="at_most_once")
    def pay() -> str:
        raise SystemExit

    class Died(BaseException):
        pass

    async with lab([call("pay")], pay) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        commit = it.store.commit

        async def dies(*_: Any, **__: Any) -> Any:
            raise Died

        it.harness = it.worker()
        runner: Any = cast("Any", it.harness)._tools
        runner._outcome = dies
        with pytest.raises(Died):
            await it.tool(ref, generation=1)
        it.harness = it.worker()

        await it.tool(ref, generation=2)

        assert it.store.commit == commit
        assert (await ends(it))[:2] == [
            (f"call/{ref.call_id}", 1, "superseded", "SUPERSEDED"),
            (f"call/{ref.call_id}", 2, "failed", "TOOL_OUTCOME_UNKNOWN"),
        ]


async def test_an_attempt_whose_turn_fails_without_it_ends_with_the_turn() -> None:
    async with lab(["Hello"]) as it:
        delivery = await it.deliver("Hi")
        it.harness = it.worker()
        caller: Any = cast("Any", it.harness)._models

        async def away(*_: Any) -> Any:
            raise Unavailable

        caller._call_and_settle = away
        with pytest.raises(Unavailable):
            await it.model(delivery)
        assert (await ends(it))[0][2] == "running"

        await it.conclude(Failure(code="STEP_TIMEOUT", message="It took too long."))

        assert await ends(it) == [("model", 1, "cancelled", "TURN_ENDED")]


async def test_a_control_whose_attempts_all_fail_leaves_none_that_runs() -> None:
    """Its turn is silent: nothing of it is recorded, and nothing else may come to end its attempts."""
    async with lab(["Hello", "Never"]) as it:
        await it.model(await it.deliver("Hi"))
        control = await it.deliver(None, kind=deliveries.COMPACT)

        def away(prompt: Prompt) -> Any:
            raise Unavailable

        models: Any = it.models
        models.now.stream = away
        with pytest.raises(Unavailable):
            await it.model(control, turn=1)
        assert [each[2] for each in await ends(it)] == ["succeeded", "running"]

        await it.conclude(Failure(code="STEP_TIMEOUT", message="It took too long."), control, turn=1)

        assert "running" not in [each[2] for each in await ends(it)]


async def test_an_attempt_that_never_began_is_not_reported() -> None:
    async with lab(["Hello"]) as it:
        delivery = await it.deliver("Hi")
        it.agent, served = it.agent.__class__("another"), it.agent
        it.harness = it.worker()
        it.agent = served
        with pytest.raises(AgentGone):
            await it.model(delivery, generation=1)
        it.harness = it.worker()

        await it.model(delivery, generation=2)

        assert await ends(it) == [("model", 2, "succeeded", None)]
