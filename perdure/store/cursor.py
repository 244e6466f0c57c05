"""Where a page of sessions ends. Opaque to callers; a place and no count, so it holds while sessions are added."""

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

from perdure.errors import Invalid


@dataclass(frozen=True)
class Place:
    """A place in the list of sessions, newest first: what comes after it is older."""

    created_at: str
    session_id: str


#: Before the newest session: no timestamp sorts after it.
START = Place("~", "")


def write(place: Place) -> str:
    text = json.dumps([place.created_at, place.session_id])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read(cursor: str | None) -> Place:
    if cursor is None:
        return START
    match _parsed(cursor):
        case [str(created_at), str(session_id)]:
            return Place(created_at, session_id)
        case _:
            raise Invalid("The cursor is not one that this server gave out.")


def _parsed(cursor: str) -> Any:
    try:
        return json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError):
        return None
