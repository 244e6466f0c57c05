"""Logging, and the output of child processes: kept in bounded files, its warnings shown on the terminal."""

import logging
import os
import re
from io import FileIO
from pathlib import Path

from perdure.errors import Misconfigured

#: The format of our log lines: `configure` writes it and `Notices` parses it.
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_LEVEL = re.compile(rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) ")
_SHOWN = frozenset({b"WARNING", b"ERROR", b"CRITICAL"})
# A log line can contain a whole workflow history.
_LONGEST_LINE = 2_000

#: The ids of a log line, by their names in `extra`.
IDS = ("session_id", "turn", "step", "call_id")

#: Libraries that log addresses, headers and bodies, which contain content and keys.
TALKATIVE = (
    "anthropic",
    "botocore",
    "google_genai",
    "hpack",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "mcp",
    "openai",
    "urllib3",
)


class LineFormatter(logging.Formatter):
    """Appends the ids of a log record to its line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{name}={value}" for name in IDS if (value := getattr(record, name, None)) is not None)
        line = super().formatMessage(record)
        return f"{line} [{ids}]" if ids else line


def configure(level: str) -> None:
    """Configure logging to standard error."""
    check_level(level)
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def check_level(level: str) -> None:
    if level.upper() not in logging.getLevelNamesMapping():
        raise Misconfigured(f"PERDURE_LOG_LEVEL is debug, info, warning or error; not {level!r}.")


class BoundedLog:
    """A file that is rotated at its limit, so both files together take at most twice the limit."""

    def __init__(self, path: Path, limit: int = 8 * 1024 * 1024) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._limit = limit
        self._file = _private(path)

    def write(self, chunk: bytes) -> None:
        if self._file.tell() + len(chunk) > self._limit:
            self._file.close()
            self._path.replace(self._path.with_suffix(".1.log"))
            self._file = _private(self._path)
        self._file.write(chunk[-self._limit :])

    def close(self) -> None:
        self._file.close()


def _private(path: Path) -> FileIO:
    """Open the file to append; only its owner may read it."""
    file = FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
    os.fchmod(file.fileno(), 0o600)
    return file


class Notices:
    """Selects the warnings and errors of a stream of log lines, with their continuation lines.

    A line in another format continues the one before it. `last` is the last line, selected or not.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._showing = False
        self.last = ""

    def feed(self, chunk: bytes) -> list[str]:
        """The selected lines."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        # Cut an unfinished line, because it could grow without limit.
        self._rest = self._rest[:_LONGEST_LINE]
        return [_text(line) for line in lines if self._wants(line)]

    def _wants(self, line: bytes) -> bool:
        if not line.strip():
            return False
        self.last = _text(line)
        if found := _LEVEL.match(line):
            self._showing = found[1] in _SHOWN
        return self._showing


def _text(line: bytes) -> str:
    return line[:_LONGEST_LINE].decode(errors="replace").rstrip()
