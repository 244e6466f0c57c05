"""Commands of an operator, run in this process: one of its own takes half a second of processor time to start."""

import contextlib
import io
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess
from unittest import mock

from perdure.cli.commands import run as run_command


def perdure(*words: str, environment: Mapping[str, str]) -> "CompletedProcess[str]":
    """What `perdure` with these words and nothing but this environment says, and its exit code."""
    said, refused = io.StringIO(), io.StringIO()

    def run() -> int:
        try:
            run_command(words)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    with (
        mock.patch.dict(os.environ, environment, clear=True),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(refused),
        # The command has a loop of its own, and the test may be inside of one.
        ThreadPoolExecutor(1) as thread,
    ):
        code = thread.submit(run).result()
    return CompletedProcess(words, code, said.getvalue(), refused.getvalue())
