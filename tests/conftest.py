"""What all tests share.

Property tests try the same examples each time, so that a run says something about the change and not about luck.
Others are tried by hand: `PERDURE_NEW_EXAMPLES=1 pytest tests/harness/test_bad_text.py`. What they find becomes a test.
"""

import os

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

pytest_plugins = ["tests.support.case_names", "tests.support.plugin", "tests.support.postgres"]
