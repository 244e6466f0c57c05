"""Where a page of a list ends. Opaque to callers. It is no offset, so inserts and deletes do not shift it."""

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

from perdure.errors import Invalid


@dataclass(frozen=True)
class Place:
    """A place in a list that is sorted by time, then by id."""

    at: str
    id: str


#: The length of a cursor; a longer text is refused without parsing.
_LONGEST = 1_000

#: Before the newest entry: it sorts after every time stamp.
NEWEST = Place("~", "")
#: Before the oldest entry.
OLDEST = Place("", "")


def write(place: Place) -> str:
    text = json.dumps([place.at, place.id])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read(cursor: str) -> Place:
    match _parsed(cursor):
        case [str(at), str(entry)]:
            return Place(at, entry)
        case _:
            raise Invalid("The cursor is not one that this server gave out.")


def _parsed(cursor: str) -> Any:
    if len(cursor) > _LONGEST:
        return None
    try:
        return json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return None
