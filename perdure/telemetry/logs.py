"""The output of child processes: kept in bounded files, and what matters shown on the terminal."""

import logging
import os
import re
from io import FileIO
from pathlib import Path

from perdure.errors import Misconfigured

#: How log lines of our processes begin; `configure` writes what `Notices` reads.
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_LEVEL = re.compile(rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) ")
_SHOWN = frozenset({b"WARNING", b"ERROR", b"CRITICAL"})
# One log line can hold a whole workflow history.
_LONGEST_LINE = 2_000


#: What a line is about: each is a name in its `extra`.
IDS = ("session_id", "turn", "step", "call_id")


#: Libraries that log what they send and get: addresses, headers and bodies, which are content and keys.
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
    """Lines that end with the ids of what they are about, if it has any."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{name}={value}" for name in IDS if (value := getattr(record, name, None)) is not None)
        line = super().formatMessage(record)
        return f"{line} [{ids}]" if ids else line


def configure(level: str) -> None:
    """Log to standard error."""
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
    """A file that moves aside when it has grown, so that it never takes more than twice its limit."""

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
    """The file, to append to; nobody but its owner may read it."""
    file = FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
    os.fchmod(file.fileno(), 0o600)
    return file


class Notices:
    """Picks the warnings and errors out of a stream of log lines, with the lines that belong to them.

    A line of no known form belongs to the one before it. `last` is the last line of all, shown or not.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._showing = False
        self.last = ""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines to show."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        # What no line may hold is dropped; without this a line without end would fill the memory.
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
