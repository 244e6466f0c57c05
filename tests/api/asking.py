"""Sessions that wait for people, and people who answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from httpx2 import Response

from api.auth import Credentials
from perdure.protocol.deliveries import Principal
from perdure.protocol.events import Event, EventType
from perdure.protocol.inputs import InputKind, InputRequest, InputStatus, Option, Responders, digest
from perdure.session.inputs import at_expiry
from perdure.store.inputs import InputRow
from perdure.store.values import Commit, InputChanges, SessionChange
from tests.api.served import URL, Api

YES_OR_NO = (Option(id="approve", label="Yes"), Option(id="deny", label="No"))
COLOURS = (Option(id="r", label="Red"), Option(id="b", label="Blue"))
PAYMENT = {"amount": 3, "to": "bob"}

APPROVE = {"optionId": "approve"}
DENY = {"optionId": "deny"}


async def by_header(credentials: Credentials) -> Principal | None:
    """Lets in any caller with a name: `x-who: bob`, `x-role: finance`; and by what: `x-by: api-key`."""
    who = credentials.headers.get("x-who")
    if who is None:
        return None
    role = credentials.headers.get("x-role")
    attributes: dict[str, str | list[str]] = {"role": role} if role else {}
    by = credentials.headers.get("x-by", "test")
    return Principal(principal_id=who, principal_type="user", authenticator=by, attributes=attributes)


def known_as(who: str, role: str | None = None, key: str | None = None) -> dict[str, str]:
    headers = {"x-who": who, "x-role": role or "", "idempotency-key": key or ""}
    return {name: value for name, value in headers.items() if value}


@dataclass
class Waiting:
    """A session that waits for people, seen by its owner."""

    api: Api
    session: dict[str, Any]

    @property
    def id(self) -> str:
        return self.session["sessionId"]

    async def ask(
        self,
        *request_ids: str,
        agent: str = "bursar",
        kind: InputKind = "approval",
        options: Sequence[Option] | None = None,
        responders: Responders | None = None,
        **fields: Any,
    ) -> None:
        """Park on these requests, as the harness does."""
        default = YES_OR_NO if kind == "approval" else ()
        requests = [
            InputRequest(
                request_id=each,
                session_id=self.id,
                agent=agent,
                turn=0,
                step=0,
                call_id=f"call-{each}",
                tool="pay" if kind == "approval" else "ask_question",
                kind=kind,
                prompt="Approve tool call: pay" if kind == "approval" else "Which colour?",
                input=PAYMENT,
                digest=digest(PAYMENT),
                display="confirmation" if kind == "approval" else "select",
                options=tuple(default if options is None else options),
                responders=responders or Responders(),
                **fields,
            )
            for each in request_ids
        ]
        change = SessionChange(status="waiting", turns=1)
        await self.api.store.commit(Commit(self.id, inputs=InputChanges(opens=requests), change=change))

    async def say(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
        content = {"continuationToken": self.session["continuationToken"], **body}
        return await self.api.http.post(f"{URL}/{self.id}", json=content, headers=headers)

    async def respond(self, *responses: dict[str, Any], headers: dict[str, str] | None = None, **body: Any) -> Response:
        return await self.say({"inputResponses": list(responses), **body}, headers)

    async def row(self, request_id: str) -> InputRow:
        row = await self.api.store.input(request_id)
        assert row is not None
        return row

    async def expire(self, request_id: str) -> None:
        row = await self.row(request_id)
        await self.api.store.commit(Commit(self.id, inputs=InputChanges(expires={request_id: at_expiry(row.request)})))

    async def withdraw(self, request_id: str) -> None:
        await self.api.store.commit(Commit(self.id, inputs=InputChanges(withdraws=[request_id])))

    async def resolved(self) -> list[Event]:
        return [each for each in await self.api.store.events(self.id) if each.type == EventType.INPUT_RESOLVED]

    @property
    def signalled(self) -> list[tuple[str, str]]:
        """Kind and id of each delivery that was signalled to the driver, once each."""
        seen = [(ref["kind"], ref["id"]) for _, name, ref in self.api.temporal.signals if name == "deliver"]
        return list(dict.fromkeys(seen))

    async def body(self, delivery_id: str) -> dict[str, Any]:
        (row,) = await self.api.store.deliveries(self.id, [delivery_id])
        assert row.body is not None
        return row.body


async def waiting(api: Api, *request_ids: str, agent: str = "bursar", **fields: Any) -> Waiting:
    session = Waiting(api, await api.create(prefix=f"/agents/{agent}"))
    await session.ask(*request_ids, agent=agent, **fields)
    return session


def outcome(request_id: str, status: InputStatus | str, option_id: str | None = None) -> dict[str, Any]:
    shown = {"requestId": request_id, "status": status}
    return shown if option_id is None else {**shown, "optionId": option_id}


def to(request_id: str, answer: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"requestId": request_id, **(answer or {}), **fields}
