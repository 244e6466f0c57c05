"""`kill -9` of Temporal in the middle of a run, and while it waits."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.runs.test_deaths import caller, until_record, until_waiting
from tests.support.ledger import Ledger, running_ledger
from tests.support.stack import Stack, TemporalServer
from tests.support.waiting import until

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Generator[Ledger]:
    with running_ledger(tmp_path_factory.mktemp("ledger")) as ledger:
        yield ledger


@pytest.fixture(scope="module")
def temporal(tmp_path_factory: pytest.TempPathFactory) -> Generator[TemporalServer]:
    server = TemporalServer(tmp_path_factory.mktemp("temporal"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, temporal: TemporalServer, ledger: Ledger) -> Generator[Stack]:
    environment = {"LEDGER_URL": ledger.url}
    directory: Path = tmp_path_factory.mktemp("stack")
    with Stack(
        directory, provider=True, agents="tests.runs.declared:agents", environment=environment, temporal=temporal
    ) as stack:
        yield stack


async def test_a_step_that_runs_meanwhile_is_done_once_and_so_is_the_next(
    stack: Stack, temporal: TemporalServer, ledger: Ledger
) -> None:
    async with caller(stack) as http:
        run_id = (await http.post("/workflows/between", json={"note": "t1"})).json()["runId"]
        await until(lambda: ledger.reached("t1"), "the step to be at its gate")
        temporal.restart()
        await temporal.ready()
        ledger.open("t1")
        over = await until_record(http, run_id, status="completed")

    assert over["result"] == "after of t1"
    assert [len(ledger.of_call(what, "t1")) for what in ("before", "after")] == [1, 1]


async def test_a_run_that_waits_goes_on(stack: Stack, temporal: TemporalServer, ledger: Ledger) -> None:
    async with caller(stack) as http:
        run_id = (await http.post("/workflows/sleeper", json={"note": "t2", "seconds": 3})).json()["runId"]
        await until_waiting(http, run_id)
        temporal.restart()
        over = await until_record(http, run_id, status="completed")

    assert over["result"] == ["before of t2", "after of t2"]
    assert [len(ledger.of_call(what, "t2")) for what in ("before", "after")] == [1, 1]
