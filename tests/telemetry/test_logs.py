"""The output of children is kept within bounds, and only what matters is shown."""

import asyncio
import contextlib
import io
import logging
from collections.abc import Generator
from pathlib import Path

import pytest
from pydantic_ai._ssrf import safe_download
from pydantic_ai.direct import model_request
from pydantic_ai.messages import ModelRequest
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from perdure.agents.context import tool_log
from perdure.errors import Misconfigured
from perdure.telemetry.logs import FORMAT, TALKATIVE, BoundedLog, LineFormatter, Notices, check_level, configure

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

    with_ids, without = (LineFormatter(FORMAT).format(record) for record in caplog.records)

    assert with_ids.endswith("WARNING perdure.tools.pay: paying 5 [session_id=ses_1 turn=2 step=0 call_id=call_%s]")
    assert without.endswith("WARNING perdure.tools.pay: alone")


def test_the_ids_of_an_error_stand_before_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = tool_log("pay", session_id="ses_1", turn=2, step=0, call_id="call_1")
    log.error("failed", exc_info=ValueError("no money"))

    first, *rest = LineFormatter(FORMAT).format(caplog.records[0]).splitlines()

    assert first.endswith("call_id=call_1]")
    assert rest == ["ValueError: no money"]


@pytest.mark.parametrize("level", ["info", "debug"])
async def test_what_goes_over_the_wire_is_not_logged(level: str) -> None:
    """The address of a file that a message names may hold a key; the requests to a model hold all that was said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), kept_logging():
        configure(level)
        async with asyncio.timeout(10), await asyncio.start_server(_answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await safe_download(f"http://127.0.0.1:{port}/a.png?signature=heron", allow_local=True, max_bytes=100)
            model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=f"http://127.0.0.1:{port}", api_key="egret"))
            with contextlib.suppress(Exception):
                await model_request(model, [ModelRequest.user_text_prompt("ibis")])
        logging.getLogger("perdure.test").info("a line of ours")

    assert "a line of ours" in said.getvalue()
    assert not [word for word in ("heron", "egret", "ibis") if word in said.getvalue()]


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
    await writer.drain()
    writer.close()


@contextlib.contextmanager
def kept_logging() -> Generator[None]:
    """Give the loggers back as they were."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    levels = {logger: logger.level for logger in (root, *map(logging.getLogger, TALKATIVE))}
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for logger, level in levels.items():
            logger.setLevel(level)


def test_a_level_that_there_is_not_is_explained() -> None:
    check_level("warning")

    with pytest.raises(Misconfigured, match="PERDURE_LOG_LEVEL is debug, info, warning or error; not 'loud'"):
        check_level("loud")
