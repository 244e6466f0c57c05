"""Whether a call runs, waits for people, or is refused; and what their answers make of it.

What cannot be decided is refused.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias

from perdure.agents.approval import OPEN, Approval, ApprovalPolicy, Call, Decision, result_of
from perdure.agents.context import Log, SessionView, tool_log
from perdure.agents.signature import Arguments
from perdure.harness.journal import Ask, Outcome
from perdure.protocol.inputs import APPROVE, DENY, InputAnswer, InputRequest, Option, digest
from perdure.protocol.requests import Coordinates, Failure
from perdure.protocol.wire import JsonObject
from perdure.session.inputs import CONTINUED
from perdure.store.base import Store
from perdure.store.values import InputRow, SlotWrite
from perdure.text import described

from . import builtin, outcomes
from .builtin import Question

Clock: TypeAlias = Callable[[], float]

#: What was approved for the rest of the session. No author's state can have this name.
REMEMBERED_APPROVALS = "perdure.approvals"

_OPTIONS = (Option(id=APPROVE, label="Yes"), Option(id=DENY, label="No"))
_UNAVAILABLE = "This call needs an approval, and nobody can be asked in this session; it was not executed."


@dataclass(frozen=True)
class Approvals:
    """Decides about the calls of one step."""

    at: Coordinates
    view: SessionView
    #: Whether people can be asked at all.
    can_ask: bool
    remembered: frozenset[str]
    clock: Clock = time.time

    async def approval(self, call: Call, arguments: Arguments, gate: ApprovalPolicy) -> Ask | Outcome | None:
        """What the call waits for, or why it is refused; None: it runs.

        The author's functions see the arguments that will run, as values; people see the same as JSON.
        """
        try:
            typed = replace(call, arguments=arguments.values())
            key = await remembered_key(call.tool, gate, typed.arguments)
            decision = await self._decided(typed, gate.approval, key)
            # Also when it cannot be written down: the request is made of what the author's functions say.
            asks = decision.kind == "ask"
            asked = await self._asked(call, gate, decision, typed.arguments, key) if asks else None
        except Exception as error:
            log_of(self.at, call.tool, call.id).exception("whether this call needs an approval could not be decided")
            problem = f"Whether this call needs an approval could not be decided ({described(error)})"
            return outcomes.failed(f"{problem}; it was not executed.", outcomes.REJECTED, "rejected")
        if asked is None:
            return outcomes.denied(decision.reason) if decision.kind == "deny" else None
        return asked if self.can_ask else outcomes.failed(_UNAVAILABLE, outcomes.REJECTED, "rejected")

    async def _asked(
        self, call: Call, gate: ApprovalPolicy, decision: Decision, values: JsonObject, key: str | None
    ) -> Ask:
        summary = await result_of(gate.summary, values) if gate.summary else None
        # Clients that know the contract alone show the prompt and nothing else.
        prompt = decision.prompt or summary or f"Approve tool call: {call.tool}"
        shown = {"prompt": prompt, "summary": summary, "display": "confirmation", "options": _OPTIONS}
        return self._ask(call, gate, "approval", {**shown, "remember": key})

    def question(self, call: Call, question: Question) -> Ask:
        return self._ask(call, OPEN, "question", question.shown)

    async def _decided(self, call: Call, approval: Approval, key: str | None) -> Decision:
        if not callable(approval):
            asks = approval == "always" or (approval == "once" and key not in self.remembered)
            return Decision("ask" if asks else "allow")
        said: Any = await result_of(approval, call, self.view)
        if isinstance(said, bool):
            return Decision("ask" if said else "allow")
        if not isinstance(said, Decision) or said.kind not in ("allow", "ask", "deny"):
            raise TypeError(f"the approval function returned {said!r}, neither a bool nor a Decision")
        return said

    def _ask(self, call: Call, gate: ApprovalPolicy, kind: str, shown: Mapping[str, Any]) -> Ask:
        now = self.clock()
        expires_at = None if gate.expires is None else now + gate.expires
        values: dict[str, Any] = {
            **shown,
            "request_id": request_id(self.at, call.id),
            "session_id": self.at.session_id,
            "agent": self.view.agent,
            "turn": self.at.turn,
            "step": self.at.step,
            "call_id": call.id,
            "tool": call.tool,
            "kind": kind,
            "input": call.arguments,
            "digest": digest(call.arguments),
            "responders": gate.responders,
            "expires_at": None if expires_at is None else _stamp(expires_at),
            "on_expiry": gate.on_expiry,
        }
        request = InputRequest.model_validate(values)
        return Ask(request=request, expires_at=expires_at, remind_at=tuple(now + each for each in gate.remind))


def request_id(at: Coordinates, call_id: str) -> str:
    """The same for every attempt at one step, so that asking twice is asking once."""
    place = f"{at.session_id}/{at.turn}/{at.step}/{call_id}"
    return "inp_" + hashlib.sha256(b"perdure/input/" + place.encode()).hexdigest()[:32]


async def remembered(store: Store, session_id: str) -> tuple[frozenset[str], int]:
    """What was approved for the rest of the session, and the version of that."""
    slot = (await store.slots(session_id, [REMEMBERED_APPROVALS])).get(REMEMBERED_APPROVALS)
    return (frozenset(slot.value["keys"]), slot.version) if slot else (frozenset(), 0)


async def remembering(store: Store, session_id: str, keys: Sequence[str]) -> tuple[SlotWrite, ...]:
    """The write by which these keys are remembered beside the others."""
    if not keys:
        return ()
    known, version = await remembered(store, session_id)
    value: JsonObject = {"keys": sorted(known.union(keys))}
    return (SlotWrite(REMEMBERED_APPROVALS, value, version),)


async def remembered_key(tool: str, gate: ApprovalPolicy, arguments: JsonObject) -> str | None:
    """What an approval of a call with these arguments (as values) is remembered under."""
    if gate.approval != "once":
        return None
    if gate.key is None:
        return tool
    key: Any = await result_of(gate.key, arguments)
    # As text, many objects are their address in memory: another one there later would count as approved.
    if not isinstance(key, str):
        raise TypeError(f"the approval_key returned an object of the type {type(key).__name__}, not text")
    return f"{tool}/{key}"


def log_of(at: Coordinates, tool: str, call_id: str) -> Log:
    return tool_log(tool, session_id=at.session_id, turn=at.turn, step=at.step, call_id=call_id)


def _stamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


MISMATCH = "TOOL_APPROVAL_MISMATCH"
WITHDRAWN = "The request was withdrawn before anybody answered; the call was not executed."
_CHANGED = "These are not the arguments that were approved; the call was not executed."
_UNASKED = "Nobody has approved this call; it was not executed."


def without_run(row: InputRow) -> Outcome | None:
    """What a closed request comes to when its call is not run; None: it may run."""
    if row.request.kind == "question":
        answer = row.answer
        says = row.status == "answered" and answer and (answer.option_id is not None or answer.text is not None)
        return builtin.answered(answer) if answer and says else builtin.ignored()
    if row.status == "withdrawn" or row.answer is None:
        return outcomes.failed(WITHDRAWN, outcomes.DENIED, "rejected")
    if not row.answer.approves:
        return (
            outcomes.ignored()
            if row.answer.reason == CONTINUED
            else outcomes.denied(row.answer.reason or row.answer.text)
        )
    return _mismatch(row.request, row.answer, arguments_of(row.request, row.answer))


def guarded(row: InputRow | None, arguments: JsonObject) -> Outcome | None:
    """Why a call that had to be approved must not run with these arguments; None: it may."""
    if row is None or row.answer is None or row.status not in ("answered", "expired") or not row.answer.approves:
        return outcomes.failed(_UNASKED, outcomes.DENIED, "rejected")
    return _mismatch(row.request, row.answer, arguments)


def arguments_of(request: InputRequest, answer: InputAnswer | None) -> JsonObject:
    """The arguments that were approved: the model's, or what the approver made of them."""
    return request.input if answer is None or answer.arguments is None else answer.arguments


def failing(row: InputRow) -> Failure | None:
    """What the turn fails with because nobody has answered, if that was declared."""
    if row.status != "expired" or row.request.on_expiry != "fail":
        return None
    return Failure(
        code="INPUT_EXPIRED",
        message=f"Nobody has answered in time: {row.request.prompt}",
        details={"requestId": row.request.request_id, "callId": row.request.call_id, "toolName": row.request.tool},
    )


def _mismatch(request: InputRequest, answer: InputAnswer, arguments: JsonObject) -> Outcome | None:
    # Changed arguments are approved by their own digest; unchanged ones by that of the request.
    approved = request.digest if answer.arguments is None else answer.digest
    if digest(arguments) == approved:
        return None
    return outcomes.failed(_CHANGED, MISMATCH, "rejected")
