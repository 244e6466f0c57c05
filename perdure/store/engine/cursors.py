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
from perdure.store.values import SessionQuery

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


async def all_inputs(store: Store, query: InputQuery) -> Sequence[InputRow]:
    """All requests that the query asks for. A session usually has a few."""
    page = await store.inputs(replace(query, limit=200))
    found = list(page.rows)
    while page.next_cursor is not None:
        page = await store.inputs(replace(query, limit=200, cursor=page.next_cursor))
        found.extend(page.rows)
    return found
