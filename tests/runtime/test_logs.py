"""The output of children is kept within bounds, and only what matters is shown."""

from pathlib import Path

from perdure.runtime.logs import BoundedLog, Notices

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
