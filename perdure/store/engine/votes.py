"""Votes on input requests, counted under the session's lock. The first verdict closes a request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perdure.errors import NotFound, Unavailable
from perdure.protocol.events import NewEvent
from perdure.protocol.inputs import InputAnswer
from perdure.session.inputs import is_newer, verdict
from perdure.store.values import Accepted, Answered, Answering, InputRow, Vote

from . import deliveries, rows
from .database import Transaction, Written


@dataclass(frozen=True)
class _Count:
    """The requests before and after the votes."""

    before: dict[str, InputRow]
    after: dict[str, InputRow]

    @property
    def changed(self) -> Sequence[InputRow]:
        return [row for request_id, row in self.after.items() if row != self.before[request_id]]

    @property
    def closed(self) -> Sequence[InputRow]:
        return [row for row in self.changed if row.status == "answered"]

    def is_late(self, votes: Sequence[Vote]) -> bool:
        """Whether a vote differs from the answer with which its request was closed before."""
        return any(_is_late(self.before[vote.request_id], vote.answer) for vote in votes)


async def answer(
    tx: Transaction, answering: Answering, to_event: Callable[[InputRow], NewEvent], now: str
) -> Written[Answered]:
    session = await rows.find(tx, answering.session_id)
    # Under the lock, so the later of two requests with one key finds the first one.
    if (first := await deliveries.find_first(tx, answering.delivery)) is not None:
        return Written(await _repeated(tx, answering, first))
    before = await _requests(tx, answering)
    if any(row.status == "open" and is_newer(row.request, *row.votes) for row in before.values()):
        # Its rules for votes may be others.
        raise Unavailable("A newer version has made this request; try again.")
    after = dict(before)
    for vote in answering.votes:
        after[vote.request_id] = _voted(after[vote.request_id], vote, answering.delivery.delivery_id, now)
    count = _Count(before, after)
    delivered = None
    if count.closed or answering.always or (answering.late and count.is_late(answering.votes)):
        # An answer that closes a request ignores the limit: only it lets the session continue and empty its inbox.
        delivered = await deliveries.enqueue(tx, session, answering.delivery, now, limited=not count.closed)
        # A concurrent request in another session has used the same key.
        if not delivered.fresh:
            return Written(await _repeated(tx, answering, delivered))
    for row in count.changed:
        await tx.run("update_input", **rows.input_state(row))
    head = None if session is None else await rows.emit(tx, session.row, [to_event(row) for row in count.closed], now)
    # Also without a new delivery: the caller then signals the first answer again, and earlier deliveries precede it.
    unsignalled = session is not None and session.row.unsignalled > 0
    return Written(replace(_answered(answering, count.after, delivered), unsignalled=unsignalled), head)


async def _repeated(tx: Transaction, answering: Answering, first: Accepted) -> Answered:
    """The result of the first request under this key."""
    return _answered(answering, await _requests(tx, answering), first)


def _answered(answering: Answering, by_id: dict[str, InputRow], accepted: Accepted | None) -> Answered:
    found = [by_id[vote.request_id] for vote in answering.votes]
    delivery = accepted.delivery if accepted else None
    return Answered(
        rows=found,
        closed=frozenset(
            row.request.request_id for row in found if delivery is not None and row.delivery_id == delivery.delivery_id
        ),
        delivery=delivery,
        fresh=accepted is None or accepted.fresh,
        unsignalled=accepted is not None and accepted.unsignalled,
    )


async def _requests(tx: Transaction, answering: Answering) -> dict[str, InputRow]:
    """The voted requests, each once, in the order of the votes."""
    wanted = list(dict.fromkeys(vote.request_id for vote in answering.votes))
    found = [rows.input_row(row) for row in await tx.rows("inputs_by_id", request_ids=wanted)] if wanted else []
    ours = {row.request.request_id: row for row in found if row.request.session_id == answering.session_id}
    if missing := [each for each in wanted if each not in ours]:
        raise NotFound("This session has no such request.", request_ids=missing)
    return {each: ours[each] for each in wanted}


def _is_late(row: InputRow, answer: InputAnswer) -> bool:
    if row.status == "open":
        return False
    return row.status != "answered" or row.answer is None or not row.answer.same(answer)


def _voted(row: InputRow, vote: Vote, delivery_id: str, now: str) -> InputRow:
    """The request after one more vote. Only the first vote of each principal on an open request counts.

    A vote with `ends` always closes an open request.
    """
    if row.status != "open":
        return row
    if not vote.ends and any(vote.answer.same_principal(earlier) for earlier in row.votes):
        return row
    row = replace(row, votes=(*row.votes, vote.answer))
    decided = vote.answer if vote.ends else verdict(row.request, row.votes)
    if decided is None:
        return row
    return replace(row, status="answered", answer=decided, closed_at=now, delivery_id=delivery_id)
