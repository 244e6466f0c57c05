"""What sessions ask of people, as those people see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perdure.errors import InputNotFound
from perdure.protocol.deliveries import DeliveryBody, InputResponse, Receipt
from perdure.protocol.principals import Principal
from perdure.session.inputs import may_answer
from perdure.store.base import Store
from perdure.store.engine import cursor
from perdure.store.values import InputPage, InputQuery, InputRow

from .answers import Answers
from .asked import Asked

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
        asked = Asked(row.request.session_id, body, principal, about, idempotency_key, limit=self._inbox_limit)
        return await self._answers.answer(response.request_id, response, asked)


def visible(row: InputRow, principal: Principal) -> bool:
    return row.requester.owner == principal.owner or may_answer(row.request.responders, principal, row.requester)
