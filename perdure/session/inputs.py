"""The rules for answers to input requests. Pure."""

from collections.abc import Sequence
from datetime import datetime

from perdure.errors import Invalid, UnreadableState
from perdure.protocol import names
from perdure.protocol.deliveries import FilePart, InputResponse, Message, Principal
from perdure.protocol.events import EventType, NewEvent, step_coordinates
from perdure.protocol.inputs import APPROVE, DENY, InputAnswer, InputRequest, InputStatus, Option, Responders, digest

from .state import Chain

REQUEST = Chain("input request")
ANSWER = Chain("answer to an input request")


def is_newer(request: InputRequest, *answers: InputAnswer | None) -> bool:
    """Whether only a newer build can read all of this."""
    return request.version > REQUEST.version or any(each.version > ANSWER.version for each in answers if each)


def refuse_newer(request: InputRequest, answer: InputAnswer | None) -> None:
    """Raise `UnreadableState` if only a newer build knows what was asked or answered: no call may run because of it."""
    if is_newer(request, answer):
        known = f"this code reads versions up to {REQUEST.version} and {ANSWER.version}"
        raise UnreadableState(f"An input request or its answer is of a newer version; {known}.")


def verdict(request: InputRequest, votes: Sequence[InputAnswer]) -> InputAnswer | None:
    """The answer that closes the request, or None while the quorum is not reached. One denial is enough to deny."""
    for vote in votes:
        if request.kind == "approval" and not vote.approves:
            return vote
    agreed = _largest_agreement(votes)
    return agreed[-1] if len(agreed) >= request.responders.quorum else None


def _largest_agreement(votes: Sequence[InputAnswer]) -> Sequence[InputAnswer]:
    """The largest group of equal votes. Each principal has one vote."""
    groups: list[list[InputAnswer]] = []
    for index, vote in enumerate(votes):
        if any(vote.same_principal(earlier) for earlier in votes[:index]):
            continue
        group = next((group for group in groups if group[0].same(vote)), None)
        if group is None:
            groups.append([vote])
        else:
            group.append(vote)
    return max(groups, key=len) if groups else ()


def may_answer(responders: Responders, principal: Principal, requester: Principal) -> bool:
    """Whether this principal's answer counts."""
    match responders.kind:
        case "requester":
            return principal.owner == requester.owner
        case "anyone":
            return True
        case "principals":
            # Older builds compared the principal's id alone: values without an authenticator keep that rule.
            return any(
                value == (principal.address if ":" in value else principal.principal_id) for value in responders.values
            )
        case "attribute":
            held = principal.attributes.get(responders.attribute or "", ())
            values = (held,) if isinstance(held, str) else tuple(held)
            return any(value in responders.values for value in values)


def at_expiry(request: InputRequest) -> InputAnswer:
    """The answer that an expired request gets."""
    option = "approve" if request.on_expiry == "approve" else DENY
    return InputAnswer(option_id=option if request.kind == "approval" else None, reason="expired")


def resolved(request: InputRequest, status: InputStatus, answer: InputAnswer | None) -> NewEvent:
    """The event of a closed request. The key is the same for each way to close it: a request is closed once."""
    data = {
        "requestId": request.request_id,
        "callId": request.call_id,
        "toolName": request.tool,
        "kind": request.kind,
        "status": status,
        **({"answer": answer.wire()} if answer else {}),
    }
    return NewEvent(
        type=EventType.INPUT_RESOLVED,
        key=names.session_key(f"input/{request.request_id}/resolved"),
        data={**data, **step_coordinates(request.turn, request.step)},
        turn=request.turn,
        step=request.step,
    )


#: Why a request is closed by a message that does not answer it.
CONTINUED = "The user continued without responding."


def read(request: InputRequest, response: InputResponse, principal: Principal, at: str) -> InputAnswer:
    """The response as an answer to this request; raises `Invalid` if it does not fit."""
    return (
        _approval(request, response, principal, at)
        if request.kind == "approval"
        else _reply(request, response, principal, at)
    )


def read_message(request: InputRequest, message: Message) -> InputResponse | None:
    """The response that a plain message gives: it names one option, or it is the text that was asked for."""
    text = _plain_text(message)
    if text is None:
        return None
    option = option_named(request.options, text)
    if option is not None:
        return InputResponse(request_id=request.request_id, option_id=option.id)
    if request.kind == "question" and (request.allow_freeform or not request.options):
        return InputResponse(request_id=request.request_id, text=text)
    return None


def continued(request: InputRequest, principal: Principal, at: str) -> InputAnswer:
    """The answer that a request gets when the user sends a message that does not answer it."""
    option = DENY if request.kind == "approval" else None
    return InputAnswer(
        option_id=option, reason=CONTINUED, principal_id=principal.principal_id, owner=principal.owner, at=at
    )


def option_named(options: Sequence[Option], text: str) -> Option | None:
    """The one option that the text names: by id, else by label, else by its number from 1."""
    wanted = text.strip().casefold()
    by_id = [option for option in options if option.id.strip().casefold() == wanted]
    by_label = [option for option in options if option.label.strip().casefold() == wanted]
    by_number = [option for number, option in enumerate(options, 1) if str(number) == wanted]
    found = by_id or by_label or by_number
    return found[0] if len(found) == 1 else None


def is_late(request: InputRequest, now: datetime) -> bool:
    """Whether the request has expired, even if its driver has not closed it yet."""
    return request.expires_at is not None and datetime.fromisoformat(request.expires_at) <= now


def _approval(request: InputRequest, response: InputResponse, principal: Principal, at: str) -> InputAnswer:
    approves = response.option_id == APPROVE
    if response.arguments is not None and not approves:
        raise Invalid("Expected 'arguments' with an approval only.")
    # An approval is bound to the digest of the arguments, changed or not: only what was approved may run.
    approved = request.digest if response.arguments is None else digest(response.arguments)
    changed = response.arguments if approved != request.digest else None
    return InputAnswer(
        option_id=APPROVE if approves else DENY,
        arguments=changed,
        digest=approved if approves else None,
        reason=response.reason or response.text,
        principal_id=principal.principal_id,
        owner=principal.owner,
        at=at,
    )


def _reply(request: InputRequest, response: InputResponse, principal: Principal, at: str) -> InputAnswer:
    if response.arguments is not None:
        raise Invalid("Expected 'arguments' with an approval only.")
    option_id, text = response.option_id, response.text
    if option_id is not None and option_id not in {option.id for option in request.options}:
        listed = ", ".join(repr(option.id) for option in request.options) or "none"
        raise Invalid(f"Request {request.request_id} has no such option; it has {listed}.")
    if option_id is None and text is None:
        raise Invalid(f"Expected an 'optionId' or a 'text' for request {request.request_id}.")
    option = None if option_id is not None or text is None else option_named(request.options, text)
    if option is not None:
        option_id, text = option.id, None
    return InputAnswer(
        option_id=option_id,
        text=text,
        reason=response.reason,
        principal_id=principal.principal_id,
        owner=principal.owner,
        at=at,
    )


def _plain_text(message: Message) -> str | None:
    """The message as text; None if it has other parts."""
    if isinstance(message, str):
        return message
    texts = [part.text for part in message if not isinstance(part, FilePart)]
    return "\n".join(texts) if len(texts) == len(message) else None
