"""A session with all that were started from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perdure.store.base import Store
from perdure.store.values import SessionRow

#: How many members of a family are looked at.
_MEMBERS = 1000


@dataclass(frozen=True)
class Family:
    """A session, and its family by parent: the children of each member, oldest first."""

    row: SessionRow
    children: Mapping[str, Sequence[SessionRow]]
    # False: the family is so large that some of it is not here.
    complete: bool


async def family_of(store: Store, row: SessionRow) -> Family:
    """The session, and all sessions that were started from the same root."""
    page = await store.family(row.root_id or row.session_id, limit=_MEMBERS)
    children: dict[str, list[SessionRow]] = {}
    for member in page.sessions:
        children.setdefault(member.parent_id or "", []).append(member)
    return Family(row, children, complete=page.next_cursor is None)
