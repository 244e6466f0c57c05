"""Which queries the store runs for what it is asked, so that a database can be asked to explain them."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import pytest

from perdure.store.base import Store
from perdure.store.engine.database import Row, T, Transaction, Value, Work
from perdure.store.inputs import InputQuery
from perdure.store.values import SessionQuery
from tests.support import given

#: What is asked for, and the index that finds it without looking at anything else.
LISTINGS = [
    pytest.param(SessionQuery(), "sessions_by_age", id="all"),
    pytest.param(SessionQuery(owner=given.ADA.owner), "sessions_by_owner", id="owner"),
    pytest.param(SessionQuery(status="failed"), "sessions_by_status", id="status"),
    pytest.param(
        SessionQuery(owner=given.ADA.owner, status="failed"), "sessions_by_owner_status", id="owner and status"
    ),
    pytest.param(SessionQuery(status="needs_attention"), "sessions_in_need", id="attention"),
    pytest.param(
        SessionQuery(owner=given.ADA.owner, status="needs_attention"),
        "sessions_by_owner_in_need",
        id="owner and attention",
    ),
    pytest.param(
        SessionQuery(owner=given.ADA.owner, status="failed", agent="echo", mode="task"),
        "sessions_by_owner_status",
        id="everything",
    ),
]


def _children(store: Store) -> Awaitable[object]:
    return store.sessions(SessionQuery(parent="crowd-1"))


def _members(store: Store) -> Awaitable[object]:
    return store.family("crowd-1")


def _asked(store: Store) -> Awaitable[object]:
    return store.inputs(InputQuery(root="crowd-1"))


#: What is asked about a family, and the indexes that find it. Few rows are left to sort.
FAMILIES = [
    pytest.param(_children, ["sessions_by_parent"], id="children"),
    pytest.param(_members, ["sessions_by_root"], id="family"),
    pytest.param(_asked, ["inputs_by_root", "inputs_by_session"], id="inputs"),
]

#: Many sessions of several owners, states and families, beside the one that there is. `numbers (n)` is a table.
CROWD = """
INSERT INTO sessions
    (session_id, agent, mode, status, owner, principal, capabilities, created_at, updated_at, attention,
    parent_id, root_id)
SELECT 'crowd-' || n, 'echo', 'conversation', CASE n % 3 WHEN 0 THEN 'completed' ELSE 'waiting' END,
    CASE n % 4 WHEN 0 THEN owner ELSE 'owner-' || n % 4 END, principal, capabilities, '2026-' || n, created_at,
    CASE WHEN n % 5 < 2 THEN '{}' END, CASE WHEN n > 200 THEN 'crowd-' || (n % 100) END,
    CASE WHEN n > 200 THEN 'crowd-' || (n % 20) END
FROM sessions, numbers
"""

#: What waits in those sessions, behind much that turns have consumed.
THEIR_DELIVERIES = """
INSERT INTO deliveries (session_id, delivery_id, owner, accepted_at, turn)
SELECT sessions.session_id, 'd-' || n, sessions.owner, '2026-' || n, CASE n WHEN 1 THEN NULL ELSE 0 END
FROM sessions, numbers
WHERE n < 10
"""

#: What those sessions ask.
THEIR_INPUTS = """
INSERT INTO inputs (request_id, session_id, root_id, agent, kind, status, requester, request, opened_at)
SELECT sessions.session_id || '-' || n, sessions.session_id, root_id, agent, 'approval',
    CASE n WHEN 1 THEN 'open' ELSE 'answered' END, principal, '{}', '2026-' || n
FROM sessions, numbers
WHERE n < 5
"""

#: The records of those sessions. Every hundredth one is a fork.
THEIR_RECORDS = (
    """
INSERT INTO records (session_id, turn, step, slot, format, body, at)
SELECT sessions.session_id, n, 0, 'reply', 'test/1', '{}', '2026'
FROM sessions, numbers
WHERE n < 20
""",
    "UPDATE sessions SET forked_from = 's', forked_turns = 1 WHERE session_id LIKE 'crowd-%00'",
)


#: A long life of twenty sessions: a turn a moment, each with a delivery and an attempt.
LONG_LIFE = (
    """
INSERT INTO attempts
    (session_id, turn, step, scope, number, attempt_id, generation, worker, started_at, lease_expires_at, ended_at,
    status)
SELECT CASE m WHEN 1 THEN 's' ELSE 'long-' || m END, n, 0, 'model', 1, 'att_' || n, n, 'w', '2026-' || (10000 + n),
    '2027', '2026-' || (10000 + n) || '5', 'succeeded'
FROM numbers, (SELECT n AS m FROM numbers WHERE n <= 20) AS lives
""",
    """
INSERT INTO deliveries (session_id, delivery_id, owner, accepted_at, turn, started_at)
SELECT CASE m WHEN 1 THEN 's' ELSE 'long-' || m END, 'dlv_' || n, 'o', '2026-' || (10000 + n), n,
    '2026-' || (10000 + n)
FROM numbers, (SELECT n AS m FROM numbers WHERE n <= 20) AS lives
""",
)

#: Some moments of them.
SOME_OF_IT = ("2026-11000", "2026-11010")


@dataclass(frozen=True)
class Ran:
    """A query by its name, and the values that it ran with."""

    query: str
    values: dict[str, Value]


class Recorder:
    """A transaction that notes what it reads."""

    def __init__(self, transaction: Transaction, ran: list[Ran]) -> None:
        self._transaction = transaction
        self._ran = ran

    async def rows(self, query: str, **values: Value) -> Sequence[Row]:
        self._ran.append(Ran(query, values))
        return await self._transaction.rows(query, **values)

    async def row(self, query: str, **values: Value) -> Row | None:
        return await self._transaction.row(query, **values)

    async def run(self, query: str, **values: Value) -> None:
        await self._transaction.run(query, **values)

    async def define(self, statement: str) -> None:
        await self._transaction.define(statement)


def recorded(work: Work[T], ran: list[Ran]) -> Work[T]:
    return lambda transaction: work(Recorder(transaction, ran))
