"""Whether a call runs, waits for people or is refused; and how their answers are applied.

A call is refused if this cannot be decided.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from perdure.agents.approval import OPEN, Approval, ApprovalPolicy, Call, Decision, result_of
from perdure.agents.context import Log, SessionView, tool_log
from perdure.agents.signature import Arguments
from perdure.bounds import described
from perdure.errors import UnreadableState
from perdure.protocol.inputs import APPROVE, DENY, InputAnswer, InputRequest, Option, digest
from perdure.protocol.requests import Coordinates, Failure
from perdure.protocol.wire import JsonObject
from perdure.session.inputs import CONTINUED
from perdure.session.state import Chain
from perdure.store.base import Store
from perdure.store.engine.rows import stamp_of
from perdure.store.inputs import InputRow
from perdure.store.values import SlotWrite

from . import builtin, outcomes
from .builtin import Question
from .records import Ask, Outcome

Clock: TypeAlias = Callable[[], float]

REMEMBERED = Chain("slot of remembered approvals")
#: The slot of approvals that are valid for the rest of the session. No author's state can have this name.
REMEMBERED_APPROVALS = "perdure.approvals"

#: The name under which people are asked to extend a budget, and the option that extends it. No call of it runs.
EXTEND_BUDGET = "extend_budget"
EXTEND = "extend"

_OPTIONS = (Option(id=APPROVE, label="Yes"), Option(id=DENY, label="No"))
_UNAVAILABLE = "This call needs an approval, and nobody can be asked in this session; it was not executed."


@dataclass(frozen=True)
class Approvals:
    """Decides which calls of one step need an approval."""

    at: Coordinates
    view: SessionView
    #: Whether people can be asked at all.
    can_ask: bool
    remembered: frozenset[str]
    clock: Clock = time.time

    async def approval(self, call: Call, arguments: Arguments, policy: ApprovalPolicy) -> Ask | Outcome | None:
        """The input request of the call, or the outcome of a refused one; None: it runs.

        The author's functions get the arguments as Python values, as the tool will; people see them as JSON.
        """
        try:
            typed = replace(call, arguments=arguments.values())
            key = await remembered_key(call.tool, policy, typed.arguments)
            decision = await self._decide(typed, policy.approval, key)
            # Inside `try`: the request is built from values of the author's functions, which may be invalid.
            asks = decision.kind == "ask"
            request = await self._approval_request(call, policy, decision, typed.arguments, key) if asks else None
        except Exception as error:
            log_of(self.at, call.tool, call.id).exception("whether this call needs an approval could not be decided")
            problem = f"Whether this call needs an approval could not be decided ({described(error)})"
            return outcomes.failed(f"{problem}; it was not executed.", outcomes.APPROVAL_UNAVAILABLE, "rejected")
        if request is None:
            return outcomes.denied(decision.reason) if decision.kind == "deny" else None
        return request if self.can_ask else outcomes.failed(_UNAVAILABLE, outcomes.APPROVAL_UNAVAILABLE, "rejected")

    async def _approval_request(
        self, call: Call, policy: ApprovalPolicy, decision: Decision, values: JsonObject, key: str | None
    ) -> Ask:
        summary = await result_of(policy.summary, values) if policy.summary else None
        # Clients that know only the contract show nothing but the prompt.
        prompt = decision.prompt or summary or f"Approve tool call: {call.tool}"
        shown = {"prompt": prompt, "summary": summary, "display": "confirmation", "options": _OPTIONS}
        return self._ask(call, policy, "approval", {**shown, "remember": key})

    def question(self, call: Call, question: Question) -> Ask:
        return self._ask(call, OPEN, "question", question.shown)

    async def _decide(self, call: Call, approval: Approval, key: str | None) -> Decision:
        if not callable(approval):
            asks = approval == "always" or (approval == "once" and key not in self.remembered)
            return Decision("ask" if asks else "allow")
        result: Any = await result_of(approval, call, self.view)
        if isinstance(result, bool):
            return Decision("ask" if result else "allow")
        if not isinstance(result, Decision) or result.kind not in ("allow", "ask", "deny"):
            raise TypeError(f"the approval function returned {result!r}, neither a bool nor a Decision")
        return result

    def _ask(self, call: Call, policy: ApprovalPolicy, kind: str, shown: Mapping[str, Any]) -> Ask:
        now = self.clock()
        expires_at = None if policy.expires is None else now + policy.expires
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
            "responders": policy.responders,
            "expires_at": None if expires_at is None else stamp_of(expires_at),
            "on_expiry": policy.on_expiry,
        }
        request = InputRequest.model_validate(values)
        return Ask(request=request, expires_at=expires_at, remind_at=tuple(now + each for each in policy.remind))


def request_id(at: Coordinates, call_id: str) -> str:
    """An id that is the same for every attempt at one step, so that a request is opened once."""
    place = f"{at.session_id}/{at.turn}/{at.step}/{call_id}"
    return "inp_" + hashlib.sha256(b"perdure/input/" + place.encode()).hexdigest()[:32]


async def remembered(store: Store, session_id: str) -> tuple[frozenset[str], int]:
    """The keys of remembered approvals, and the version of their slot."""
    slot = (await store.slots(session_id, [REMEMBERED_APPROVALS])).get(REMEMBERED_APPROVALS)
    return (read_remembered(slot.value), slot.version) if slot else (frozenset(), 0)


def read_remembered(stored: JsonObject | None) -> frozenset[str]:
    """The keys in the slot; a restore to before its first write leaves it empty."""
    if stored is None:
        return frozenset()
    keys: Any = REMEMBERED.lift(stored.get("version", 1), stored).get("keys")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in cast("list[Any]", keys)):
        raise UnreadableState("The remembered approvals cannot be read.")
    return frozenset(cast("list[str]", keys))


async def remember_keys(store: Store, session_id: str, keys: Sequence[str]) -> tuple[SlotWrite, ...]:
    """The write that adds these keys to the remembered approvals."""
    if not keys:
        return ()
    known, version = await remembered(store, session_id)
    value: JsonObject = {"keys": sorted(known.union(keys))}
    return (SlotWrite(REMEMBERED_APPROVALS, value, version),)


async def remembered_key(tool: str, policy: ApprovalPolicy, arguments: JsonObject) -> str | None:
    """The key under which an approval of a call with these arguments (as values) is remembered."""
    if policy.approval != "once":
        return None
    if policy.key is None:
        return tool
    key: Any = await result_of(policy.key, arguments)
    # The text of many objects is their address in memory. A later object at the same address would count as approved.
    if not isinstance(key, str):
        raise TypeError(f"the approval_key returned an object of the type {type(key).__name__}, not text")
    return f"{tool}/{key}"


def log_of(at: Coordinates, tool: str, call_id: str) -> Log:
    return tool_log(tool, session_id=at.session_id, turn=at.turn, step=at.step, call_id=call_id)


MISMATCH = "TOOL_APPROVAL_MISMATCH"
WITHDRAWN = "The request was withdrawn before anybody answered; the call was not executed."
_CHANGED = "These are not the arguments that were approved; the call was not executed."
_UNASKED = "Nobody has approved this call; it was not executed."


def outcome_without_run(row: InputRow) -> Outcome | None:
    """The outcome of a closed request whose call does not run; None: the call may run."""
    if row.request.kind == "question":
        answer = row.answer
        is_answered = row.status == "answered" and answer and (answer.option_id is not None or answer.text is not None)
        return builtin.answered(answer) if answer and is_answered else builtin.ignored()
    if row.status == "withdrawn" or row.answer is None:
        return outcomes.failed(WITHDRAWN, outcomes.DENIED, "rejected")
    if not row.answer.approves:
        return (
            outcomes.ignored()
            if row.answer.reason == CONTINUED
            else outcomes.denied(row.answer.reason or row.answer.text)
        )
    return _mismatch(row.request, row.answer, arguments_of(row.request, row.answer))


def approval_problem(row: InputRow | None, arguments: JsonObject) -> Outcome | None:
    """The outcome if a call that needed an approval must not run with these arguments; None: it may run."""
    if row is None or row.answer is None or row.status not in ("answered", "expired") or not row.answer.approves:
        return outcomes.failed(_UNASKED, outcomes.DENIED, "rejected")
    return _mismatch(row.request, row.answer, arguments)


def arguments_of(request: InputRequest, answer: InputAnswer | None) -> JsonObject:
    """The approved arguments: those of the model, or those that the approver has changed."""
    return request.input if answer is None or answer.arguments is None else answer.arguments


def expiry_failure(row: InputRow) -> Failure | None:
    """The failure of the turn, if the request has expired and its tool declares that the turn then fails."""
    if row.status != "expired" or row.request.on_expiry != "fail":
        return None
    return Failure(
        code="INPUT_EXPIRED",
        message=f"Nobody has answered in time: {row.request.prompt}",
        details={"requestId": row.request.request_id, "callId": row.request.call_id, "toolName": row.request.tool},
    )


def extension_refused(row: InputRow) -> Failure | None:
    """The failure of the turn, if people were asked to extend a budget and have not."""
    request, answer = row.request, row.answer
    if request.kind != "question" or request.tool != EXTEND_BUDGET or row.status == "open":
        return None
    if answer is not None and answer.option_id == EXTEND:
        return None
    details = {name: value for name, value in request.input.items() if name != "code"}
    return Failure(code=request.input["code"], message="The budget was not extended.", details=details)


def _mismatch(request: InputRequest, answer: InputAnswer, arguments: JsonObject) -> Outcome | None:
    # Changed arguments are approved by their own digest; unchanged ones by that of the request.
    approved = request.digest if answer.arguments is None else answer.digest
    if digest(arguments) == approved:
        return None
    return outcomes.failed(_CHANGED, MISMATCH, "rejected")
