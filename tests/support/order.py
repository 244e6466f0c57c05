"""The order of tests when several processes share them."""

from itertools import groupby
from pathlib import Path

import pytest

#: Their tests wait for real processes, some for half a minute.
_WAITING = frozenset(
    {
        *("bench", "chaos", "children", "cli", "code_mode", "conformance", "dev", "examples", "packaging", "parking"),
        *("remote", "runtime", "session_machine", "topology", "workflows"),
    }
)

_TESTS = Path(__file__).parents[1]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each process a share that begins with tests that wait.

    xdist cuts the list into equal parts, and a process that is done takes tests from the end of another's part. If
    tests that wait are at the end, a few processes run them one after the other while the others have nothing to do.
    What is at the beginning of a share is never taken: modules whose tests share what many deaths have shown.
    """
    processes = int(getattr(config, "workerinput", {}).get("workercount", 1))
    if processes == 1:
        return
    # A module stays together: its tests share servers.
    modules = [list(module) for _, module in groupby(items, key=lambda item: item.path)]
    modules.sort(key=lambda module: not any(item.get_closest_marker("deaths") for item in module))
    waiting = [module for module in modules if _waits(module[0])]
    rest = [item for module in modules if not _waits(module[0]) for item in module]
    size = len(items) // processes
    ordered: list[pytest.Item] = []
    for start in range(processes):
        share = [item for module in waiting[start::processes] for item in module]
        share += [rest.pop(0) for _ in range(min(len(rest), size - len(share)))]
        ordered += share
    items[:] = ordered + rest


def _waits(item: pytest.Item) -> bool:
    return item.path.relative_to(_TESTS).parts[0] in _WAITING
