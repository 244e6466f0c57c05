"""The calls of a run that wait: for a time, for an agent, for people."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from perdure.agents import output_schema
from perdure.agents.context import Dispatch
from perdure.agents.registry import AgentRegistry, bounds_of
from perdure.agents.run import Question
from perdure.bounds import shortened, whole
from perdure.errors import (
    AgentGone,
    Conflict,
    InboxFull,
    Invalid,
    Misconfigured,
    NeedsAttention,
    PerdureError,
    SessionDeleted,
    SessionGone,
    TokenConflict,
    Unavailable,
)
from perdure.harness.tools.children import Children, output_of
from perdure.protocol import names
from perdure.protocol.deliveries import Capabilities, DeliveryBody, DeliveryRef, Lineage, QueueMode
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.inputs import InputRequest, Option, digest, requested
from perdure.protocol.wire import JsonObject
from perdure.session.state import hash_token, owned_token
from perdure.store.base import Store
from perdure.store.deliveries import CancelRequest, DeliveryRow, NewDelivery
from perdure.store.engine.rows import stamp_of
from perdure.store.values import InputChanges, NewSession, SessionRow

from .body import Body, Done
from .outcomes import Wait, failed
from .records import Place, Settled

#: The longest sleep, in seconds: a hundred years.
_LONGEST = 100 * 365 * 86_400.0
#: The name under which a run knows the sessions that it starts.
PROMPT = "prompt"
ASK = "ask_question"
#: Seconds between two looks at a turn of a session that is not a child.
_SOON, _LATE = 2.0, 30.0
_DELETED = failed("SESSION_DELETED", "The session that did this task was deleted.")
#: How often a session may end while a message is delivered to it.
_TRIES = 5


class Drivers(Protocol):
    """Signals the workflows of sessions. What fails is signalled later by the sweeper."""

    async def start(self, session: NewSession, ref: JsonObject) -> bool: ...

    async def deliver(self, row: DeliveryRow, *, unsignalled: bool) -> bool: ...

    async def cancel(self, request: CancelRequest) -> bool: ...


@dataclass(frozen=True)
class RunWaits:
    """The waits of one attempt at a run."""

    store: Store
    agents: AgentRegistry
    children: Children
    drivers: Drivers
    row: SessionRow
    #: The unread reports of children, by the id of the child.
    reports: Mapping[str, DeliveryRow]
    dispatcher: Dispatch | None = None

    # --- sleeps -----------------------------------------------------------------------------------------------

    async def sleep(self, body: Body, place: Place, seconds: float) -> Done | Wait:
        begun = body.begun(place)
        if begun is None:
            if not 0 <= seconds <= _LONGEST:
                return Done(failed("ValueError", f"A run cannot sleep for {seconds!r} seconds."))
            begun = body.begin("sleep", due=body.clock() + seconds)
            await body.commit(place, begun=begun)
        due = begun.due or begun.at
        if due <= body.clock():
            return Done(Settled(status="completed"))
        return Wait(f"a sleep until {stamp_of(due)}", due)

    # --- agents -----------------------------------------------------------------------------------------------

    async def prompt(
        self, body: Body, place: Place, agent: str, message: str, session: str | None, schema: JsonObject | None
    ) -> Done | Wait:
        if body.begun(place) is None:
            if not message:
                return Done(failed("ValueError", "An agent is prompted with a message."))
            if schema is not None and (problem := output_schema.problem(schema)):
                return Done(failed("ValueError", f"output_schema: {problem}"))
            self._check_served(agent)
        if session is None:
            return await self._hand_over(body, place, agent, whole(message), schema)
        return await self._say(body, place, agent, whole(message), session, schema)

    def _check_served(self, agent: str) -> None:
        """Before a session is started, too: its bounds are those that the agent declares."""
        if agent not in self.agents:
            raise AgentGone(f"The agent {agent!r} of this run is not served here.", agent=agent)

    async def _hand_over(
        self, body: Body, place: Place, agent: str, message: str, schema: JsonObject | None
    ) -> Done | Wait:
        child_id = names.child_session(body.run_id, 0, place.position, PROMPT)
        if body.begun(place) is None:
            begun = body.begin("prompt", child_session_id=child_id)
            await body.commit(place, begun=begun, events=(self._called(place, child_id, agent),))
        if report := self.reports.get(child_id):
            outcome = await self.children.outcome(report)
            if outcome.is_error:
                error = outcome.error or {}
                settled = failed(str(error.get("code", "")), str(error.get("message", "")))
            else:
                settled = Settled(status="completed", value=outcome.output)
            return Done(settled, hears=(report.delivery_id,))
        if await self.store.session(child_id) is None:
            if await self.store.deletion(child_id) is not None:
                return Done(_DELETED)
            self._check_served(agent)
            await self._start_child(place, agent, message, schema, child_id)
        return Wait(f"the agent {agent} ({child_id})")

    async def _start_child(
        self, place: Place, agent: str, message: str, schema: JsonObject | None, child_id: str
    ) -> None:
        lineage = Lineage(
            session_id=self.row.session_id,
            root_session_id=self.row.session_id,
            turn=0,
            step=place.position,
            call_id=f"call_{place.position}",
            name=PROMPT,
            depth=1,
        )
        session = self._new_session(
            child_id, agent, message, token_hash=f"child/{child_id}", parent=lineage.model_dump(mode="json")
        )
        ref = DeliveryRef(id=names.delivery_of_child(child_id), token_hash=session.token_hash)
        try:
            await self.store.create_session(session, self._delivery(session, message, schema, ref))
        except (SessionGone, SessionDeleted):
            # The run is being ended, or the child deleted: the next look finds that.
            return
        await self.drivers.start(session, ref.model_dump(mode="json"))

    async def _say(
        self, body: Body, place: Place, agent: str, message: str, session: str, schema: JsonObject | None
    ) -> Done | Wait:
        """Deliver to a session that is not a child, and look every few seconds whether its turn has ended."""
        begun = body.begun(place)
        if begun is None:
            begun = body.begin("prompt", session=session)
            await body.commit(place, begun=begun)
        try:
            delivery = await self._delivered(place, agent, message, session, schema)
        except SessionDeleted:
            return Done(_DELETED)
        if delivery.refused is not None:
            return Done(failed(delivery.refused, "The session did not read the message."))
        if delivery.turn is not None and (end := await self._end_of(delivery.session_id, delivery.turn)) is not None:
            return Done(end)
        passed = body.clock() - begun.at
        return Wait(f"the agent {agent} ({delivery.session_id})", body.clock() + min(max(_SOON, passed / 4), _LATE))

    async def _delivered(
        self, place: Place, agent: str, message: str, session: str, schema: JsonObject | None
    ) -> DeliveryRow:
        """The delivery of this prompt, which is accepted once, whichever session has the name now."""
        token_hash = hash_token(owned_token(self.row.principal.owner, agent, session))
        for _ in range(_TRIES):
            known = await self.store.route(token_hash)
            new = self._new_session(
                known or f"ses_{_ulid_of(self.row.session_id, place, 'session')}", agent, message, token_hash=token_hash
            )
            ref = DeliveryRef(id=f"dlv_{_ulid_of(self.row.session_id, place, 'delivery')}", token_hash=token_hash)
            delivery = self._delivery(new, message, schema, ref, key=f"run/{self.row.session_id}/{place.position}")
            if (first := await self.store.first(delivery)) is not None:
                # Who died before the signal left that to the sweeper. A signal with each look would be one too many.
                return first.delivery
            try:
                if known is not None:
                    accepted = await self.store.accept(delivery)
                    await self.drivers.deliver(accepted.delivery, unsignalled=accepted.unsignalled)
                else:
                    self._check_served(agent)
                    accepted = await self.store.create_session(new, delivery)
                    assert accepted is not None
                    await self.drivers.start(new, {**ref.model_dump(mode="json"), "at": accepted.delivery.accepted_at})
            except (SessionGone, TokenConflict, Conflict):
                continue
            return accepted.delivery
        raise Invalid("The session of this name comes and goes too quickly.")

    async def _end_of(self, session_id: str, turn: int) -> Settled | None:
        row = await self.store.session(session_id)
        if row is None:
            return _DELETED
        if row.records_expired:
            return failed("RESULT_EXPIRED", "The result of this turn has expired.")
        for what in ("completed", "failed", "cancelled"):
            index = await self.store.index_of(session_id, names.turn_key(turn, what))
            if index is None:
                continue
            if what == "completed":
                return Settled(status="completed", value=await output_of(self.store, row, turn))
            data = (await self.store.events(session_id, index, 1))[0].data or {}
            return failed(str(data.get("code", "TURN_CANCELLED")), str(data.get("message", "The turn was cancelled.")))
        return failed("SESSION_ENDED", "The session has ended before the turn.") if row.ended else None

    def _new_session(
        self, session_id: str, agent: str, message: str, *, token_hash: str, parent: JsonObject | None = None
    ) -> NewSession:
        known = self.agents.get(agent)
        return NewSession(
            session_id=session_id,
            agent=agent,
            mode="conversation" if parent is None else "task",
            token_hash=token_hash,
            principal=self.row.principal,
            capabilities=Capabilities(request_input=True),
            parent=parent,
            title=shortened(" ".join(message[:400].split()), 80),
            bounds=bounds_of(known.limits) if known else None,
        )

    def _delivery(
        self, session: NewSession, message: str, schema: JsonObject | None, ref: DeliveryRef, *, key: str | None = None
    ) -> NewDelivery:
        body = DeliveryBody(message=message, output_schema=schema, principal=self.row.principal)
        return NewDelivery(
            session_id=session.session_id,
            delivery_id=ref.id,
            body=body.model_dump(mode="json", exclude_none=True),
            owner=self.row.principal.owner,
            idempotency_key=key,
            digest=key,
            ref=ref.model_dump(mode="json"),
        )

    def _called(self, place: Place, child_id: str, agent: str) -> NewEvent:
        data: JsonObject = {
            "callId": f"call_{place.position}",
            "childSessionId": child_id,
            "sessionId": self.row.session_id,
            "name": agent,
            "toolName": agent,
            "workflowId": child_id,
        }
        return NewEvent(
            type=EventType.SUBAGENT_CALLED, key=names.session_key(f"run/called/{place.position}"), data=data
        )

    async def dispatch(
        self,
        body: Body,
        place: Place,
        agent: str,
        to: str,
        input: Any,
        dispatch_id: str | None,
        lane: str,
        queue_mode: QueueMode | None,
    ) -> Done | Wait:
        """Hand work to a session; its acceptance is the end of the call."""
        if self.dispatcher is None:
            raise Misconfigured("Nothing can be dispatched here.")
        key = dispatch_id or f"{self.row.session_id}/dispatch/{place.position}"
        try:
            receipt = await self.dispatcher(
                agent, to, input, dispatch_id=key, principal=self.row.principal, lane=lane, queue_mode=queue_mode
            )
        except InboxFull:
            return Wait(f"room in the inbox of {agent}", body.clock() + _LATE)
        except (NeedsAttention, Unavailable):
            raise
        except PerdureError as refused:
            return Done(failed(type(refused).__name__, refused.message))
        return Done(Settled(status="completed", value=receipt.model_dump(mode="json")))

    # --- people -----------------------------------------------------------------------------------------------

    async def ask(self, body: Body, place: Place, question: Question) -> Done | Wait:
        request_id = "inp_" + _digest_of(self.row.session_id, place, "input").hex()[:32]
        if body.begun(place) is None:
            options = question.options
            if not question.text or len({*options, ""}) <= len(options) or not (options or question.freeform):
                return Done(failed("ValueError", "A question has a text, and options that differ."))
            request = self._request(request_id, place, question)
            asked = NewEvent(
                type=EventType.INPUT_REQUESTED,
                key=names.session_key(f"run/input/{place.position}"),
                data=requested((request,)),
            )
            begun = body.begin("ask", request_id=request_id)
            await body.commit(place, begun=begun, events=(asked,), inputs=InputChanges(opens=(request,)))
        row = await self.store.input(request_id)
        if row is None or row.status == "open":
            return Wait(f"an answer ({request_id})")
        answer = row.answer
        if row.status != "answered" or answer is None:
            return Done(failed("InputClosed", f"The question was {row.status}."))
        return Done(
            Settled(status="completed", value=answer.option_id if answer.option_id is not None else answer.text)
        )

    def _request(self, request_id: str, place: Place, question: Question) -> InputRequest:
        text, options, freeform = whole(question.text), question.options, question.freeform
        arguments: JsonObject = {"prompt": text, "options": list(options), "allowFreeform": freeform}
        return InputRequest(
            request_id=request_id,
            session_id=self.row.session_id,
            agent=self.row.agent,
            turn=0,
            step=place.position,
            call_id=f"call_{place.position}",
            tool=ASK,
            kind="question",
            prompt=text,
            input=arguments,
            digest=digest(arguments),
            display="select" if options else "text",
            allow_freeform=freeform,
            responders=question.responders,
            options=tuple(Option(id=whole(each), label=whole(each)) for each in options),
        )


def _digest_of(run_id: str, place: Place, what: str) -> bytes:
    return hashlib.sha256(f"perdure/run/{what}/{run_id}/{place.position}".encode()).digest()


def _ulid_of(run_id: str, place: Place, what: str) -> str:
    return names.as_ulid(_digest_of(run_id, place, what))
