"""Positions as they are on the wire: offsets of a stream, and cursors that make caches ask again."""

import random
import re
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from perdure.errors import Invalid

START = "-1"
NOW = "now"

#: The second number counts the items before the position; the first one numbers the logs that a stream continues.
_OFFSET = re.compile(r"([0-9]{16})_([0-9]{16})")
_LOG = 10**16

Offset: TypeAlias = int | Literal["now"]


def place(log: int, index: int) -> int:
    """The position after so many items of the log with this number."""
    return log * _LOG + index


def log_and_index(position: int) -> tuple[int, int]:
    return divmod(position, _LOG)


def write_offset(position: int) -> str:
    log, index = log_and_index(position)
    return f"{log:016d}_{index:016d}"


def read_offset(text: str) -> Offset:
    """The position that the offset names; `Invalid` for anything that is no offset."""
    if text == START:
        return 0
    if text == NOW:
        return "now"
    found = _OFFSET.fullmatch(text)
    if found is None:
        raise Invalid("Expected 'offset' to be -1, now, or an offset that this server gave out.")
    return place(int(found[1]), int(found[2]))


_EPOCH = datetime(2024, 10, 9, tzinfo=UTC).timestamp()
_INTERVAL = 20
_JITTER = 180
_LONGEST_CURSOR = 16


def cursor(of_client: str | None) -> str:
    """The number of the current interval; if the client's is not smaller, one that is greater than it."""
    current = int((datetime.now(UTC).timestamp() - _EPOCH) // _INTERVAL)
    known = of_client is not None and of_client.isascii() and of_client.isdecimal()
    if of_client is None or not known or len(of_client) > _LONGEST_CURSOR or int(of_client) < current:
        return str(current)
    return str(int(of_client) + random.randint(1, _JITTER))
