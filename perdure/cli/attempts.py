"""The commands about who works at what, and what happened when."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from perdure.bounds import printable, quoted

from .options import DataDir, as_table, settings_with

if TYPE_CHECKING:
    from perdure.protocol.wire import JsonObject
    from perdure.settings import Settings
    from perdure.store.base import Store

    # The entries of a page, and the cursor of the next one.
    Page: TypeAlias = tuple[Sequence[JsonObject], str | None]

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
#: Rows that are read at once.
_PAGE = 200


def attempts(
    session: Annotated[str, typer.Argument(help="The id of the session, or of a run.")],
    turn: Annotated[int | None, typer.Option(help="Only those of this turn, by its number.", min=0)] = None,
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """List each attempt at the work of a session: who made it, how it ended, and what it has used."""
    shown = asyncio.run(_attempts(settings_with(data_dir=data_dir), session, turn))
    for line in map(json.dumps, shown) if as_json else as_table(_HEAD, [_cells(each) for each in shown]):
        typer.echo(line)


def leases(as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """List what workers work at now, oldest first. The lease is overdue if its worker is silent for too long."""
    shown = asyncio.run(_leases(settings_with(data_dir=data_dir)))
    for line in map(json.dumps, shown) if as_json else as_table(_LEASES, [_lease_cells(each) for each in shown]):
        typer.echo(line)


def timeline(
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Show what has happened to a session: its events, and beside them its deliveries and attempts."""
    shown = asyncio.run(_timeline(settings_with(data_dir=data_dir), session))
    for line in map(json.dumps, shown) if as_json else as_table(_TIMELINE, _timeline_cells(shown)):
        typer.echo(line)


async def _timeline(settings: "Settings", session_id: str) -> "Sequence[JsonObject]":
    from perdure.protocol.stream_policy import SHOWS_ALL
    from perdure.runtime.reports.timeline import Timeline

    async def page(store: "Store", cursor: str | None) -> "Page":
        found = await Timeline(store, SHOWS_ALL).page(session_id, cursor, _PAGE)
        return [each.shown for each in found.entries], found.next_cursor

    return await _all_pages(settings, session_id, page)


async def _attempts(settings: "Settings", session_id: str, turn: int | None) -> "Sequence[JsonObject]":
    from perdure.runtime.reports.attempts import shown
    from perdure.store.attempts import AttemptQuery

    async def page(store: "Store", cursor: str | None) -> "Page":
        found = await store.attempts.list(AttemptQuery(session_id, turn, _PAGE, cursor))
        return [shown(each) for each in found.attempts], found.next_cursor

    return await _all_pages(settings, session_id, page)


async def _all_pages(
    settings: "Settings", session_id: str, page: "Callable[[Store, str | None], Awaitable[Page]]"
) -> "Sequence[JsonObject]":
    """What all pages about a session hold; `SessionNotFound` when the store does not know it."""
    from perdure.errors import SessionNotFound
    from perdure.store.open import checked_store

    async with checked_store(settings.database) as store:
        if await store.session(session_id) is None:
            raise SessionNotFound(f"The store knows no session {quoted(session_id)}.")
        found, cursor = await page(store, None)
        entries = list(found)
        while cursor is not None:
            found, cursor = await page(store, cursor)
            entries += found
        return entries


async def _leases(settings: "Settings") -> "Sequence[JsonObject]":
    from perdure.runtime.reports.attempts import lease
    from perdure.store.open import checked_store

    found: list[Any] = []
    async with checked_store(settings.database) as store:
        cursor = None
        while True:
            page = await store.attempts.leases(_PAGE, cursor)
            found += [lease(each) for each in page.attempts]
            cursor = page.next_cursor
            if cursor is None:
                return found


_HEAD = ("turn", "step", "scope", "attempt", "status", "started", "seconds", "tokens", "worker", "why")
_LEASES = ("session", "turn", "step", "scope", "attempt", "age", "expires", "worker", "")


_TIMELINE = ("time", "after", "event", "turn", "step", "what")
#: What of an entry is shown in columns of its own, or says little to a person.
_IN_COLUMNS = frozenset({"turnId", "stepIndex", "usage", "attemptId", "deliveryIds"})


def _timeline_cells(entries: "Sequence[JsonObject]") -> Sequence[Sequence[str]]:
    rows: list[Sequence[str]] = []
    before: str | None = None
    for each in entries:
        data = each["data"]
        after = "" if before is None else f"+{float(_seconds(before, each['at']) or 0):.3f}"
        what = ", ".join(_words(name, value) for name, value in data.items() if name not in _IN_COLUMNS)
        # What is in no log is indented: it stands beside the events.
        event = each["type"] if "index" in each else f"  {each['type']}"
        rows.append((each["at"], after, event, data.get("turnId", ""), str(data.get("stepIndex", "")), what))
        before = each["at"]
    return rows


def _words(name: str, value: Any) -> str:
    match value:
        case {"type": kind, "message": message}:
            return f"{kind}: {message}"
        case str() | int():
            return f"{name} {value}"
        case _:
            return f"{name} {json.dumps(value)}"


def _cells(shown: "JsonObject") -> tuple[str, ...]:
    usage, error = shown["usage"], shown.get("error", {})
    tokens = usage["inputTokens"] + usage["outputTokens"]
    return (
        shown.get("turnId", ""),
        str(shown.get("stepIndex", "")),
        shown["scope"],
        f"#{shown['number']}",
        shown["status"],
        shown["startedAt"],
        _seconds(shown["startedAt"], shown.get("endedAt")),
        str(tokens) if tokens else "",
        shown["worker"],
        printable(f"{error['type']}: {error['message']}") if error else "",
    )


def _lease_cells(shown: "JsonObject") -> tuple[str, ...]:
    return (
        shown.get("sessionId") or shown["runId"],
        shown.get("turnId", ""),
        str(shown.get("stepIndex", "")),
        shown["scope"],
        f"#{shown['number']}",
        f"{shown['ageSeconds']:.1f} s",
        shown["leaseExpiresAt"],
        shown["worker"],
        "OVERDUE" if shown["overdue"] else "",
    )


def _seconds(began: str, ended: str | None) -> str:
    from datetime import datetime

    if ended is None:
        return ""
    return f"{(datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds():.3f}"
