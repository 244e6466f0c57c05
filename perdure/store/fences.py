"""What keeps an older attempt from writing once a newer one has begun."""

from dataclasses import dataclass
from enum import Enum


class Begun(Exception):
    """Something that had not begun when it was looked at has begun since."""


@dataclass(frozen=True)
class Attempt:
    """One try at an activity. Later tries have a greater `generation`, whichever process makes them.

    Numbers begin with 1; with 0, a scope is closed to all that were made before.
    """

    number: int
    generation: int


class Hold(Enum):
    """What a commit does with the fence of its scope."""

    RAISE = "raise"
    """Take the scope over from any older attempt."""
    KEEP = "keep"
    """Write only while no newer attempt has taken over."""
    RELEASE = "release"
    """As KEEP, and close the scope: nobody writes to it any more."""


@dataclass(frozen=True)
class Fence:
    """A scope (`model`, `call/<id>`) of one step, and the attempt that wants to write to it."""

    turn: int
    step: int
    scope: str
    attempt: Attempt
    hold: Hold
