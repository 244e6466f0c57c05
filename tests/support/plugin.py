"""Fixtures that run the real product, and what it said when a test fails."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import LIVE, Stack, TemporalServer

StackFactory = Callable[..., Stack]

#: Here workers run all workflows in Temporal's sandbox, which finds what they must not do. Elsewhere they run as in
#: production: to import the workflows again for each run is an eighth of the time of a test.
_SANDBOXED = ("children", "conformance", "parking", "session_machine", "topology", "workflows")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    package = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    os.environ["PERDURE_SANDBOX"] = "on" if package in _SANDBOXED else "off"


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
def module_stack(tmp_path_factory: pytest.TempPathFactory, temporal_server: TemporalServer) -> Generator[StackFactory]:
    """Makes stacks of any shape on the server of all tests; they end with the module."""
    with _making(tmp_path_factory.mktemp("stacks"), temporal_server) as make:
        yield make


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    """One worker, one API and the scripted provider, for the tests of one module."""
    return module_stack(provider=True)


@pytest.fixture
def make_stack(tmp_path: Path, temporal_server: TemporalServer) -> Generator[StackFactory]:
    """Makes stacks of any shape on the server of all tests; they end with the test."""
    with _making(tmp_path, temporal_server) as make:
        yield make


@contextmanager
def _making(directory: Path, temporal: TemporalServer) -> Generator[StackFactory]:
    made: list[Stack] = []

    def make(**options: Any) -> Stack:
        options.setdefault("temporal", temporal)
        made.append(Stack(directory / f"stack-{len(made)}", **options))
        return made[-1]

    try:
        yield make
    finally:
        for stack in made:
            stack.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for stack in LIVE:
            report.sections += [(f"{stack.directory.name}/{name}", output) for name, output in stack.logs()]
    return report
