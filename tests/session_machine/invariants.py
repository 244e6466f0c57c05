"""What may be seen of a session, whatever has happened to it."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from perdure.harness.journal import FAILURE, REPLY, USAGE
from perdure.protocol.events import TERMINAL, Event, EventType, Usage
from perdure.session.state import hash_token
from perdure.store.attempts import AttemptQuery
from perdure.store.follow import read_all

from .world import AT_MOST_ONCE, COST, CancelRequest, Notes, World

_ENDS = {EventType.TURN_COMPLETED: "completed", EventType.TURN_FAILED: "failed", EventType.TURN_CANCELLED: "cancelled"}


class Log:
    """The stream of a session, checked as it grows."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._keys: set[str] = set()
        self._running: int | None = None
        self._last = -1
        self._ended = False
        self._ends: defaultdict[int, list[str]] = defaultdict(list)
        self._asked: dict[str, tuple[str, Any]] = {}
        self._parked: set[int] = set()
        #: Turns that resume what the turn before them waited for, and that turn.
        self._resumed: dict[int, int] = {}
        self._cancels_requested: set[int] = set()
        #: A signal has asked to stop a turn or the session, without a request in the store.
        self.stopped_by_signal = False
        self.results: Counter[str] = Counter()
        self.statuses: dict[str, tuple[str, str]] = {}
        self.calls: set[str] = set()
        self.consumed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        #: The text of the step that runs, as readers have seen it grow.
        self._grown = ""

    def read(self, events: Sequence[Event]) -> None:
        for event in events:
            assert event.index == len(self.events), f"a gap before {event}"
            assert event.key not in self._keys, f"twice: {event.key}"
            assert not self._ended, f"after the end: {event}"
            self._keys.add(event.key)
            self.events.append(event)
            self._read(event, event.data or {})

    def _read(self, event: Event, data: dict[str, Any]) -> None:
        turn: int = data.get("sequence", -1)
        match event.type:
            case EventType.TURN_STARTED:
                assert self._running is None, f"turn {turn} begins in turn {self._running}"
                assert turn == self._last + 1, f"turn {turn} begins after turn {self._last}"
                if self._last in self._parked:
                    self._resumed[turn] = self._last
                self._running = self._last = turn
                self.consumed.update(event.delivery_ids)
            case EventType.STEP_STARTED | EventType.STEP_SUPERSEDED:
                self._grown = ""
            case EventType.MESSAGE_APPENDED:
                self._grown += data["messageDelta"]
            case EventType.MESSAGE_COMPLETED:
                assert data["message"] == self._grown, f"{event} after {self._grown!r}"
            case EventType.TURN_COMPLETED | EventType.TURN_FAILED | EventType.TURN_CANCELLED:
                self._end(event, data["sequence"], _ENDS[event.type])
            case EventType.INPUT_REQUESTED:
                # Its data may have the coordinates of the turn that has shown the requests first.
                self._parked.add(-1 if event.turn is None else event.turn)
                actions = [each["action"] for each in data["requests"]]
                self.calls.update(each["callId"] for each in actions if each["toolName"] != "ask_question")
            case EventType.ACTIONS_REQUESTED:
                assert turn == self._running, f"{event} in turn {self._running}"
                fresh = {each["callId"] for each in data["actions"]}
                assert not self.calls & fresh, f"asked twice: {self.calls & fresh}"
                self.calls.update(fresh)
            case EventType.ACTION_RESULT:
                call_id = data["result"]["callId"]
                self.results[call_id] += 1
                error: dict[str, Any] = data.get("error") or {}
                self.statuses[call_id] = data["status"], error.get("code", "")
            case EventType.DELIVERY_REFUSED:
                self.refused[data["deliveryId"]] += 1
            case EventType.CANCEL_REQUESTED:
                self._cancels_requested.add(int(data["turnId"].removeprefix("turn_")))
            case _:
                self._ended = event.type in TERMINAL

    def _end(self, event: Event, turn: int, end: str) -> None:
        ends = self._ends[turn]
        if end == "cancelled":
            wanted = (
                self.stopped_by_signal
                or turn in self._cancels_requested
                or self._resumed.get(turn) in self._cancels_requested
            )
            assert wanted, f"no cancel of turn {turn} was requested"
            # What a turn waits for may be withdrawn after it has parked.
            after_park = turn == self._last and turn in self._parked and ends == ["completed"]
            assert self._running == turn or (self._running is None and after_park), f"{event} in turn {self._running}"
        else:
            assert self._running == turn, f"{event} in turn {self._running}"
            assert not ends, f"turn {turn} has ended as {ends}, and {end}"
        assert "cancelled" not in ends, f"turn {turn} is cancelled, and {end}"
        ends.append(end)
        self._running = None

    def met(self, request: CancelRequest) -> int | None:
        """The turn that the request cancelled: the one that it named, or the one that resumed it."""
        if "cancelled" in self._ends[request.turn]:
            return request.turn
        successor = next((turn for turn, parked in self._resumed.items() if parked == request.turn), None)
        return successor if successor is not None and "cancelled" in self._ends[successor] else None

    @property
    def asks(self) -> bool:
        """Whether people were ever asked anything."""
        return bool(self._parked)

    @property
    def last_end(self) -> str:
        return self._ends[self._last][-1]

    @property
    def running(self) -> int | None:
        return self._running


def check_effects(notes: Notes) -> None:
    assert not notes.wrong, notes.wrong
    times = Counter(effect.call_id for effect in notes.effects if effect.tool in AT_MOST_ONCE)
    assert all(count == 1 for count in times.values()), f"more than once: {times}"


async def check_now(world: World, log: Log) -> None:
    """What holds at every moment."""
    assert not world.processes.faults, world.processes.faults
    check_effects(world.notes)
    log.read([event async for event in read_all(world.store, world.session_id, len(log.events))])


async def check_at_rest(world: World, log: Log) -> None:
    """What holds once there is nothing left to do."""
    await check_now(world, log)
    await _check_deliveries(world, log)
    _check_cancels(world, log)
    _check_calls(world, log)
    await _check_session(world, log)
    await _check_usage(world, log)
    await _check_attempts(world)


async def _check_deliveries(world: World, log: Log) -> None:
    """Each accepted delivery was read by one turn, or refused once, and never both."""
    rows = await world.store.deliveries(world.session_id, sorted(world.notes.accepted))
    assert {row.delivery_id for row in rows} == set(world.notes.accepted)
    ended = (await world.row()).ended
    token = hash_token(await world.token(old=False))
    for row in rows:
        seen = (log.consumed[row.delivery_id], log.refused[row.delivery_id])
        assert seen == ((1, 0) if row.turn is not None else (0, 1)), f"consumed and refused {seen} times: {row}"
        assert (row.turn is None) == (row.refused is not None), row
        if row.refused is not None and not ended:
            assert world.notes.accepted[row.delivery_id] != token, f"refused, and its token is the session's: {row}"


def _check_cancels(world: World, log: Log) -> None:
    """Each accepted cancel has stopped its turn at once, unless all that it could meet was refused."""
    for request in world.notes.cancel_requests:
        refused = request.met is not None and all(log.refused[each] for each in request.met)
        turn = log.met(request)
        assert turn is not None or refused, f"not met: {request}"
        late = [each for each in world.notes.effects if each.turn == turn and each.begun > request.at]
        assert not late, f"begun after {request}: {late}"


def _check_calls(world: World, log: Log) -> None:
    """Each call has one result, and it is the truth."""
    unlike = {each for each in log.calls | set(log.results) if log.results[each] != 1}
    assert not unlike, f"not one result: { ({each: log.results[each] for each in unlike}) } of {log.calls}"
    done = Counter(effect.call_id for effect in world.notes.effects)
    for call_id, (status, code) in log.statuses.items():
        if status == "completed":
            assert done[call_id], f"{call_id} is completed and was never done"
        elif status == "rejected" or code == "TURN_CANCELLED":
            assert not done[call_id], f"{call_id} is {status} ({code}) and was done"


async def _check_session(world: World, log: Log) -> None:
    row = await world.row()
    assert row.status in ("waiting", "completed", "failed"), row
    assert log.running is None, f"turn {log.running} never ends"
    assert (row.cancel_turn, row.attention, row.events) == (None, None, len(log.events)), row
    asked = {each.request.request_id for each in await world.inputs() if each.status == "open"}
    state = world.state
    knows = {each.request_id for each in state.open} if state is not None and not row.ended else set[str]()
    assert asked == knows, f"open are {asked}, and the driver waits for {knows}"
    assert row.ended == (log.events[-1].type in TERMINAL), row


async def _check_attempts(world: World) -> None:
    """What is reported of attempts ends with them, and adds up to what the session has used."""
    row = await world.row()
    attempts = (await world.store.attempts.list(AttemptQuery(world.session_id, limit=10_000))).attempts
    running = [each for each in attempts if each.status == "running" or each.ended_at is None]
    assert not running, f"{running} have not ended"
    assert sum((each.usage for each in attempts), Usage()) == row.usage, f"{attempts} have not used {row.usage}"


async def _check_usage(world: World, log: Log) -> None:
    """What was paid is what readers were shown, and what was spent on steps and attempts that failed."""
    shown = sum(event.data["usage"]["inputTokens"] for event in log.events if _completed(event) and event.data)
    failed = {(event.turn, event.step) for event in log.events if event.type == EventType.STEP_FAILED}
    lost = 0
    completed = {(event.turn, event.step) for event in log.events if _completed(event)}
    for record in await world.store.records(world.session_id):
        place = (record.turn, record.step)
        if USAGE.includes(record):
            # Of an attempt that was overtaken, and had asked the model.
            lost += record.body["usage"]["inputTokens"]
        if (REPLY.includes(record) or FAILURE.includes(record)) and place in failed and place not in completed:
            usage: dict[str, int] = record.body.get("usage") or {}
            lost += usage.get("inputTokens", 0)
    row = await world.row()
    assert row.usage.input_tokens == shown + lost, f"{row.usage} is not {shown} + {lost}"
    assert row.usage.input_tokens % COST == 0


def _completed(event: Event) -> bool:
    return event.type == EventType.STEP_COMPLETED
