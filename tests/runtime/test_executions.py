"""Executions: a request, and its result, whatever becomes of the caller."""

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel, Field, field_validator

from perdure import AgentRegistry, ExecutionFailed
from perdure.errors import AgentNotFound, IdempotencyConflict, Invalid, SessionDeleted
from perdure.protocol import names
from perdure.protocol.deliveries import Principal
from perdure.runtime.open import open_sessions
from perdure.runtime.sessions import Sessions
from perdure.runtime.signals import Signals
from perdure.store.base import Store
from perdure.store.lifecycle import Keep
from perdure.store.values import SessionQuery
from tests.runtime.executing import Bill, cashier, order
from tests.support.plugin import StackFactory
from tests.support.processes import Process, clean_environment
from tests.support.stack import Stack
from tests.support.waiting import until

BOB = Principal(principal_id="bob", principal_type="user", authenticator="test", subject="bob")


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.runtime.executing:cashier")


@pytest.fixture
async def store(stack: Stack) -> AsyncGenerator[Store]:
    store = await stack.store()
    yield store
    await store.close()


@pytest.fixture
async def sessions(stack: Stack, store: Store) -> Sessions:
    return await open_sessions(stack.settings, store, agents=AgentRegistry([cashier]))


def new_key() -> str:
    return f"bill-{uuid.uuid4().hex}"


async def of_request(store: Store, item: str) -> list[Any]:
    """The sessions whose request has this item."""
    page = await store.sessions(SessionQuery(limit=100))
    found: list[Any] = []
    for row in page.sessions:
        slot = (await store.slots(row.session_id)).get(names.REQUEST_SLOT)
        request: Any = {} if slot is None else slot.value
        if request and request["value"].get("item") == item:
            found.append(row)
    return found


async def test_a_request_gets_its_result(stack: Stack, sessions: Sessions, store: Store) -> None:
    bill = await sessions.execute("cashier", order(12, item="oolong"), output=Bill, key=new_key())

    assert bill == Bill(total=12)
    (row,) = await of_request(store, "oolong")
    assert (row.mode, row.status) == ("task", "completed")
    (said,) = [event.data for event in await store.events(row.session_id) if event.type == "message.received"]
    assert json.loads((said or {})["message"]) == order(12, item="oolong").model_dump()
    requests = httpx2.get(f"{stack.provider_url}/requests", verify=False).json()["requests"]
    assert any("Make the bill for oolong." in each["instructions"] for each in requests)


async def test_an_execution_is_forked_between_its_steps_with_its_request(sessions: Sessions, store: Store) -> None:
    await sessions.execute("cashier", order(5, seconds=0.01, item="forked"), output=Bill, key=new_key())
    (row,) = await of_request(store, "forked")

    fork = await sessions.fork(row.session_id, 0, step=0)

    slots = [(await store.slots(each)).get(names.REQUEST_SLOT) for each in (row.session_id, fork.session_id)]
    assert slots[1] == slots[0] is not None


async def test_many_calls_under_one_key_are_one_session(sessions: Sessions, store: Store) -> None:
    key = new_key()

    bills = await asyncio.gather(
        *(sessions.execute("cashier", order(3, item="many"), output=Bill, key=key) for _ in range(6))
    )
    again = await sessions.execute("cashier", order(3, item="many"), output=Bill, key=key)

    assert [*bills, again] == [Bill(total=3)] * 7
    assert len(await of_request(store, "many")) == 1


async def test_fields_in_another_order_are_the_same_request(sessions: Sessions) -> None:
    key, script = new_key(), 'call final_output {"total": 4}'

    first = await sessions.execute("cashier", {"item": "tea", "script": script}, output=Bill, key=key)

    assert await sessions.execute("cashier", {"script": script, "item": "tea"}, output=Bill, key=key) == first


class Other(BaseModel):
    total: int = Field(description="Another one.")


@pytest.mark.parametrize(("total", "output"), [(2, Bill), (1, Other)])
async def test_another_request_under_a_key_is_a_conflict(sessions: Sessions, total: int, output: type[Any]) -> None:
    key = new_key()
    await sessions.execute("cashier", order(1), output=Bill, key=key)

    with pytest.raises(IdempotencyConflict):
        await sessions.execute("cashier", order(total), output=output, key=key)


async def test_each_principal_has_keys_of_its_own(sessions: Sessions) -> None:
    key = new_key()

    ours = await sessions.execute("cashier", order(1), output=Bill, key=key)
    bobs = await sessions.execute("cashier", order(2), output=Bill, key=key, principal=BOB)

    assert (ours.total, bobs.total) == (1, 2)


async def test_a_timeout_bounds_the_wait_and_not_the_session(sessions: Sessions, store: Store) -> None:
    key = new_key()

    with pytest.raises(TimeoutError, match="It goes on"):
        await sessions.execute("cashier", order(5, seconds=2, item="slow"), output=Bill, key=key, timeout=0.3)

    bill = await sessions.execute("cashier", order(5, seconds=2, item="slow"), output=Bill, key=key, timeout=60)
    assert bill.total == 5
    assert len(await of_request(store, "slow")) == 1


async def test_a_cancelled_caller_leaves_its_session_alone(sessions: Sessions, store: Store) -> None:
    key = new_key()
    call = asyncio.ensure_future(sessions.execute("cashier", order(6, seconds=2, item="left"), output=Bill, key=key))

    async def begun() -> bool:
        return [each.turns for each in await of_request(store, "left")] == [1]

    await until(begun, "the turn to begin")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert (await sessions.execute("cashier", order(6, seconds=2, item="left"), output=Bill, key=key)).total == 6
    assert [each.status for each in await of_request(store, "left")] == ["completed"]


async def test_a_caller_that_was_killed_finds_its_result(stack: Stack, sessions: Sessions, tmp_path: Path) -> None:
    key, program = new_key(), [sys.executable, "-m", "tests.runtime.executing"]
    environment = {**clean_environment(), **stack.environment}
    doomed = Process("caller", [*program, key], tmp_path / "doomed.log", environment)
    store = await stack.store()

    async def begun() -> bool:
        page = await store.sessions(SessionQuery(limit=100))
        return any(row.status == "running" for row in page.sessions)

    await until(begun, "the session to run")
    doomed.kill()
    again = Process("caller", [*program, key], tmp_path / "again.log", environment)
    await until(lambda: not again.alive, "the second caller to end")

    assert "7" in again.output.split()
    assert (await sessions.execute("cashier", order(7, seconds=3), output=Bill, key=key)).total == 7
    await store.close()


class Died(BaseException):
    """The process is gone."""


async def test_what_a_caller_wrote_before_it_died_is_started_by_the_next_call(
    sessions: Sessions, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()

    async def dies(*_: object) -> bool:
        raise Died

    with monkeypatch.context() as broken:
        broken.setattr(Signals, "start", dies)
        with pytest.raises(Died):
            await sessions.execute("cashier", order(8), output=Bill, key=key)

    assert (await sessions.execute("cashier", order(8), output=Bill, key=key, timeout=60)).total == 8


async def test_a_session_that_fails_says_why_each_time(sessions: Sessions) -> None:
    key = new_key()
    for _ in range(2):
        with pytest.raises(ExecutionFailed) as failed:
            await sessions.execute("cashier", {"script": "say no"}, output=Bill, key=key)

        assert failed.value.failure == "OUTPUT_SCHEMA_NOT_FULFILLED"
        assert failed.value.session_id.startswith("ses_")
        assert str(failed.value).startswith("OUTPUT_SCHEMA_NOT_FULFILLED: The agent could not")


async def test_a_session_that_is_cancelled_fails_with_that(sessions: Sessions, store: Store) -> None:
    key = new_key()
    call = asyncio.ensure_future(sessions.execute("cashier", order(1, seconds=60, item="stop"), output=Bill, key=key))

    async def begun() -> bool:
        return [each.turns for each in await of_request(store, "stop")] == [1]

    await until(begun, "the turn to begin")
    (row,) = await of_request(store, "stop")
    await sessions.cancel(row.session_id)

    with pytest.raises(ExecutionFailed, match="TURN_CANCELLED"):
        await call


class Picky(BaseModel):
    total: int

    @field_validator("total")
    @classmethod
    def _even(cls, total: int) -> int:
        if total % 2:
            raise ValueError("not even")
        return total


async def test_a_result_that_its_type_refuses_is_no_result(sessions: Sessions) -> None:
    with pytest.raises(ExecutionFailed, match="not even"):
        await sessions.execute("cashier", order(7), output=Picky, key=new_key())


async def test_a_result_of_another_type_than_an_object_is_read(sessions: Sessions) -> None:
    script = 'call final_output {"value": [1, 2]}'

    assert await sessions.execute("cashier", {"script": script}, output=list[int], key=new_key()) == [1, 2]


async def test_the_result_outlives_the_messages_and_not_the_records(sessions: Sessions, store: Store) -> None:
    key = new_key()
    await sessions.execute("cashier", order(9, item="old"), output=Bill, key=key)
    (row,) = await of_request(store, "old")

    await expire(store, Keep(messages=0))
    assert (await sessions.execute("cashier", order(9, item="old"), output=Bill, key=key)).total == 9
    await expire(store, Keep(messages=0, records=0))
    with pytest.raises(ExecutionFailed, match="RESULT_EXPIRED"):
        await sessions.execute("cashier", order(9, item="old"), output=Bill, key=key)
    assert (await store.session(row.session_id)) is not None


async def expire(store: Store, keep: Keep) -> None:
    cursor = None
    while (cursor := await store.expire(keep, cursor, 100)) is not None:
        pass


async def test_the_key_of_a_deleted_session_starts_nothing(sessions: Sessions, store: Store) -> None:
    key = new_key()
    await sessions.execute("cashier", order(2, item="gone"), output=Bill, key=key)
    (row,) = await of_request(store, "gone")
    await sessions.delete(row.session_id, patience=0)

    with pytest.raises(SessionDeleted):
        await sessions.execute("cashier", order(2, item="gone"), output=Bill, key=key)
    with pytest.raises(IdempotencyConflict):
        await sessions.execute("cashier", order(3, item="gone"), output=Bill, key=key)
    assert await of_request(store, "gone") == []


@pytest.mark.parametrize(
    ("request_", "key"),
    [([1], "k"), ({"at": object()}, "k"), ({"share": float("nan")}, "k"), ({}, ""), ({}, "k" * 256)],
)
async def test_what_cannot_be_kept_is_refused(sessions: Sessions, request_: Any, key: str) -> None:
    with pytest.raises(Invalid):
        await sessions.execute("cashier", request_, output=Bill, key=key)


async def test_an_agent_that_is_not_known_here_is_not_asked(sessions: Sessions) -> None:
    with pytest.raises(AgentNotFound):
        await sessions.execute("casheir", order(1), output=Bill, key=new_key())
