"""Runs a program of ours to its end, and reads what it has said last: the check of an author's agents, for one."""

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .supervisor import die_with_parent, kill_group


@dataclass(frozen=True)
class Ran:
    """What became of a program."""

    #: None: it did not end in time, and was killed.
    code: int | None
    #: What it has written last.
    lines: Sequence[str]

    @property
    def refusal(self) -> str:
        """The sentence of ours with which it has ended, which may have several lines; without one, the last line."""
        begin = max((number for number, line in enumerate(self.lines) if line.startswith("perdure: ")), default=-1)
        return " ".join(self.lines[begin:]).removeprefix("perdure: ")


async def run_to_end(words: Sequence[str], environment: Mapping[str, str], seconds: float, *, tail: int) -> Ran:
    """Run it, for so many seconds at most, and read the last bytes of its output. Nothing that it starts is left."""
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        code = None
        try:
            async with asyncio.timeout(seconds):
                code = await process.wait()
        except TimeoutError:
            pass
        finally:
            kill_group(process.pid)
            await process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - tail))
        text = output.read().decode(errors="replace")
    return Ran(code, [line for line in text.splitlines() if line.strip()])
