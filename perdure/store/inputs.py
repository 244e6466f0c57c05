"""Requests to people, as a commit opens and closes them; `answering` closes the ones that people answer."""

from collections.abc import Sequence

from perdure.protocol.events import NewEvent
from perdure.protocol.inputs import InputAnswer, InputStatus

from . import rows
from .base import Commit
from .locking import LockedSession
from .port import Transaction


def touched(commit: Commit) -> bool:
    """Whether the commit may open or close any request. Most commits do not, and are many."""
    return bool(commit.opens or commit.expires or commit.withdraws or commit.close)


async def settle(tx: Transaction, commit: Commit, session: LockedSession, now: str) -> Sequence[NewEvent]:
    """Open, expire and withdraw what the commit says; what is to be told of those that it closed."""
    for request in commit.opens:
        if request.session_id != commit.session_id:
            raise ValueError("a commit opens requests of its own session only")
        await tx.run("open_input", **rows.new_input(request, session.row.principal, now))
    closed = [each for each, answer in commit.expires.items() if await _close(tx, commit, each, "expired", answer, now)]
    closed += [each for each in commit.withdraws if await _close(tx, commit, each, "withdrawn", None, now)]
    if commit.close:
        closed += await _withdraw_all(tx, commit.session_id, now)
    return [commit.resolved[each] for each in closed if each in commit.resolved]


async def _close(
    tx: Transaction, commit: Commit, request_id: str, status: InputStatus, answer: InputAnswer | None, now: str
) -> bool:
    """Close one request; False when it is closed already, or not one of this session."""
    closed = await tx.row(
        "close_input",
        session_id=commit.session_id,
        request_id=request_id,
        status=status,
        answer=rows.answer_text(answer),
        now=now,
    )
    return closed is not None


async def _withdraw_all(tx: Transaction, session_id: str, now: str) -> Sequence[str]:
    withdrawn = await tx.rows("withdraw_inputs", session_id=session_id, now=now)
    return sorted(row["request_id"] for row in withdrawn)
