"""A terminal: a process behind a real pseudo-terminal, typed at and read as a person does."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tests.support.processes import PATIENCE, clean_environment, wait_until

#: What readline sends around a line that is typed.
_EDITOR = re.compile(r"\x1b\[\?2004[hl]\r?|\x1b\[\?1034h")
#: What the chat itself sends.
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """`perdure` with some words, in a terminal of its own."""

    def __init__(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        self._master, slave = pty.openpty()
        given = {**clean_environment(), "TERM": "xterm", **(environment or {})}
        given.pop("NO_COLOR", None) if "NO_COLOR" not in (environment or {}) else None

        def own_terminal() -> None:
            # Ctrl-C reaches the processes of a session that has the terminal.
            os.setsid()
            import fcntl
            import termios

            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "perdure", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=given,
            preexec_fn=own_terminal,
        )
        os.close(slave)
        self._raw = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"the terminal shows:\n{self.screen}")
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        os.close(self._master)

    @property
    def raw(self) -> str:
        """All that has come, with what commands the terminal."""
        return bytes(self._raw).decode(errors="replace")

    @property
    def screen(self) -> str:
        """All that has come, as it is read."""
        return _STYLE.sub("", _EDITOR.sub("", self.raw)).replace("\r\n", "\n")

    def shows(self, text: str, times: int = 1) -> "Terminal":
        """Wait until it shows the text."""
        wait_until(
            lambda: self.screen.count(text) >= times or self.process.poll() is not None,
            f"the terminal to show {text!r}",
            PATIENCE,
        )
        if self.screen.count(text) < times:
            # What the process has written last may be on its way.
            self._reader.join(2)
        assert self.screen.count(text) >= times, self.screen
        return self

    def type(self, line: str, *, prompt: str = "> ") -> "Terminal":
        """Type a line when the prompt is there."""
        wait_until(lambda: self.screen.endswith(prompt), f"the prompt {prompt!r}, not {self.screen[-300:]!r}")
        before = len(self.screen)
        os.write(self._master, f"{line}\n".encode())
        wait_until(lambda: "\n" in self.screen[before:], "the line to be taken")
        return self

    def press(self, keys: bytes) -> "Terminal":
        os.write(self._master, keys)
        return self

    def ends(self) -> int:
        """Wait until the process has ended; its exit code."""
        wait_until(lambda: self.process.poll() is not None, "the process to end")
        self._reader.join(2)
        return self.process.wait()

    def interrupt(self) -> "Terminal":
        """Ctrl-C, as the keyboard sends it."""
        return self.press(b"\x03")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ready, _, _ = select.select([self._master], [], [], 0.2)
                if not ready:
                    if self.process.poll() is not None:
                        return
                    continue
                if not (chunk := os.read(self._master, 65_536)):
                    return
                self._raw += chunk
