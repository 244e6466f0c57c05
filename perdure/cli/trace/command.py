"""The command: reads the last turns of a session, and of its children, and draws them."""

import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.bounds import quoted
from perdure.cli.options import DataDir, settings_with

if TYPE_CHECKING:
    from perdure.settings import Settings
    from perdure.store.base import Store
    from perdure.store.values import SessionRow

    from .spans import Span

#: Turns that are shown unless more are asked for.
_LAST = 10
#: Sessions of a family that are read, and how deep below each other.
_MEMBERS = 50
_DEPTH = 8
#: Columns where there is no terminal to ask.
_COLUMNS = 110


@dataclass(frozen=True)
class Traced:
    """A session and the turns of it that are shown."""

    row: "SessionRow"
    turns: "Sequence[Span]"
    # How many earlier ones there are.
    earlier: int


def trace(
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    turn: Annotated[str | None, typer.Option(help="Only this turn: 3 or turn_3.")] = None,
    last: Annotated[int, typer.Option(help="How many turns, the newest.", min=1, max=1_000)] = _LAST,
    tree: Annotated[bool, typer.Option("--tree", help="Also what the sessions have done that it has started.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, one for each turn.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Show where the time of a session has gone: turns, model calls, tool calls, retries and waits for people."""
    from . import chart

    traced = asyncio.run(_read(settings_with(data_dir=data_dir), session, turn, last, tree=tree))
    if as_json:
        for each in traced.turns:
            typer.echo(json.dumps({"sessionId": traced.row.session_id, **each.shown}))
        return
    is_terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size((_COLUMNS, 24)).columns if is_terminal else _COLUMNS
    for line in chart.lines(traced.row, traced.turns, traced.earlier, columns, rich=is_terminal):
        typer.echo(line)


async def _read(settings: "Settings", session_id: str, turn: str | None, last: int, *, tree: bool) -> Traced:
    from perdure.errors import Invalid, SessionNotFound
    from perdure.store.open import checked_store

    async with checked_store(settings.database) as store:
        row = await store.session(session_id)
        if row is None:
            raise SessionNotFound(f"The store knows no session {quoted(session_id)}.")
        if row.run is not None:
            raise Invalid(f"{quoted(session_id)} is a run, which has no turns: see `perdure logs` and `… attempts`.")
        only = None
        if turn is not None:
            number = turn.removeprefix("turn_")
            only = int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else row.turns
            if only >= row.turns:
                raise Invalid(f"The session has no turn {quoted(turn)!r}; it has {row.turns}, from turn_0 on.")
        first = max(0, row.turns - last) if only is None else only
        turns = await _turns(store, row, first, row.turns if only is None else first + 1)
        if tree:
            turns = await _Family(store).below(turns)
        return Traced(row, turns, first if only is None else 0)


async def _turns(store: "Store", row: "SessionRow", first: int, end: int) -> "Sequence[Span]":
    from .spans import turn_spans

    found = [await turn_spans(store, row.session_id, number) for number in range(first, end)]
    return [each for each in found if each is not None]


class _Family:
    """Reads the turns of children, as long as they are not too many."""

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._read = 0

    async def below(self, spans: "Sequence[Span]", depth: int = 0) -> "Sequence[Span]":
        """These spans, and below each call the turns of the child that has done it."""
        from dataclasses import replace

        found: list[Span] = []
        for span in spans:
            under = list(await self.below(span.spans, depth))
            complete = span.complete
            if span.session_id is not None:
                child = await self._child(span.session_id, depth)
                complete = complete and child is not None
                under += child or ()
            found.append(replace(span, spans=under, complete=complete))
        return found

    async def _child(self, session_id: str, depth: int) -> "Sequence[Span] | None":
        if depth >= _DEPTH or self._read >= _MEMBERS:
            return None
        self._read += 1
        row = await self._store.session(session_id)
        if row is None:
            return None
        return await self.below(await _turns(self._store, row, max(0, row.turns - _LAST), row.turns), depth + 1)
