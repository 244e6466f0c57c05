"""What all tests share.

Property tests try the same examples each time, so that a run says something about the change and not about luck.
Others are tried by hand: `PERDURE_NEW_EXAMPLES=1 pytest tests/harness/test_bad_text.py`. What they find becomes a test.
"""

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine, and nothing about the code.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="PERDURE_NEW_EXAMPLES" not in os.environ,
    database=None,
)
settings.load_profile("patient")

# Looking for garbage after every few hundred new objects is an eighth of the time of a test that only computes.
gc.set_threshold(50_000, 20, 50)

# A shell starts what is to run in the background with interrupts ignored, and so would all processes of the tests be.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = [
    "tests.support.case_names",
    "tests.support.cases",
    "tests.support.order",
    "tests.support.plugin",
    "tests.support.postgres",
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is imported and collected: over a million objects that live as long as we do."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
