"""What a probe has found."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report: no secret, and no content of a session."""

    probe: str
    status: Status
    message: str
    # What to do about it.
    todo: str = ""


def ok(probe: str, message: str) -> Finding:
    return Finding(probe, "ok", message)


def warn(probe: str, message: str, todo: str) -> Finding:
    return Finding(probe, "warn", message, todo)


def fail(probe: str, message: str, todo: str) -> Finding:
    return Finding(probe, "fail", message, todo)
