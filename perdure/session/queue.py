"""What the mode of a message makes of it while its session is busy, and the order of what waits."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from perdure.bounds import shortened
from perdure.errors import Invalid
from perdure.protocol.deliveries import QUEUE_MODES, DeliveryRef, QueueMode
from perdure.protocol.wire import JsonObject, Wire

from .state import SessionState

#: Names that mean another mode.
_ALIASES: dict[str, QueueMode] = {"steer_backlog": "followup"}

#: A turn begins with collected messages this many seconds after the newest one,
_PAUSE = 1.0
#: this many after the first one,
_LONGEST = 5.0
#: or when there are this many, whichever comes first.
_MOST = 50


#: The heading of a summary of messages, the field of a stored body that has its lines, and its bounds: the
#: newest so many, so many characters of each, and where those are looked for.
_SUMMARY_HEADING = "Before this message others came, for which there was no room. This is how each of them began:"
_SUMMARY = "summaryOf"
_SUMMARY_LINES = 50
_SUMMARY_LINE = 200
_SUMMARY_SEARCH = 2_000


def read_mode(name: object) -> QueueMode | None:
    """The mode with this name or alias; None if there is none."""
    alias = _ALIASES.get(name) if isinstance(name, str) else None
    return alias or next((mode for mode in QUEUE_MODES if mode == name), None)


def checked_mode(mode: QueueMode | None) -> QueueMode | None:
    """The mode of a message, by its name or its alias."""
    known = read_mode(mode)
    if mode is not None and known is None:
        raise Invalid(f"The mode of a message is one of {', '.join(QUEUE_MODES)}.")
    return known


def same_request(mode: QueueMode | None) -> tuple[str, ...]:
    """What the mode adds to the identity of a request. Without one it is that of a `followup`."""
    return () if mode is None or mode == "followup" else (mode,)


def is_collected(delivery: DeliveryRef) -> bool:
    """Whether the message joins others of its kind."""
    return delivery.kind == "message" and delivery.coalesce


def collecting(session: SessionState, now: float) -> SessionState:
    """The state after a message has arrived that is collected: it prolongs the wait for more. It is in the inbox."""
    known = session.collecting
    others_wait = sum(map(is_collected, session.inbox)) > 1
    # If no other waits, what is known is of messages that a turn has read since.
    first = known[0] if known and others_wait else now
    return session.model_copy(update={"collecting": (first, now)})


def collected(session: SessionState, inbox: Sequence[DeliveryRef]) -> tuple[DeliveryRef, ...]:
    """The first message that waits, and those that are read together with it, wherever they wait."""
    if session.collecting is None or not is_collected(inbox[0]):
        # A run that began before messages were waited for joins those that follow one another.
        size = next((place for place, each in enumerate(inbox) if not each.coalesce), len(inbox))
        return tuple(inbox[:size])
    return tuple(filter(is_collected, inbox))[:_MOST]


def collected_at(session: SessionState, batch: Sequence[DeliveryRef]) -> float | None:
    """When a turn may begin with these messages; None: at once. A cancel is for the turn that they are to begin."""
    known = session.collecting
    if known is None or session.open or session.cancel is not None or len(batch) >= _MOST:
        return None
    if not any(map(is_collected, batch)):
        return None
    first, newest = known
    return min(first + _LONGEST, newest + _PAUSE)


class _Meant(Wire):
    """What a cancel says of a turn that had not begun: when the newest delivery was accepted that might begin it."""

    until: str | None = None


def is_of_earlier(cancel: object, deliveries: Sequence[DeliveryRef]) -> bool:
    """Whether the cancel meant a turn with this number that others were to begin, which are gone."""
    try:
        until = _Meant.model_validate(cancel).until
    except ValidationError:
        return False
    if until is None or not deliveries:
        return False
    return all(each.at is not None and each.at > until for each in deliveries)


def joined(session: SessionState, ids: Sequence[str]) -> SessionState:
    """The state without the messages that have entered a turn while it ran: they wait no more."""
    kept = tuple(each for each in session.inbox if each.id not in ids)
    return session.model_copy(update={"inbox": kept})


def superseded(session: SessionState, message: DeliveryRef, *, in_turn: bool) -> SessionState:
    """The state after a message has arrived that interrupts, as the store has it: `in_turn`, if a turn runs.

    A task keeps what waits. And a cancel request that meant the turn of what is settled now has nothing to stop.
    """
    if session.mode == "task":
        return session
    kept = without_superseded(session, message)
    began = in_turn or session.open or session.held is not None or session.awaited is not None
    is_met = session.cancel == "next" or (session.cancel == "this" and not began)
    return kept.cancelled(None) if is_met and len(kept.inbox) == 1 < len(session.inbox) else kept


def without_superseded(session: SessionState, message: DeliveryRef) -> SessionState:
    """The state without what was accepted before a message that interrupts."""
    until = message.supersedes
    if until is None:
        return session
    kept = tuple(each for each in session.inbox if not _is_superseded(each, message, until))
    return session.model_copy(update={"inbox": kept})


def _is_superseded(waiting: DeliveryRef, message: DeliveryRef, until: str) -> bool:
    """`until`: when the newest message was accepted that the store has settled for this one."""
    if waiting.id == message.id or waiting.kind != "message" or waiting.lane != message.lane:
        return False
    return waiting.at is not None and waiting.at <= until


def summary_of(body: JsonObject) -> JsonObject:
    """How a message began which makes room for others, and those began of which it tells; its body is as stored."""
    known = body.get(_SUMMARY, {"count": 0, "lines": []})
    return {"count": known["count"] + 1, "lines": [*known["lines"], _beginning(body.get("message"))]}


def with_summary_of(body: JsonObject, earlier: Sequence[JsonObject]) -> JsonObject:
    """The body of a message that tells of earlier ones, of which these are the summaries.

    A message that tells of others already goes on with that. Its own words stay as they are.
    """
    told = [*earlier, *([body[_SUMMARY]] if _SUMMARY in body else [])]
    count = sum(each["count"] for each in told)
    lines = [line for each in told for line in each["lines"]][-_SUMMARY_LINES:]
    left_out = [f"({count - len(lines)} earlier ones are left out.)"] if count > len(lines) else []
    text = "\n".join((_SUMMARY_HEADING, *left_out, *(f"- {line}" for line in lines)))
    # The text is in the context, which older workers show, too.
    own = body.get("clientContext", [])[1 if _SUMMARY in body else 0 :]
    return {**body, "clientContext": [text, *own], _SUMMARY: {"count": count, "lines": lines}}


def _beginning(message: Any) -> str:
    """The first line of a message, in one line of bounded length; a file by its name."""
    parts: list[JsonObject] = [{"text": message}] if isinstance(message, str) else message or []
    for part in parts:
        text: str = part.get("text") or f"[file: {part.get('filename') or part.get('mediaType')}]"
        if first := text[:_SUMMARY_SEARCH].strip():
            return shortened(first.splitlines()[0], _SUMMARY_LINE)
    return "[nothing]"


def between(low: str, high: str | None) -> str:
    """A key that sorts after `low` and before `high`, so that one message moves and no other is written.

    `low` may be empty: nothing comes before it. `high` None: nothing comes after it.
    Keys are time stamps, and what this has made of them: after `…16Z` and before `…17Z` is `…16Z5`, after that and
    before `…16Z6` is `…16Z55`. They differ in digits only, and none ends in 0, before which nothing would sort.
    """
    if high is None or not high.startswith(low):
        return f"{low}5"
    rest = high.removeprefix(low)
    zeros = rest[: len(rest) - len(rest.lstrip("0"))]
    first = int(rest[len(zeros)])
    return f"{low}{zeros}{first // 2}" if first > 1 else f"{low}{zeros}05"
