"""What a session waits for, in a sentence."""

from collections.abc import Sequence

from perdure.protocol.inputs import InputRequest, Responders
from perdure.store.values import InputRow, SessionRow
from perdure.text import shortened

_SHOWN = 80


def waiting_for(row: SessionRow, waiting: Sequence[InputRow] = (), queued: int = 0) -> str | None:
    """Why the session does nothing right now; None when it does something, or never will again.

    `queued`: how many deliveries no turn has read yet.
    """
    if row.attention is not None:
        return f"A worker or an operator that can help: {row.attention['message']}"
    match row.status:
        case "waiting" if waiting:
            return _people(waiting)
        case "starting" | "waiting" if queued and row.untold:
            return f"Temporal, which could not be reached: {_deliveries(queued)} accepted and told to it later."
        case "starting":
            return "A worker that takes up its first turn."
        case "waiting" if queued:
            return f"A worker that takes up its next turn: {_deliveries(queued)} queued."
        case "waiting":
            return "The next message."
        case "running" | "completed" | "failed":
            return None


def _deliveries(count: int) -> str:
    return "1 delivery is" if count == 1 else f"{count} deliveries are"


def _people(waiting: Sequence[InputRow]) -> str:
    """The oldest request in full; of the others, how many there are."""
    first, *others = waiting
    request = first.request
    until = f", until {request.expires_at} (then: {request.on_expiry})" if request.expires_at else ""
    more = f" And {len(others)} more." if others else ""
    return f"{_what(request)} by {_whom(request.responders)}, since {first.opened_at}{until}.{more}"


def _what(request: InputRequest) -> str:
    if request.kind == "approval":
        return f"Approval of `{request.tool}` ({request.request_id})"
    question = shortened(" ".join(request.prompt.split()), _SHOWN)
    return f"An answer to “{question}” ({request.request_id})"


def _whom(responders: Responders) -> str:
    named = " or ".join(responders.values)
    match responders.kind:
        case "requester":
            who = "the requester"
        case "anyone":
            who = "anyone"
        case "principals":
            who = named
        case "attribute":
            who = f"whoever has {responders.attribute} {named}"
    return who if responders.quorum == 1 else f"{responders.quorum} of: {who}"
