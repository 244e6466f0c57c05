"""Shows spans as lines: a name, how long it took, a bar of when, and what else is to be known."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import typer

from perdure.bounds import printable
from perdure.store.values import SessionRow

from .spans import Span

#: Columns of the names, of a duration, and of a bar. A terminal that is narrower than all of it gets no bar.
_NAMES = 34
_DURATION = 9
_BAR = (12, 40)
_NOTES = 24
#: Seconds below which nobody asks for what something has waited.
_SOON = 0.1

_BAD = ("failed", "timed_out", "cancelled", "superseded", "error", "denied", "expired")


@dataclass(frozen=True)
class _Marks:
    """The characters of a bar: at work, waiting between attempts, waiting for people."""

    work: str
    pause: str
    wait: str


#: Whatever a file or a pipe is read with, it can read these.
_PLAIN = _Marks("#", "-", ".")
_RICH = _Marks("█", "─", "░")


def lines(row: SessionRow, turns: Sequence[Span], earlier: int, columns: int, *, rich: bool) -> Iterator[str]:
    """The lines of a trace. `rich`: for a terminal, with colors, and no line is wider than it."""
    pen = _Pen(columns, rich=rich)
    used = row.usage.input_tokens + row.usage.output_tokens
    yield pen.cut(
        f"{row.session_id}  {row.agent}  {row.shown_status}  {_count(row.turns, 'turn')}"
        f"{f', {used} tokens' if used else ''}, since {row.created_at}"
    )
    if earlier:
        yield pen.cut(f"{_count(earlier, 'earlier turn')} not shown: --last {earlier + len(turns)}, or --turn N")
    for turn in turns:
        yield ""
        yield from pen.turn(turn)


class _Pen:
    def __init__(self, columns: int, *, rich: bool) -> None:
        self._columns = columns
        self._rich = rich
        self._marks = _RICH if rich else _PLAIN
        self._now = time.time()
        self._names = max(12, min(_NAMES, columns - _DURATION - 4))
        room = columns - self._names - _DURATION - _NOTES - 4
        self._bar = min(room, _BAR[1]) if room >= _BAR[0] else 0

    def cut(self, line: str) -> str:
        if self._rich and len(line) > self._columns:
            return f"{line[: max(1, self._columns - 1)]}…"
        return line

    def turn(self, span: Span, depth: int = 0) -> Iterator[str]:
        """A turn and all below it. What is below a turn is drawn in its time."""
        # What happens after a turn has parked may be days later: next to it everything else would be nothing.
        end = span.ended
        if end is None:
            end = max(self._end(each) for each in (span, *(each for each in span.spans if each.kind != "wait")))
        window = (span.began, end)
        yield self._line(span, depth, window)
        yield from self._below(span, depth + 1, window)

    def _below(self, span: Span, depth: int, window: tuple[float, float]) -> Iterator[str]:
        for each in span.spans:
            if each.kind == "turn":
                yield from self.turn(each, depth)
                continue
            yield self._line(each, depth, window)
            yield from self._below(each, depth + 1, window)
        if not span.complete:
            yield f"{'  ' * depth}… there is more of it than is shown here"

    def _line(self, span: Span, depth: int, window: tuple[float, float]) -> str:
        label = printable(f"{'  ' * depth}{span.name}")
        if len(label) > self._names:
            label = f"{label[: self._names - 1]}…" if self._rich else f"{label[: self._names - 3]}..."
        seconds = self._end(span) - span.began
        took = f"{_duration(seconds)}{'+' if span.ended is None else ''}"
        bar = f"|{self._drawn(span, window)}|  " if self._bar else ""
        line = self.cut(
            f"{label:<{self._names}} {took:>{_DURATION}}  {bar}{printable(', '.join(_notes(span)))}".rstrip()
        )
        if not self._rich:
            return line
        color = "red" if span.status in _BAD else "yellow" if span.kind == "wait" or span.failures else None
        if span.kind == "turn":
            return typer.style(line, bold=True, fg=color)
        return typer.style(line, fg=color) if color else line

    def _drawn(self, span: Span, window: tuple[float, float]) -> str:
        if span.kind == "wait":
            # It begins where the work ends.
            return self._marks.wait * self._bar
        cells = [" "] * self._bar
        for begin, end, mark in self._pieces(span):
            first, last = self._cell(begin, window), self._cell(end, window)
            cells[first : last + 1] = mark * (last + 1 - first)
        return "".join(cells)

    def _pieces(self, span: Span) -> Iterator[tuple[float, float, str]]:
        if len(span.tries) > 1:
            yield span.began, self._end(span), self._marks.pause
            for begin, end in span.tries:
                yield begin, self._now if end is None else end, self._marks.work
        else:
            yield span.began, self._end(span), self._marks.work

    def _cell(self, at: float, window: tuple[float, float]) -> int:
        width = max(window[1] - window[0], 0.001)
        return max(0, min(self._bar - 1, int((at - window[0]) / width * self._bar)))

    def _end(self, span: Span) -> float:
        return max(span.began, self._now if span.ended is None else span.ended)


def _notes(span: Span) -> Iterator[str]:
    """What is to be known of it, beside its name and its time."""
    if span.kind == "turn":
        yield span.status
        yield time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(span.began))
    elif span.kind == "wait":
        yield "open" if span.ended is None else span.status
        yield f"waits for {span.waits_for}" if span.ended is None else f"waited for {span.waits_for}"
        if span.answered_by:
            yield f"answered by {span.answered_by}"
    elif span.status not in ("succeeded", "completed"):
        yield span.status
    if span.queued is not None and span.queued >= _SOON:
        yield f"queued {_duration(span.queued)}"
    if len(span.tries) > 1:
        yield f"{len(span.tries)} attempts"
    if span.failures:
        yield f"({', '.join(dict.fromkeys(span.failures))})"
    if span.kind != "step" and (used := span.usage.input_tokens + span.usage.output_tokens):
        cached = f", {span.usage.cache_read_tokens} of them cached" if span.usage.cache_read_tokens else ""
        yield f"{used} tokens{cached}"
    if span.session_id:
        yield span.session_id


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    """For a person to compare: `0.012 s`, `12.3 s`, `4m 05s`, `3h 02m`, `2d 04h`."""
    if seconds < 10:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h {minutes:02}m"
    return f"{hours // 24}d {hours % 24:02}h"
