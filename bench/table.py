"""What was measured, as lines of one table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["ok", "over", ""]


@dataclass(frozen=True)
class Target:
    """A bound on the ratio to the reference, or on the value where there is no reference."""

    sense: Literal["≤", "≥"]
    bound: float

    def holds(self, value: float) -> bool:
        return value <= self.bound if self.sense == "≤" else value >= self.bound


@dataclass(frozen=True)
class Line:
    """One measured number beside what it is compared with: the floor, or the product itself when it was younger."""

    row: str
    what: str
    unit: str
    value: float
    reference: float | None = None
    target: Target | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.reference is None else self.value / self.reference

    @property
    def verdict(self) -> Verdict:
        if self.target is None:
            return ""
        measured = self.value if self.ratio is None else self.ratio
        return "ok" if self.target.holds(measured) else "over"

    def data(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "what": self.what,
            "unit": self.unit,
            "value": self.value,
            "reference": self.reference,
            "ratio": self.ratio,
            "target": None if self.target is None else f"{self.target.sense} {self.target.bound:g}",
            "verdict": self.verdict,
        }


_HEAD = ("row", "what", "reference", "measured", "ratio", "target", "")


def markdown(lines: Sequence[Line]) -> str:
    rows = [_HEAD, *(_cells(line) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    text = [_row(row, widths) for row in rows]
    return "\n".join((text[0], _row(tuple("-" * width for width in widths), widths), *text[1:]))


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.row,
        line.what,
        "" if line.reference is None else _number(line.reference, line.unit),
        _number(line.value, line.unit),
        "" if line.ratio is None else f"{line.ratio:.2f}",
        _target(line),
        line.verdict,
    )


def _target(line: Line) -> str:
    if line.target is None:
        return ""
    bound = f"{line.target.bound:g}×" if line.reference is not None else _number(line.target.bound, line.unit)
    return f"{line.target.sense} {bound}"


def _number(value: float, unit: str) -> str:
    digits = 0 if abs(value) >= 1000 or float(value).is_integer() else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
