"""What processes use, read from /proc (Linux)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Consumption:
    """Processor seconds since the start, and resident bytes now."""

    cpu: float
    rss: int


def of(pid: int) -> Consumption:
    # The name in parentheses may hold anything; the fields are counted after it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Consumption(cpu=ticks / _TICKS, rss=resident * _PAGE)


def of_all(pids: Sequence[int]) -> Consumption:
    parts = [of(pid) for pid in pids]
    return Consumption(cpu=sum(part.cpu for part in parts), rss=sum(part.rss for part in parts))
