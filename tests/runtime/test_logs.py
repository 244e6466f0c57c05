"""The output of children is kept within bounds, and only what matters is shown."""

import logging
from pathlib import Path

import pytest

from perdure.agents.context import tool_log
from perdure.runtime.logs import FORMAT, BoundedLog, Lines, Notices

WARNING = b"2026-01-01 10:00:00,000 WARNING perdure.worker: careful\n"
INFO = b"2026-01-01 10:00:00,000 INFO perdure.worker: nothing\n"


def test_a_log_never_takes_more_than_twice_its_limit(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "worker.log", limit=1_000)

    for _ in range(100):
        log.write(b"x" * 99 + b"\n")
    log.close()

    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2_000


def test_a_traceback_is_shown_with_its_error() -> None:
    notices = Notices()

    shown = notices.feed(INFO + b"  detail\n" + WARNING + b"Traceback\n  line\n" + INFO)

    assert shown == [WARNING.decode().strip(), "Traceback", "  line"]


def test_a_line_in_two_chunks_is_one_line() -> None:
    notices = Notices()

    shown = notices.feed(WARNING[:40]) + notices.feed(WARNING[40:])

    assert shown == [WARNING.decode().strip()]


def test_an_endless_line_does_not_fill_the_memory() -> None:
    notices = Notices()

    for _ in range(1_000):
        notices.feed(b"x" * 10_000)

    assert len(notices.feed(b"\n" + WARNING)) == 1
    assert len(notices.last) < 3_000


def test_a_line_about_a_call_carries_its_ids(caplog: pytest.LogCaptureFixture) -> None:
    log = tool_log("pay", session_id="ses_1", turn=2, step=0, call_id="call_%s")
    log.warning("paying %d", 5)
    logging.getLogger("perdure.tools.pay").warning("alone")

    with_ids, without = (Lines(FORMAT).format(record) for record in caplog.records)

    assert with_ids.endswith("WARNING perdure.tools.pay: paying 5 [session_id=ses_1 turn=2 step=0 call_id=call_%s]")
    assert without.endswith("WARNING perdure.tools.pay: alone")


def test_the_ids_of_an_error_stand_before_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = tool_log("pay", session_id="ses_1", turn=2, step=0, call_id="call_1")
    log.error("failed", exc_info=ValueError("no money"))

    first, *rest = Lines(FORMAT).format(caplog.records[0]).splitlines()

    assert first.endswith("call_id=call_1]")
    assert rest == ["ValueError: no money"]
