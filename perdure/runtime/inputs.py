"""Answers of people on their way in, and the requests that they answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from perdure.agents.registry import AgentRegistry
from perdure.errors import (
    ForbiddenResponder,
    InputClosed,
    InputExpired,
    InputNotFound,
    Invalid,
    NoActiveSession,
    SessionGone,
)
from perdure.protocol.deliveries import DeliveryBody, InputOutcome, InputResponse, Message, Receipt
from perdure.protocol.events import NewEvent
from perdure.protocol.inputs import InputAnswer, InputStatus
from perdure.protocol.principals import Principal
from perdure.session import inputs
from perdure.session.inputs import may_answer, resolved
from perdure.store.base import Store
from perdure.store.engine import cursor
from perdure.store.values import Answered, Answering, DeliveryRow, InputPage, InputQuery, InputRow, Vote

from .deliveries import CallerRequest
from .edits import read_edit
from .signals import Signals

if TYPE_CHECKING:
    from perdure.agents.registry import AgentRegistry


log = logging.getLogger("perdure.sessions")

#: How many requests one look at a session finds; it has a handful.
_PAGE = 200


@dataclass(frozen=True)
class _Given:
    """One response, and the request that it is meant for, if the session has such a request."""

    response: InputResponse
    row: InputRow | None
    answer: InputAnswer | None
    # As it is now; the store may not have noticed yet that the time is over.
    status: InputStatus | None
    # The session goes on without the request.
    ends: bool = False

    @property
    def counts(self) -> bool:
        return self.status == "open"

    @property
    def repeats(self) -> bool:
        """Whether the request is closed with just this answer."""
        return _agrees(self.row, self.answer)

    def outcome(self, now: InputRow | None) -> InputOutcome:
        if now is None:
            return InputOutcome(request_id=self.response.request_id, status="unknown")
        if self.status == "expired":
            return outcome(now).model_copy(update={"status": "expired"})
        return outcome(now)


class Answers:
    """Gives people's answers to sessions."""

    def __init__(self, store: Store, signals: Signals, agents: AgentRegistry | None) -> None:
        self._store = store
        self._signals = signals
        self._agents = agents

    async def take(self, asked: CallerRequest) -> Receipt | None:
        """Answer what the request answers; None when it is an ordinary message."""
        if asked.body.input_responses:
            return await self._respond(asked, asked.body, asked.body.input_responses)
        if asked.body.message is None:
            return None
        waiting = await self.waiting(asked.session_id)
        return await self._instead(asked, asked.body.message, waiting) if waiting else None

    async def answer(self, request_id: str, response: InputResponse, asked: CallerRequest) -> Receipt:
        """Answer one request, from outside its session; `InputClosed` when it has another outcome."""
        row = await self._store.input(request_id)
        if row is None or row.request.session_id != asked.session_id:
            raise InputNotFound
        given = await self._given(asked, response)
        # As it stands now: somebody may have answered since it was found.
        row = given.row or row
        if given.status == "expired":
            raise InputExpired(status="expired", option_id=_option(row))
        if not given.counts and not given.repeats:
            raise _closed(row)
        body = asked.body.model_copy(update={"kind": "answer", "answers": (request_id,)})
        answered = await self._count(asked, body, [given])
        receipt = await self._receipt(asked, [given], answered)
        now = answered.rows[0]
        if now.status != "open" and not _agrees(now, given.answer):
            raise _closed(now)
        return receipt

    async def waiting(self, session_id: str) -> Sequence[InputRow]:
        """What the session waits for people for, oldest first."""
        page = await self._store.inputs(InputQuery(session_id=session_id, limit=_PAGE))
        found = list(page.rows)
        while page.next_cursor is not None:
            page = await self._store.inputs(InputQuery(session_id=session_id, limit=_PAGE, cursor=page.next_cursor))
            found.extend(page.rows)
        return found

    async def closed_by(self, session_id: str, delivery_id: str) -> tuple[InputOutcome, ...]:
        """What a delivery answered, for a receipt that is asked for again."""
        found: list[InputOutcome] = []
        cursor: str | None = None
        while True:
            query = InputQuery(session_id=session_id, status="answered", limit=_PAGE, cursor=cursor)
            page = await self._store.inputs(query)
            found.extend(outcome(row) for row in page.rows if row.delivery_id == delivery_id)
            if (cursor := page.next_cursor) is None:
                return tuple(found)

    async def outcomes(self, asked: CallerRequest, delivery_id: str) -> tuple[InputOutcome, ...]:
        """How what was asked for came out."""
        if not asked.body.input_responses:
            return await self.closed_by(asked.session_id, delivery_id)
        given = [await self._given(asked, response) for response in asked.body.input_responses]
        return tuple(each.outcome(each.row) for each in given)

    # --- plain messages -------------------------------------------------------------------------------------

    async def _instead(self, asked: CallerRequest, message: Message, waiting: Sequence[InputRow]) -> Receipt | None:
        """What a plain message means while requests are open; None when it waits behind them."""
        now = _now()
        queues = self._queues(waiting[0].request.agent)
        only = waiting[0] if len(waiting) == 1 else None
        if only and _status(only, now) == "open" and _may(asked.principal, only):
            response = inputs.read_message(only.request, message)
            # Whoever has voted cannot vote otherwise; to say something else is to go on without it.
            if response is not None and (queues or _may_say(only, response, asked.principal, now)):
                return await self._respond(asked, asked.body.model_copy(update={"message": None}), [response])
        if queues:
            return None
        denied = [_continued(row, asked.principal, now) for row in waiting if _status(row, now) == "open"]
        if not denied:
            return None
        body = asked.body.model_copy(update={"kind": "answer", "answers": tuple(_ids(denied))})
        return await self._receipt(asked, denied, await self._count(asked, body, denied, always=True))

    def _queues(self, agent: str) -> bool:
        known = self._agents.get(agent) if self._agents else None
        return known is None or known.while_waiting == "queue"

    # --- responses ------------------------------------------------------------------------------------------

    async def _respond(self, asked: CallerRequest, body: DeliveryBody, responses: Sequence[InputResponse]) -> Receipt:
        if len({response.request_id for response in responses}) < len(responses):
            raise Invalid("Expected each request to be answered once.")
        given = [await self._given(asked, response) for response in responses]
        more = body.message is not None
        if not more and all(each.status == "expired" for each in given):
            raise InputExpired(status="expired", option_id=_option(given[0].row))
        # An answer to what is not open authorises nothing; the session is told of it all the same. It may also come too
        # late between now and when it is counted: a repeated request has to find what became of this one.
        told = [each for each in given if each.counts or not each.repeats]
        always = more or any(not each.counts for each in told)
        kind = "answer" if told else "message"
        body = body.model_copy(update={"kind": kind, "answers": tuple(_ids(told))})
        return await self._receipt(asked, given, await self._count(asked, body, given, always=always, late=True))

    async def _given(self, asked: CallerRequest, response: InputResponse) -> _Given:
        row = await self._store.input(response.request_id)
        if row is None or row.request.session_id != asked.session_id:
            return _Given(response, None, None, None)
        if not _may(asked.principal, row):
            raise ForbiddenResponder(request_id=response.request_id)
        now = _now()
        status = _status(row, now)
        answer = inputs.read(row.request, response, asked.principal, _stamp(now))
        if answer.arguments is not None:
            response = await self._edited(row, response, status)
            answer = inputs.read(row.request, response, asked.principal, _stamp(now))
        return _Given(response, row, answer, status)

    async def _edited(self, row: InputRow, response: InputResponse, status: InputStatus) -> InputResponse:
        """The response with the arguments that its approval lets run."""
        try:
            arguments = await read_edit(self._agents, row.request, response.arguments or {})
        except Invalid:
            if status == "open":
                raise
            # It changes nothing any more. The tool may have changed since it counted, if it did.
            return response
        return response.model_copy(update={"arguments": arguments})

    async def _count(
        self,
        asked: CallerRequest,
        body: DeliveryBody,
        given: Sequence[_Given],
        *,
        always: bool = False,
        late: bool = False,
    ) -> Answered:
        """Count the answers, and write what the session has to hear. From then on they are accepted."""
        votes = [
            Vote(each.response.request_id, each.answer, each.ends)
            for each in given
            # Those whose time is over count no more, even while the store still has them as open.
            if each.row is not None and each.answer is not None and (each.status != "expired" or not _is_open(each.row))
        ]
        answering = Answering(asked.session_id, votes, asked.delivery(body), always=always, late=late)
        try:
            answered = await self._store.answer(answering, _told)
        except SessionGone:
            raise NoActiveSession from None
        return answered

    async def _receipt(self, asked: CallerRequest, given: Sequence[_Given], answered: Answered) -> Receipt:
        """How everything stands now; the session is told first. Nothing that fails here undoes what was counted."""
        told = await self._wake(asked, answered)
        receipt = await self._standing(asked, given, answered)
        return receipt.model_copy(update={"delayed": not told})

    async def _standing(self, asked: CallerRequest, given: Sequence[_Given], answered: Answered) -> Receipt:
        delivery = answered.delivery
        repeated = delivery is not None and not answered.fresh
        if delivery is not None and repeated and not asked.body.input_responses:
            # A plain message: what it answered the first time, only the store knows.
            before = await self.closed_by(asked.session_id, delivery.delivery_id)
            return _receipt(asked, delivery.delivery_id, before, deduplicated=True)
        now = {row.request.request_id: row for row in answered.rows}
        inputs = tuple(each.outcome(now.get(each.response.request_id, each.row)) for each in given)
        if delivery is not None:
            return _receipt(asked, delivery.delivery_id, inputs, deduplicated=repeated)
        first = next((row.delivery_id for row in answered.rows if row.delivery_id is not None), None)
        return _receipt(asked, first, inputs, deduplicated=all(each.repeats for each in given))

    async def _wake(self, asked: CallerRequest, answered: Answered) -> bool:
        """Signal what was delivered; else, for whoever answered first and may have died since, their delivery.

        False when that has to wait: it is counted and written, so it was accepted.
        """
        mine = answered.delivery
        try:
            rows = [mine] if mine else await self._winning(asked.session_id, answered)
        except Exception as error:
            # The sweep finds it: whatever it is, it was accepted before.
            log.warning("what answered session %s first is told later: %s", asked.session_id, error)
            return False
        told = [await self._signals.deliver(row, untold=answered.untold) for row in rows if row.unheard]
        return all(told)

    async def _winning(self, session_id: str, answered: Answered) -> Sequence[DeliveryRow]:
        """The deliveries of those who answered first."""
        winners = sorted({row.delivery_id for row in answered.rows if row.delivery_id is not None})
        return await self._store.deliveries(session_id, winners) if winners else ()


def _may_say(row: InputRow, response: InputResponse, principal: Principal, now: datetime) -> bool:
    """Whether this principal has not answered the request yet, or has said the same."""
    answer = inputs.read(row.request, response, principal, _stamp(now))
    own = [vote for vote in row.votes if vote.same_principal(answer)]
    return not own or own[0].same(answer)


def _continued(row: InputRow, principal: Principal, now: datetime) -> _Given:
    answer = inputs.continued(row.request, principal, _stamp(now))
    return _Given(InputResponse(request_id=row.request.request_id), row, answer, "open", ends=True)


def _receipt(
    asked: CallerRequest, delivery_id: str | None, inputs: tuple[InputOutcome, ...], *, deduplicated: bool = False
) -> Receipt:
    return Receipt(session_id=asked.session_id, delivery_id=delivery_id, inputs=inputs, deduplicated=deduplicated)


def outcome(row: InputRow) -> InputOutcome:
    return InputOutcome(request_id=row.request.request_id, status=row.status, option_id=_option(row))


def _told(row: InputRow) -> NewEvent:
    return resolved(row.request, row.status, row.answer)


def _closed(row: InputRow) -> InputClosed | InputExpired:
    error = InputExpired if row.status == "expired" else InputClosed
    return error(status=row.status, option_id=_option(row))


def _option(row: InputRow | None) -> str | None:
    return row.answer.option_id if row is not None and row.answer is not None else None


def _agrees(row: InputRow | None, answer: InputAnswer | None) -> bool:
    """Whether the request is closed with this answer."""
    if row is None or answer is None or row.answer is None or row.status != "answered":
        return False
    return row.answer.same(answer)


def _may(principal: Principal, row: InputRow) -> bool:
    return may_answer(row.request.responders, principal, row.requester)


def _status(row: InputRow, now: datetime) -> InputStatus:
    return "expired" if row.status == "open" and inputs.is_late(row.request, now) else row.status


def _is_open(row: InputRow) -> bool:
    return row.status == "open"


def _ids(given: Sequence[_Given]) -> list[str]:
    return [each.response.request_id for each in given]


def _now() -> datetime:
    return datetime.now(UTC)


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


#: How many requests one look reads, and how many looks one page takes: a caller who may answer few of very many gets
#: short pages, and a cursor to go on with.
_LOOK = 200
_LOOKS = 10


class Inputs:
    """The open requests of all sessions. Who may not answer one does not see it, unless the session is theirs."""

    def __init__(self, store: Store, answers: Answers, *, inbox_limit: int | None = None) -> None:
        self._store = store
        self._inbox_limit = inbox_limit
        self._answers = answers

    async def list(self, query: InputQuery, principal: Principal) -> InputPage:
        """One page of those that the caller sees, oldest first."""
        seen: list[InputRow] = []
        place = query.cursor
        for _ in range(_LOOKS):
            page = await self._store.inputs(replace(query, limit=_LOOK, cursor=place))
            seen.extend(row for row in page.rows if visible(row, principal))
            place = page.next_cursor
            if len(seen) > query.limit:
                seen = seen[: query.limit]
                return InputPage(seen, cursor.write(cursor.Place(seen[-1].opened_at, seen[-1].request.request_id)))
            if place is None or len(seen) == query.limit:
                break
        return InputPage(seen, place)

    async def get(self, request_id: str, principal: Principal) -> InputRow:
        row = await self._store.input(request_id)
        if row is None or not visible(row, principal):
            raise InputNotFound
        return row

    async def waiting(self, session_id: str) -> Sequence[InputRow]:
        """What this session waits for people for, oldest first."""
        return await self._answers.waiting(session_id)

    async def answer(
        self, response: InputResponse, principal: Principal, *, idempotency_key: str | None = None
    ) -> Receipt:
        """Answer one request; its session hears of it once enough people agree.

        `ForbiddenResponder` when it is for somebody else, `InputClosed` or `InputExpired` when it has another outcome.
        """
        row = await self.get(response.request_id, principal)
        body = DeliveryBody(input_responses=(response,), principal=principal)
        about = ("answer", response.request_id)
        asked = CallerRequest(row.request.session_id, body, principal, about, idempotency_key, limit=self._inbox_limit)
        return await self._answers.answer(response.request_id, response, asked)


def visible(row: InputRow, principal: Principal) -> bool:
    return row.requester.owner == principal.owner or may_answer(row.request.responders, principal, row.requester)
