"""Fixtures that run the real product, and what it said when a test fails."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import LIVE, Stack, TemporalServer

StackFactory = Callable[..., Stack]


@pytest.fixture(scope="session")
def temporal_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[TemporalServer]:
    """A dev server for the whole run. Time can be skipped in it, and long histories are renewed early.

    It reports a workflow's problems from the first one on, not from the fifth.
    """
    config = {
        "frontend.WorkflowTimeSkippingEnabled": "true",
        "limit.historyCount.suggestContinueAsNew": "400",
        "system.numConsecutiveWorkflowTaskProblemsToTriggerSearchAttribute": "1",
    }
    server = TemporalServer(tmp_path_factory.mktemp("temporal"), dynamic_config=config)
    yield server
    server.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Generator[Stack]:
    """One worker, one API and the scripted provider, for the tests of one module."""
    with Stack(tmp_path_factory.mktemp("stack"), provider=True) as stack:
        yield stack


@pytest.fixture
def make_stack(tmp_path: Path) -> Generator[StackFactory]:
    """Makes stacks of any shape; they end with the test."""
    made: list[Stack] = []

    def make(**options: Any) -> Stack:
        made.append(Stack(tmp_path / f"stack-{len(made)}", **options))
        return made[-1]

    yield make
    for stack in made:
        stack.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for stack in LIVE:
            report.sections += [(f"{stack.directory.name}/{name}", output) for name, output in stack.logs()]
    return report
