"""Answers to input requests, and the requests themselves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from perdure.errors import (
    ForbiddenResponder,
    InputClosed,
    InputExpired,
    InputNotFound,
    Invalid,
    NoActiveSession,
    SessionGone,
)
from perdure.protocol.deliveries import DeliveryBody, InputOutcome, InputResponse, Message, Principal, Receipt
from perdure.protocol.inputs import APPROVE, DENY, InputAnswer, InputStatus
from perdure.session import inputs
from perdure.session.inputs import may_answer, resolved
from perdure.store.base import Store
from perdure.store.deliveries import DeliveryRow
from perdure.store.engine.cursors import Place, all_inputs, write_cursor
from perdure.store.engine.rows import stamp
from perdure.store.inputs import Answered, Answering, InputPage, InputQuery, InputRow, Vote

from .deliveries import CallerRequest, read_edit
from .signals import Signals

if TYPE_CHECKING:
    from perdure.agents.registry import AgentRegistry


log = logging.getLogger("perdure.sessions")


@dataclass(frozen=True)
class _Response:
    """One response and its request, if the session has such a request."""

    response: InputResponse
    row: InputRow | None
    answer: InputAnswer | None
    # The current status. The store may still have a request as open whose time has passed.
    status: InputStatus | None
    # The answer closes the request regardless of other votes.
    ends: bool = False

    @property
    def session_id(self) -> str | None:
        """The session that has asked."""
        return self.row.request.session_id if self.row else None

    @property
    def counts(self) -> bool:
        return self.status == "open"

    @property
    def repeats(self) -> bool:
        """Whether the request is closed with the same answer."""
        return _is_closed_with(self.row, self.answer)

    def outcome(self, now: InputRow | None) -> InputOutcome:
        if now is None:
            return InputOutcome(request_id=self.response.request_id, status="unknown")
        if self.status == "expired":
            return outcome(now).model_copy(update={"status": "expired"})
        return outcome(now)


class Answers:
    """Records answers to input requests and signals their sessions."""

    def __init__(self, store: Store, signals: Signals, agents: AgentRegistry | None) -> None:
        self._store = store
        self._signals = signals
        self._agents = agents

    async def take(self, request: CallerRequest) -> Receipt | None:
        """Record the request as an answer; None when it is an ordinary message."""
        if request.body.input_responses:
            return await self._respond(request, request.body, request.body.input_responses)
        if request.body.message is None:
            return None
        # A message answers a request of a descendant as well, which readers of this session have seen.
        waiting = await self.waiting(request.session_id)
        return await self._handle_message(request, request.body.message, waiting) if waiting else None

    async def answer(self, response: InputResponse, request: CallerRequest) -> Receipt:
        """Answer one input request; `InputClosed` when it has another outcome."""
        row = await self._store.input(response.request_id)
        if row is None or row.request.session_id != request.session_id:
            raise InputNotFound
        given = await self._read(request, response)
        # The newer row: the request may have been answered meanwhile.
        row = given.row or row
        if given.status == "expired":
            raise InputExpired(status="expired", option_id=_option(row))
        if not given.counts and not given.repeats:
            raise _closed_error(row)
        if row.request.kind == "approval" and given.counts and response.option_id not in (APPROVE, DENY):
            # A denial cannot be taken back: a slip must not be one.
            raise Invalid(f"Request {response.request_id} is an approval: answer '{APPROVE}' or '{DENY}'.")
        body = request.body.model_copy(update={"kind": "answer", "answers": (response.request_id,)})
        answered = await self._count_votes(request, body, [given])
        receipt = await self._receipt(request, [given], answered)
        now = answered.rows[0]
        if now.status != "open" and not _is_closed_with(now, given.answer):
            raise _closed_error(now)
        return receipt

    async def waiting(self, session_id: str) -> Sequence[InputRow]:
        """The open input requests of the session and of its descendants, oldest first."""
        return await all_inputs(self._store, InputQuery(root=session_id))

    async def closed_by(self, session_id: str, delivery_id: str) -> tuple[InputOutcome, ...]:
        """The requests that a delivery closed, for the receipt of a repeated request."""
        found = await all_inputs(self._store, InputQuery(session_id=session_id, status="answered"))
        return tuple(outcome(row) for row in found if row.delivery_id == delivery_id)

    async def outcomes(self, request: CallerRequest, delivery_id: str) -> tuple[InputOutcome, ...]:
        """The outcomes of the requests that the delivery answered."""
        if not request.body.input_responses:
            return await self.closed_by(request.session_id, delivery_id)
        given = [await self._read(request, response) for response in request.body.input_responses]
        return tuple(each.outcome(each.row) for each in given)

    # --- plain messages -------------------------------------------------------------------------------------

    async def _handle_message(
        self, request: CallerRequest, message: Message, waiting: Sequence[InputRow]
    ) -> Receipt | None:
        """Handle a plain message while input requests are open; None when it has to wait for them."""
        now = _now()
        queues = self._queues(waiting[0].request.agent)
        only = waiting[0] if len(waiting) == 1 else None
        if only and _status(only, now) == "open" and _may_answer(request.principal, only):
            response = inputs.read_message(only.request, message)
            # A principal's first vote counts. A different message of the same principal closes the request instead.
            if response is not None and (queues or _may_vote(only, response, request.principal, now)):
                return await self._respond(request, request.body.model_copy(update={"message": None}), [response])
        if queues:
            return None
        denied = [_continued(row, request.principal, now) for row in waiting if _status(row, now) == "open"]
        if not denied:
            return None
        own = [each for each in denied if each.session_id == request.session_id]
        for session_id, theirs in _by_session(denied, request.session_id).items():
            part = _part(request, session_id, [each.response for each in theirs])
            await self._receipt(part, theirs, await self._count_votes(part, part.body, theirs, always=True))
        body = request.body.model_copy(update={"kind": "answer", "answers": tuple(_ids(own))})
        return await self._receipt(request, denied, await self._count_votes(request, body, own, always=True))

    def _queues(self, agent: str) -> bool:
        known = self._agents.get(agent) if self._agents else None
        return known is None or known.while_waiting == "queue"

    # --- responses ------------------------------------------------------------------------------------------

    async def _respond(self, request: CallerRequest, body: DeliveryBody, responses: Sequence[InputResponse]) -> Receipt:
        if len({response.request_id for response in responses}) < len(responses):
            raise Invalid("Expected each request to be answered once.")
        given = [await self._read(request, response) for response in responses]
        others = _by_session(given, request.session_id)
        if not others:
            return await self._respond_own(request, body, given)
        receipts = [await self._respond_for(request, session_id, theirs) for session_id, theirs in others.items()]
        own = [each for each in given if each.session_id in (None, request.session_id)]
        if own or body.message is not None:
            rest = body.model_copy(update={"input_responses": tuple(each.response for each in own)})
            receipts.append(await self._respond_own(request, rest, own))
        return _joined(request, given, receipts)

    async def _respond_for(self, request: CallerRequest, session_id: str, given: Sequence[_Response]) -> Receipt:
        """Answer the requests of a descendant: its own session gets the answers."""
        part = _part(request, session_id, [each.response for each in given])
        try:
            return await self._respond_own(part, part.body, given)
        except NoActiveSession:
            # It has ended: its requests are closed, and the caller gets to know how.
            return _receipt(request, None, tuple(each.outcome(each.row) for each in given))

    async def _respond_own(self, request: CallerRequest, body: DeliveryBody, given: Sequence[_Response]) -> Receipt:
        more = body.message is not None
        if not more and all(each.status == "expired" for each in given):
            raise InputExpired(status="expired", option_id=_option(given[0].row))
        # An answer to a closed request has no effect, but the session gets it. A request may also close between this
        # check and the count. The delivery is written then too, so that a repeated request finds the first one.
        delivered = [each for each in given if each.counts or not each.repeats]
        always = more or any(not each.counts for each in delivered)
        kind = "answer" if delivered else "message"
        body = body.model_copy(update={"kind": kind, "answers": tuple(_ids(delivered))})
        return await self._receipt(
            request, given, await self._count_votes(request, body, given, always=always, late=True)
        )

    async def _read(self, request: CallerRequest, response: InputResponse) -> _Response:
        row = await self._store.input(response.request_id)
        if row is None or not await self._is_of_family(row, request.session_id):
            return _Response(response, None, None, None)
        if not _may_answer(request.principal, row):
            raise ForbiddenResponder(request_id=response.request_id)
        now = _now()
        status = _status(row, now)
        answer = inputs.read(row.request, response, request.principal, stamp(now))
        if answer.arguments is not None:
            response = await self._edited(row, response, status)
            answer = inputs.read(row.request, response, request.principal, stamp(now))
        return _Response(response, row, answer, status)

    async def _is_of_family(self, row: InputRow, session_id: str) -> bool:
        """Whether it is a request of this session, or of a descendant of this root."""
        if row.request.session_id == session_id:
            return True
        asking = await self._store.session(row.request.session_id)
        return asking is not None and asking.root_id == session_id

    async def _edited(self, row: InputRow, response: InputResponse, status: InputStatus) -> InputResponse:
        """The response with its changed arguments, validated by the tool."""
        try:
            arguments = await read_edit(self._agents, row.request, response.arguments or {})
        except Invalid:
            if status == "open":
                raise
            # The response has no effect now. The tool may have changed since the response counted.
            return response
        return response.model_copy(update={"arguments": arguments})

    async def _count_votes(
        self,
        request: CallerRequest,
        body: DeliveryBody,
        given: Sequence[_Response],
        *,
        always: bool = False,
        late: bool = False,
    ) -> Answered:
        """Count the answers and write the delivery for the session. They are accepted from then on."""
        votes = [
            Vote(each.response.request_id, each.answer, each.ends)
            for each in given
            # An expired request takes no vote, even while the store still has it as open.
            if each.row and each.answer and (each.status != "expired" or each.row.status != "open")
        ]
        answering = Answering(request.session_id, votes, request.delivery(body), always=always, late=late)
        try:
            return await self._store.answer(answering, lambda row: resolved(row.request, row.status, row.answer))
        except SessionGone:
            raise NoActiveSession from None

    async def _receipt(self, request: CallerRequest, given: Sequence[_Response], answered: Answered) -> Receipt:
        """Signal the session, then return the outcomes. A failure here does not undo the votes."""
        signalled = await self._signal(request, answered)
        receipt = await self._outcomes(request, given, answered)
        return receipt.model_copy(update={"delayed": not signalled})

    async def _outcomes(self, request: CallerRequest, given: Sequence[_Response], answered: Answered) -> Receipt:
        delivery = answered.delivery
        repeated = delivery is not None and not answered.fresh
        if delivery is not None and repeated and not request.body.input_responses:
            # A repeated plain message: only the store knows which requests it closed the first time.
            before = await self.closed_by(request.session_id, delivery.delivery_id)
            return _receipt(request, delivery.delivery_id, before, deduplicated=True)
        now = {row.request.request_id: row for row in answered.rows}
        inputs = tuple(each.outcome(now.get(each.response.request_id, each.row)) for each in given)
        if delivery is not None:
            return _receipt(request, delivery.delivery_id, inputs, deduplicated=repeated)
        first = next((row.delivery_id for row in answered.rows if row.delivery_id is not None), None)
        return _receipt(request, first, inputs, deduplicated=all(each.repeats for each in given))

    async def _signal(self, request: CallerRequest, answered: Answered) -> bool:
        """Signal the delivery. Without one, signal the delivery that answered first: its process may have died.

        False when the signal has to be sent later. The votes are accepted in any case.
        """
        winners = sorted({row.delivery_id for row in answered.rows if row.delivery_id is not None})
        rows: Sequence[DeliveryRow] = [answered.delivery] if answered.delivery else ()
        try:
            if not rows and winners:
                rows = await self._store.deliveries(request.session_id, winners)
        except Exception as error:
            # The sweeper finds it: it was accepted earlier.
            log.warning("the first answer to session %s is signalled later: %s", request.session_id, error)
            return False
        signalled = [await self._signals.deliver(row, unsignalled=answered.unsignalled) for row in rows if row.unread]
        if answered.closed:
            await self._signal_root(request.session_id)
        return all(signalled)

    async def _signal_root(self, session_id: str) -> None:
        """Signal the root of a family that a request of a descendant is closed. If it fails, the sweeper does."""
        try:
            asking = await self._store.session(session_id)
        except Exception as error:
            log.warning("the root of session %s is signalled later: %s", session_id, error)
            return
        if asking is not None and asking.root_id is not None:
            await self._signals.deliver_all(asking.root_id)


def _by_session(given: Sequence[_Response], but: str) -> dict[str, list[_Response]]:
    """The responses to requests of other sessions than this one."""
    others: dict[str, list[_Response]] = {}
    for each in given:
        if each.session_id not in (None, but):
            others.setdefault(each.session_id, []).append(each)
    return others


def _part(request: CallerRequest, session_id: str, responses: Sequence[InputResponse]) -> CallerRequest:
    """The part of a request to a root that is for one of its descendants."""
    body = DeliveryBody(
        kind="answer",
        input_responses=tuple(responses),
        answers=tuple(each.request_id for each in responses),
        principal=request.body.principal,
    )
    key = request.idempotency_key
    return replace(
        request,
        session_id=session_id,
        body=body,
        about=(*request.about, session_id),
        idempotency_key=None if key is None else f"{key}/{session_id}",
        token_hash="",
    )


def _joined(request: CallerRequest, given: Sequence[_Response], receipts: Sequence[Receipt]) -> Receipt:
    """One receipt for a request whose parts went to several sessions."""
    outcomes = {each.request_id: each for receipt in receipts for each in receipt.inputs}
    return Receipt(
        session_id=request.session_id,
        delivery_id=next((each.delivery_id for each in reversed(receipts) if each.delivery_id is not None), None),
        inputs=tuple(outcomes[each.response.request_id] for each in given if each.response.request_id in outcomes),
        deduplicated=all(each.deduplicated for each in receipts),
        delayed=any(each.delayed for each in receipts),
    )


def _may_vote(row: InputRow, response: InputResponse, principal: Principal, now: datetime) -> bool:
    """Whether this principal has not answered the request yet, or has given the same answer."""
    answer = inputs.read(row.request, response, principal, stamp(now))
    own = [vote for vote in row.votes if vote.same_principal(answer)]
    return not own or own[0].same(answer)


def _continued(row: InputRow, principal: Principal, now: datetime) -> _Response:
    answer = inputs.continued(row.request, principal, stamp(now))
    return _Response(InputResponse(request_id=row.request.request_id), row, answer, "open", ends=True)


def _receipt(
    request: CallerRequest, delivery_id: str | None, inputs: tuple[InputOutcome, ...], *, deduplicated: bool = False
) -> Receipt:
    return Receipt(session_id=request.session_id, delivery_id=delivery_id, inputs=inputs, deduplicated=deduplicated)


def outcome(row: InputRow) -> InputOutcome:
    return InputOutcome(request_id=row.request.request_id, status=row.status, option_id=_option(row))


def _closed_error(row: InputRow) -> InputClosed | InputExpired:
    error = InputExpired if row.status == "expired" else InputClosed
    return error(status=row.status, option_id=_option(row))


def _option(row: InputRow | None) -> str | None:
    return row.answer.option_id if row is not None and row.answer is not None else None


def _is_closed_with(row: InputRow | None, answer: InputAnswer | None) -> bool:
    """Whether the request is closed with this answer."""
    if row is None or answer is None or row.answer is None or row.status != "answered":
        return False
    return row.answer.same(answer)


def _may_answer(principal: Principal, row: InputRow) -> bool:
    return may_answer(row.request.responders, principal, row.requester)


def _status(row: InputRow, now: datetime) -> InputStatus:
    return "expired" if row.status == "open" and inputs.is_late(row.request, now) else row.status


def _ids(given: Sequence[_Response]) -> list[str]:
    return [each.response.request_id for each in given]


def _now() -> datetime:
    return datetime.now(UTC)


#: How many rows one read returns, and how many reads one page takes at most. A caller who may see few of very many
#: requests gets short pages with a cursor.
_READ_ROWS = 200
_READS = 10


class Inputs:
    """The input requests of all sessions. A caller sees those that they may answer and those of their own sessions."""

    def __init__(self, store: Store, answers: Answers, *, inbox_limit: int | None = None) -> None:
        self._store = store
        self._inbox_limit = inbox_limit
        self._answers = answers

    async def list(self, query: InputQuery, principal: Principal) -> InputPage:
        """One page of the requests that the caller sees, oldest first."""
        seen: list[InputRow] = []
        place = query.cursor
        for _ in range(_READS):
            page = await self._store.inputs(replace(query, limit=_READ_ROWS, cursor=place))
            seen.extend(row for row in page.rows if visible(row, principal))
            place = page.next_cursor
            if len(seen) > query.limit:
                seen = seen[: query.limit]
                return InputPage(seen, write_cursor(Place(seen[-1].opened_at, seen[-1].request.request_id)))
            if place is None or len(seen) == query.limit:
                break
        return InputPage(seen, place)

    async def get(self, request_id: str, principal: Principal) -> InputRow:
        row = await self._store.input(request_id)
        if row is None or not visible(row, principal):
            raise InputNotFound
        return row

    async def waiting(self, session_id: str) -> Sequence[InputRow]:
        """The open requests of this session, oldest first."""
        return await self._answers.waiting(session_id)

    async def answer(
        self, response: InputResponse, principal: Principal, *, idempotency_key: str | None = None
    ) -> Receipt:
        """Answer one request. Its session is signalled when the votes close it.

        `Invalid` for an approval's option beside `approve` and `deny`, which would deny otherwise. `ForbiddenResponder`
        when the caller may not answer it, `InputClosed` or `InputExpired` when it has another
        outcome.
        """
        row = await self.get(response.request_id, principal)
        body = DeliveryBody(input_responses=(response,), principal=principal)
        about = ("answer", response.request_id)
        request = CallerRequest(
            row.request.session_id, body, principal, about, idempotency_key, limit=self._inbox_limit
        )
        return await self._answers.answer(response, request)


def visible(row: InputRow, principal: Principal) -> bool:
    return row.requester.owner == principal.owner or _may_answer(principal, row)
