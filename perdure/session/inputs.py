"""What answers come to. Pure."""

from collections.abc import Sequence

from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent, step_coordinates
from perdure.protocol.inputs import DENY, InputAnswer, InputRequest, InputStatus, Responders
from perdure.protocol.principals import Principal


def verdict(request: InputRequest, votes: Sequence[InputAnswer]) -> InputAnswer | None:
    """The answer that counts, or None while more people must agree. One denial is enough to deny."""
    for vote in votes:
        if request.kind == "approval" and not vote.approves:
            return vote
    agreed = _largest_agreement(votes)
    return agreed[-1] if len(agreed) >= request.responders.quorum else None


def _largest_agreement(votes: Sequence[InputAnswer]) -> Sequence[InputAnswer]:
    """The votes that say the same, of the saying that most principals share. Each principal has one vote."""
    camps: list[list[InputAnswer]] = []
    for index, vote in enumerate(votes):
        if any(vote.same_principal(earlier) for earlier in votes[:index]):
            continue
        camp = next((camp for camp in camps if camp[0].same(vote)), None)
        if camp is None:
            camps.append([vote])
        else:
            camp.append(vote)
    return max(camps, key=len) if camps else ()


def may_answer(responders: Responders, principal: Principal, requester: Principal) -> bool:
    """Whether this principal's answer counts."""
    match responders.kind:
        case "requester":
            return principal.owner == requester.owner
        case "anyone":
            return True
        case "principals":
            # Values without an authenticator were declared to an older build, which asked under that rule.
            return any(
                value == (principal.address if ":" in value else principal.principal_id) for value in responders.values
            )
        case "attribute":
            held = principal.attributes.get(responders.attribute or "", ())
            values = (held,) if isinstance(held, str) else tuple(held)
            return any(value in responders.values for value in values)


def at_expiry(request: InputRequest) -> InputAnswer:
    """What silence means."""
    option = "approve" if request.on_expiry == "approve" else DENY
    return InputAnswer(option_id=option if request.kind == "approval" else None, reason="expired")


def resolved(request: InputRequest, status: InputStatus, answer: InputAnswer | None) -> NewEvent:
    """What readers are told when a request is closed, whoever closes it. A request is closed once."""
    told = {
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
        data={**told, **step_coordinates(request.turn, request.step)},
        turn=request.turn,
        step=request.step,
    )
