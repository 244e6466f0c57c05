"""What a run says: progress while it goes, the table in the end."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import gmtime, strftime

from .table import Line, markdown


def progress(sentence: str) -> None:
    """Report progress on standard error; the table alone goes to standard output."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


def show(command: str, machine: Mapping[str, str], lines: Sequence[Line]) -> None:
    facts = "\n".join(f"- {name}: {fact}" for name, fact in machine.items())
    sys.stdout.write(
        f"\n`{command}`, {strftime('%d %b %Y %H:%M', gmtime())} UTC; "
        f"scripted provider without latency, loopback only\n\n{facts}\n\n{markdown(lines)}\n"
    )


def write(path: Path, command: str, machine: Mapping[str, str], lines: Sequence[Line]) -> None:
    report = {"command": command, "machine": dict(machine), "lines": [line.data() for line in lines]}
    path.write_text(json.dumps(report, indent=2) + "\n")
