"""The journal of a turn as Flue names it: how far each step has come, and who has brought it there.

It is derived from records, events and attempts each time. The records decide how a step goes on, and not this.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from perdure.errors import NotFound
from perdure.protocol import names
from perdure.protocol.events import PIECES, Event, EventType
from perdure.protocol.wire import JsonObject
from perdure.store.attempts import AttemptQuery, AttemptRow
from perdure.store.base import Store
from perdure.store.values import EventQuery, Record, SessionRow

if TYPE_CHECKING:
    from perdure.harness.journal import TurnJournal

#: `before_provider`: the step has begun, and nothing of a reply has come; `provider_started`: pieces of a reply are
#: stored; `tool_request_recorded`: the reply is, and not all of its calls have ended; `committed`: the step is over.
Phase: TypeAlias = Literal["before_provider", "provider_started", "tool_request_recorded", "committed"]

#: Attempts of a turn that are looked at.
_MOST = 1_000


class TurnNotFound(NotFound):
    """No such turn, or it has begun no step."""

    code = "turn_not_found"


async def journal(store: Store, session: SessionRow, turn: int | None) -> Sequence[JsonObject]:
    """The steps of this turn, or of the last one."""
    from perdure.harness.journal import TurnJournal
    from perdure.runtime.streams.transcript import RecordsExpired

    number = max(0, session.turns - 1) if turn is None else turn
    if session.records_expired:
        raise RecordsExpired
    session_id = session.session_id
    records = await store.records(session_id, from_turn=number, to_turn=number)
    begun = await store.find_events(session_id, EventQuery(types=(EventType.STEP_STARTED,), turn=number, limit=_MOST))
    if not begun:
        raise TurnNotFound
    started = await store.find_events(session_id, EventQuery(types=(EventType.TURN_STARTED,), turn=number, limit=1))
    attempts = (await store.attempts.list(AttemptQuery(session_id, number, _MOST))).attempts
    pieces = EventQuery(types=PIECES, turn=number, after=begun[-1].index, limit=1)
    has_pieces = bool(await store.find_events(session_id, pieces))
    turn_records = TurnJournal(records)
    submissions = [each for event in started for each in event.delivery_ids]
    return [
        {
            **({"submissionIds": submissions} if submissions else {}),
            "sessionId": session_id,
            "turnId": names.turn_id(number),
            **_step(turn_records, event, attempts, has_pieces=has_pieces and event is begun[-1]),
        }
        for event in begun
    ]


def _step(journal: "TurnJournal", begun: Event, attempts: Sequence[AttemptRow], *, has_pieces: bool) -> JsonObject:
    turn, step = begun.turn or 0, begun.step or 0
    own = [each for each in _records(journal) if each.step == step and not each.key.startswith("delivery/")]
    before = [each for each in _records(journal) if each.step < step or each.key.startswith("delivery/")]
    tries = [each for each in attempts if each.key.step == step and each.key.scope == names.MODEL_SCOPE]
    phase = _phase(journal, step, has_pieces=has_pieces)
    committed = phase == "committed"
    times = [begun.at, *(each.at for each in own), *(each.ended_at or each.started_at for each in tries)]
    reply = journal.reply(step)
    calls = [{"type": "toolCall", "id": each.call_id, "name": each.tool} for each in (reply.calls if reply else ())]
    shown: JsonObject = {
        "step": step,
        "attemptId": tries[-1].attempt_id if tries else None,
        "phase": phase,
        # It grows with each attempt that takes the step over.
        "revision": max(1, len(tries)),
        "checkpointLeafId": _leaf(before),
        "toolRequest": {"toolCalls": calls} if calls else None,
        "streamKey": names.step_key(turn, step, "").rstrip("/"),
        "committed": committed,
        "committedLeafId": _leaf(own) if committed else None,
        "createdAt": begun.at,
        "updatedAt": max(times),
    }
    return {name: value for name, value in shown.items() if value is not None}


def _phase(journal: "TurnJournal", step: int, *, has_pieces: bool) -> Phase:
    reply = journal.reply(step)
    if reply is None:
        # A record of another kind in its place has ended the turn.
        over = journal.at(step, names.REPLY) is not None or journal.end_record is not None
        return "committed" if over else "provider_started" if has_pieces else "before_provider"
    if all(journal.outcome(step, call.call_id) for call in reply.calls):
        return "committed"
    return "tool_request_recorded"


def _records(journal: "TurnJournal") -> list[Record]:
    return [each for each in journal.records if isinstance(each, Record)]


#: The records that the history of the model is made of, in the order in which a step writes them.
_LEAVES = ("delivery", names.REPLY, "code", "call")


def _leaf(records: Sequence[Record]) -> str | None:
    """The key of the newest of these records that is a part of the history."""
    ranked = [
        (each.step, _LEAVES.index(kind), each.at, each.key, each)
        for each in records
        if (kind := each.key.partition("/")[0]) in _LEAVES
    ]
    if not ranked:
        return None
    newest = max(ranked)[-1]
    return f"{newest.turn}/{newest.step}/{newest.key}"
