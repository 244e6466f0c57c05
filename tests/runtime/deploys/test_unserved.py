"""A delivery to a session whose build has no worker: accepted, reported as delayed, and read once a worker is there."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

import worker as composition
from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.requests import Finished, ModelCall, ModelOutcome
from perdure.runtime.deploys.builds import warn_unversioned
from perdure.runtime.drivers.client import DriverClient
from perdure.runtime.reconciler import Reconciler
from perdure.runtime.signals import Signals
from perdure.runtime.sweeper import Sweeper
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.follow import read_all
from perdure.store.open import open_store
from tests.runtime.deploys.test_drain import parked_sessions
from tests.support import given
from tests.support.fleet import Fleet, Operator
from tests.support.fleet import fleet as fleet
from tests.support.fleet import operator as operator
from tests.support.waiting import until
from tests.support.workflows import Bench, Driven, Outside

MESSAGE = "No worker of build v1 runs, and the session is on this build."


class Api:
    """What an API process does with deliveries, one look and one sweep at a time."""

    def __init__(self, store: Store, bench: Bench) -> None:
        self.store = store
        driver = DriverClient(bench.client, bench.settings.task_queue)
        self.signals = Signals(store, driver)
        self.reconciler = Reconciler(store, driver)
        # Less than nothing: what was accepted in this very moment is found too.
        self.sweeper = Sweeper(store, self.signals, older_than=-60)

    async def knows(self, session: Driven) -> None:
        """Have the session in the store, too."""
        await self.store.create_session(given.session(session.handle.id))
        await self.store.commit(given.ending(session_id=session.handle.id))

    async def looks_until(self, *unserved: str) -> None:
        """Compare with Temporal's lists, which are some seconds old, until these sessions are without a worker."""
        async with asyncio.timeout(20):
            while set(self.signals.unserved) != set(unserved):
                await asyncio.sleep(0.1)
                await self.reconciler.reconcile()

    async def is_delayed(self, session: Driven, delivery_id: str) -> bool:
        """Accept a message; whether its receipt says `delayed`."""
        ref = DeliveryRef(id=delivery_id, kind="message", token_hash="now").model_dump(mode="json")
        delivery = given.delivery(delivery_id, session_id=session.handle.id, ref=ref)
        accepted = await self.store.accept(delivery)
        return not await self.signals.deliver(accepted.delivery, unsignalled=accepted.unsignalled)

    async def starts(self, session_id: str) -> bool:
        """Start a session with a message; whether its receipt says nothing of a delay."""
        delivery_id = f"dlv_{session_id}"
        token_hash = f"token of {session_id}"
        ref = DeliveryRef(id=delivery_id, kind="message", token_hash=token_hash).model_dump(mode="json")
        session = given.session(session_id)
        await self.store.create_session(session)
        await self.store.accept(given.delivery(delivery_id, session_id=session_id, ref=ref))
        return await self.signals.start(session, ref)

    async def attention(self, session: Driven) -> list[str]:
        return await self.attention_of(session.handle.id)

    async def attention_of(self, session_id: str) -> list[str]:
        events = [each async for each in read_all(self.store, session_id)]
        return [(each.data or {})["message"] for each in events if each.type == "session.attention"]


@pytest.fixture
async def api(bench: Bench, tmp_path: Path) -> AsyncGenerator[Api]:
    store = await open_store(f"sqlite:///{tmp_path / 'test.db'}")
    await store.migrate()
    yield Api(store, bench)
    await store.close()


async def test_it_is_reported_and_read_after_a_take_over(
    bench: Bench, fleet: Fleet, operator: Operator, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Outside(), Outside()
    async with fleet.build("v2", second):
        async with fleet.current("v1", first):
            gone, quiet = await parked_sessions(bench, first, 2)
            await api.knows(gone)
            await api.knows(quiet)
            await api.looks_until()
            await fleet.make_current("v2")
        await api.looks_until(gone.handle.id, quiet.handle.id)
        delayed = await api.is_delayed(gone, "dlv_late")
        await api.sweeper.sweep()
        await api.sweeper.sweep()
        said = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
        attention = [await api.attention(gone), await api.attention(quiet)]

        await operator.says("drain", "v1", "--take-over")
        await second.until(lambda: "dlv_late" in second.consumed)
        await api.looks_until()
        prompt = not await api.is_delayed(gone, "dlv_prompt")
        await second.until(lambda: "dlv_prompt" in second.consumed)

    assert delayed
    assert attention == [[MESSAGE], []]
    assert said == [
        "2 sessions wait for a worker of build v1, and none runs: start one, or run "
        "`perdure deploy drain v1 --take-over`"
    ]
    assert prompt


async def test_it_is_read_when_a_worker_of_the_build_is_back(bench: Bench, fleet: Fleet, api: Api) -> None:
    first, back = Outside(), Outside()
    async with fleet.current("v1", first):
        (session,) = await parked_sessions(bench, first, 1)
        await api.knows(session)
        await api.looks_until()
    await api.looks_until(session.handle.id)
    delayed = await api.is_delayed(session, "dlv_late")
    async with fleet.build("v1", back):
        await back.until(lambda: back.consumed == ["dlv_late"])
        # The sweeper looks again, too: it does not wait for the next comparison.
        async with asyncio.timeout(20):
            while api.signals.unserved:
                await api.sweeper.sweep()
        prompt = not await api.is_delayed(session, "dlv_prompt")

    assert delayed
    assert prompt


async def test_a_new_session_waits_for_the_current_build_and_says_so(
    bench: Bench, fleet: Fleet, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    new, newer, newest = (f"ses_{uuid.uuid4().hex}" for _ in range(3))
    back = Outside()
    async with fleet.current("v1", Outside()):
        pass
    await api.starts(new)
    await api.looks_until(new)
    await api.sweeper.sweep()
    delayed = not await api.starts(newer)
    attention = await api.attention_of(new)
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    async with fleet.build("v1", back):
        await back.until(lambda: set(back.consumed) == {f"dlv_{new}", f"dlv_{newer}"})
        await api.looks_until()
        prompt = await api.starts(newest)

    assert attention == [MESSAGE]
    assert delayed
    assert prompt
    assert said == [
        "1 sessions wait for a worker of build v1, and none runs: start one, or run "
        "`perdure deploy promote` for another build"
    ]


@pytest.mark.parametrize("bench", ["child", "inline"], indirect=True)
async def test_a_session_waits_whose_new_turn_no_worker_of_the_current_build_begins(
    bench: Bench, fleet: Fleet, api: Api
) -> None:
    first, back = Outside(), Outside()
    async with fleet.current("v1", first):
        (session,) = await parked_sessions(bench, first, 1)
        await api.knows(session)
        async with fleet.build("v2", Outside()):
            await fleet.make_current("v2", [names.TURNS_QUEUE])
        await api.is_delayed(session, "dlv_1")
        await api.looks_until(session.handle.id)
        async with fleet.build("v2", back):
            await back.until(lambda: back.consumed == ["dlv_1"])
            await api.looks_until()


@pytest.mark.usefixtures("api")
async def test_a_worker_without_a_build_says_that_it_gets_no_work(
    bench: Bench, fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(
        database_url=SecretStr(f"sqlite:///{tmp_path / 'test.db'}"),
        temporal_address=bench.client.service_client.config.target_host,
        task_queue=bench.settings.task_queue,
    )
    await warn_unversioned(bench.client, settings)
    before = caplog.messages.copy()
    async with fleet.current("v1", Outside()), composition.serving(settings):
        await until(lambda: "gets no work" in caplog.text, "the warning")

    assert before == []
    assert f"Start workers with PERDURE_DEPLOYMENT={fleet.deployment} and a PERDURE_BUILD_ID" in caplog.text


async def test_what_temporal_does_not_tell_a_worker_is_no_failure(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(bench.client.workflow_service), "describe_task_queue", away)

    await warn_unversioned(bench.client, bench.settings)

    assert caplog.messages == []


async def test_a_session_waits_for_the_build_of_its_turn_until_that_is_taken_over(
    bench: Bench, fleet: Fleet, operator: Operator, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composition, "GRACE", timedelta(0))
    first, second = Outside(), Outside()
    inside = asyncio.Event()

    async def hangs(call: ModelCall) -> ModelOutcome:
        inside.set()
        await asyncio.Event().wait()
        return Finished()

    async with fleet.build("v2", second):
        async with fleet.current("v1", first):
            first.answer = hangs
            session = await bench.start(first)
            await api.knows(session)
            await session.deliver("dlv_1")
            await inside.wait()
            await fleet.make_current("v2")
        await api.looks_until(session.handle.id)
        delayed = await api.is_delayed(session, "dlv_2")
        stays = await operator.runs("drain", "v1")
        moves = await operator.says("drain", "v1", "--take-over")
        await second.until(lambda: second.consumed == ["dlv_1", "dlv_2"])

    assert delayed
    assert f"{session.handle.id}  no worker of its build runs" in stays.stdout
    assert moves[-1] == "Nothing is left on build v1: its workers may stop."


async def test_what_cannot_be_looked_up_stays_as_it_was(bench: Bench, fleet: Fleet, api: Api) -> None:
    first = Outside()
    async with fleet.current("v1", first):
        (session,) = await parked_sessions(bench, first, 1)
        await api.knows(session)
        await api.looks_until()
    await api.looks_until(session.handle.id)

    async with fleet.build("v1", Outside()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(bench.client.workflow_service), "describe_task_queue", away)
            for _ in range(5):
                await api.sweeper.sweep()
                await asyncio.sleep(0.2)
            unknown = set(api.signals.unserved)
        await api.looks_until()

    assert unknown == {session.handle.id}


async def away(*args: object, **options: object) -> None:
    raise RuntimeError("Temporal is away")
