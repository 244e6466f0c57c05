"""What is written to the terminal, and what is typed there."""

import contextlib
import os
import re
import sys
import threading
from io import TextIOWrapper
from types import ModuleType
from typing import Any, TextIO, cast

from perdure.bounds import printable

_KEPT = re.compile(r"([\n\t]+)")
_STYLES = {"dim": "\x1b[2m", "bold": "\x1b[1m", "red": "\x1b[31m", "yellow": "\x1b[33m", "": ""}
_PLAIN = "\x1b[0m"


def harmless(text: str) -> str:
    """Text of others for the terminal: of its control characters, lines and tabs stay, and no other is a command."""
    return "".join(part if _KEPT.fullmatch(part) else printable(part) for part in _KEPT.split(text.replace("\r", "")))


class Screen:
    """Where the chat writes, from several threads. It knows whether the line that it is on has something on it."""

    def __init__(self, out: TextIO, *, colour: bool) -> None:
        self._out = out
        self._colour = colour
        self._lock = threading.RLock()
        self._is_fresh = True
        #: How often was written: whether something came between.
        self.writes = 0

    @classmethod
    def of_process(cls, *, live: bool) -> "Screen":
        _forgive(sys.stdout)
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return cls(sys.stdout, colour=live and not plain)

    def write(self, text: str, style: str = "") -> None:
        """Text that goes on where the last one has ended."""
        if not text:
            return
        shown = harmless(text)
        code = _STYLES[style] if self._colour else ""
        with self._lock:
            self._out.write(f"{code}{shown}{_PLAIN}" if code else shown)
            self._out.flush()
            self._is_fresh = shown.endswith("\n")
            self.writes += 1

    def fresh(self) -> None:
        """Go to a line of its own."""
        with self._lock:
            if not self._is_fresh:
                self.write("\n")

    def line(self, text: str, style: str = "") -> None:
        """Text on lines of its own."""
        with self._lock:
            self.fresh()
            self.write(text, style)
            self.write("\n")

    def typed(self) -> None:
        """A line was typed: its end has moved the cursor."""
        with self._lock:
            self._is_fresh = True


class Lines:
    """What is typed, or comes through a pipe, line by line."""

    def __init__(self, screen: Screen, *, live: bool) -> None:
        self._screen = screen
        self._live = live
        self._readline = _readline() if live else None
        _forgive(sys.stdin)

    @property
    def live(self) -> bool:
        """Whether somebody types."""
        return self._live

    def read(self, prompt: str, *, begun: str = "") -> str | None:
        """The next line; None at the end. `begun` is there to be changed, where the line can be edited."""
        self._screen.fresh()
        if not self._live:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        try:
            return self._typed(prompt, begun)
        except EOFError:
            self._screen.line("")
            return None
        finally:
            self._screen.typed()

    def _typed(self, prompt: str, begun: str) -> str:
        found = self._readline
        if found is None or not begun:
            return input(prompt)
        found.set_startup_hook(lambda: found.insert_text(begun))
        try:
            return input(prompt)
        finally:
            found.set_startup_hook(None)


def _forgive(stream: Any) -> None:
    """What cannot be read or written as a character here must not end the chat."""
    if isinstance(stream, TextIOWrapper):
        cast("TextIOWrapper[Any]", stream).reconfigure(errors="replace")


def _readline() -> ModuleType | None:
    """Python's line editor with its history, which some builds do not have."""
    with contextlib.suppress(ImportError):
        import readline

        return readline
    return None
