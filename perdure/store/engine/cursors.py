"""Lists: their queries, and their cursors, opaque and no offsets, so that nobody misses or repeats an entry."""

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from perdure.errors import Invalid
from perdure.store.base import Store
from perdure.store.inputs import InputQuery, InputRow
from perdure.store.values import SessionPage, SessionQuery, SessionRow

from .database import Value


@dataclass(frozen=True)
class Place:
    """Where a page of a list ends: a place in a list that is sorted by time, then by id.

    It is no offset, so inserts and deletes do not shift it.
    """

    at: str
    id: str


#: The length of a cursor; a longer text is refused without parsing.
_LONGEST_CURSOR = 1_000

#: Before the newest entry: it sorts after every time stamp.
NEWEST = Place("~", "")
#: Before the oldest entry.
OLDEST = Place("", "")


def write_cursor(place: Place) -> str:
    return packed(json.dumps([place.at, place.id]))


def read_cursor(cursor: str) -> Place:
    match unpacked(cursor):
        case [str(at), str(entry)]:
            return Place(at, entry)
        case _:
            raise Invalid("The cursor is not one that this server gave out.")


def packed(text: str) -> str:
    """The JSON as a cursor."""
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def unpacked(cursor: str) -> Any:
    """The value that was packed; None for what is no cursor."""
    if len(cursor) > _LONGEST_CURSOR:
        return None
    try:
        return json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return None


def newest_first(cursor: str | None) -> Place:
    """The place after which a page begins, in a list that begins with the newest entry."""
    return NEWEST if cursor is None else read_cursor(cursor)


def oldest_first(cursor: str | None) -> Place:
    """The same, in a list that begins with the oldest entry."""
    return OLDEST if cursor is None else read_cursor(cursor)


def sessions_query(query: SessionQuery) -> tuple[str, dict[str, Value]]:
    """The query that has an index for this filter and order, and the values that only this query takes."""
    if query.parent is not None:
        return "sessions_of_parent", {"parent": query.parent, "owner": query.owner, "status": query.status}
    match query.owner, query.status:
        case None, None:
            return "sessions", {}
        case None, "needs_attention":
            return "sessions_in_need", {}
        case None, status:
            return "sessions_by_status", {"status": status}
        case owner, None:
            return "sessions_of_owner", {"owner": owner}
        case owner, "needs_attention":
            return "sessions_of_owner_in_need", {"owner": owner}
        case owner, status:
            return "sessions_of_owner_by_status", {"owner": owner, "status": status}


@dataclass(frozen=True)
class SessionSearch:
    """Sessions of a query that contain a text, or are of a certain age."""

    query: SessionQuery
    # A part of the id, the title, the agent's name or a tag, in capitals or not.
    text: str | None = None
    # Time stamps: created at this time or later, and before it.
    created_after: str | None = None
    created_before: str | None = None


#: Sessions that one search looks at; its cursor continues from there.
_LOOKED_AT = 2_000
_AT_ONCE = 200


async def search_sessions(store: Store, search: SessionSearch) -> SessionPage:
    """One page of what the search finds, newest first. It may be short, even empty, and have a cursor all the same."""
    query, looked_at = search.query, 0
    found: list[SessionRow] = []
    cursor = query.cursor
    if cursor is None and search.created_before is not None:
        cursor = write_cursor(Place(search.created_before, ""))
    while True:
        page = await store.sessions(replace(query, cursor=cursor, limit=_AT_ONCE if search.text else query.limit))
        for row in page.sessions:
            if search.created_after is not None and row.created_at < search.created_after:
                return SessionPage(found)
            if _contains(row, search.text):
                found.append(row)
            if len(found) == query.limit:
                is_last = page.next_cursor is None and row is page.sessions[-1]
                return SessionPage(found, None if is_last else write_cursor(Place(row.created_at, row.session_id)))
        looked_at += len(page.sessions)
        if page.next_cursor is None or looked_at >= _LOOKED_AT:
            return SessionPage(found, page.next_cursor)
        cursor = page.next_cursor


def _contains(row: SessionRow, text: str | None) -> bool:
    if text is None:
        return True
    tags = (f"{name}:{value}" for name, value in row.tags.items())
    wanted = text.casefold()
    return any(wanted in part.casefold() for part in (row.session_id, row.agent, row.title or "", *tags))


async def all_inputs(store: Store, query: InputQuery) -> Sequence[InputRow]:
    """All requests that the query asks for. A session usually has a few."""
    page = await store.inputs(replace(query, limit=200))
    found = list(page.rows)
    while page.next_cursor is not None:
        page = await store.inputs(replace(query, limit=200, cursor=page.next_cursor))
        found.extend(page.rows)
    return found
