"""When a session with readers counts as stalled, and what is asked for that. Temporal is a list of answers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from api.stream.broadcast import Pace
from api.stream.stalls import Stalls
from perdure.errors import Unavailable
from perdure.protocol.events import EventType
from perdure.protocol.requests import Attention
from perdure.runtime.drivers.liveness import Sign
from perdure.runtime.drivers.lost import set_attention
from perdure.store.base import Store
from perdure.store.values import SessionChange, SessionRow
from tests.api.served import Api, of_turn, serving, step
from tests.api.test_events import Frames, sse
from tests.support.waiting import until

BEAT = 0.2
RUNNING = SessionChange(status="running", turns=1)


@dataclass
class Temporal:
    """Answers with the next sign; the last one stays. Remembers when it was asked."""

    signs: list[Sign | Exception | None]
    asked: list[float] = field(default_factory=list[float])
    sessions: set[str] = field(default_factory=set[str])

    async def last_sign(self, row: SessionRow, heartbeat: float) -> Sign | None:
        self.asked.append(time.monotonic())
        self.sessions.add(row.session_id)
        sign = self.signs.pop(0) if len(self.signs) > 1 else self.signs[0]
        if isinstance(sign, Exception):
            raise sign
        return sign

    @asynccontextmanager
    async def api(self, directory: Path, clock: Callable[[], float] = time.time) -> AsyncGenerator[Api]:
        def stalls(store: Store) -> Stalls:
            return Stalls(store, self.last_sign, BEAT, clock=clock)

        async with serving(directory, pace=Pace(comment=0.05), stalls=stalls) as api:
            yield api


async def running(api: Api) -> str:
    session_id = (await api.create())["sessionId"]
    await api.emit(session_id, of_turn(0, "started", EventType.TURN_STARTED), change=RUNNING)
    return session_id


async def told(frames: Frames) -> dict[str, str]:
    while (frame := await frames.next()).event != "session.stalled":
        pass
    assert frame.id is None
    return frame.data


async def no_more_than_heartbeats(frames: Frames, temporal: Temporal, looks: int) -> None:
    """Read until Temporal was asked so many times more; a stall would fail here."""
    wanted = len(temporal.asked) + looks
    while len(temporal.asked) < wanted:
        assert (await frames.next()).event in (None, "connected", "turn.started")


async def test_a_turn_without_a_sign_of_life_stalls(tmp_path: Path) -> None:
    temporal = Temporal([Sign(1_000_000_000.0, BEAT, "7@host")])
    async with temporal.api(tmp_path) as api:
        session_id = await running(api)

        async with sse(api, session_id) as frames:
            assert await told(frames) == {"since": "2001-09-09T01:46:40.000Z", "heldBy": "7@host"}
            await no_more_than_heartbeats(frames, temporal, 3)


async def test_fifty_readers_cause_one_look_in_each_heartbeat_timeout(tmp_path: Path) -> None:
    temporal = Temporal([Sign(0, BEAT)])
    async with temporal.api(tmp_path) as api, AsyncExitStack() as stack:
        session_id = await running(api)

        readers = [await stack.enter_async_context(sse(api, session_id)) for _ in range(50)]
        said = await asyncio.gather(*(told(frames) for frames in readers))
        await until(lambda: len(temporal.asked) >= 6, "six looks")

    assert said == [{"since": "1970-01-01T00:00:00.000Z"}] * 50
    pauses = [later - earlier for earlier, later in zip(temporal.asked, temporal.asked[1:], strict=False)]
    assert min(pauses) >= BEAT * 0.99


async def test_readers_of_ndjson_cause_no_look_and_see_blank_lines(tmp_path: Path) -> None:
    temporal = Temporal([Sign(0, BEAT)])
    async with temporal.api(tmp_path) as api:
        session_id, other = await running(api), await running(api)

        async with api.stream(session_id) as alone:
            await alone.event()
            async with sse(api, other) as frames:
                await told(frames)
            assert temporal.sessions == {other}
            # It sees nothing of what others are told, either.
            async with sse(api, session_id) as frames:
                await told(frames)
                await api.emit(session_id, step(0, 0, "started", EventType.STEP_STARTED))
                assert (await alone.event())["type"] == EventType.STEP_STARTED


@pytest.mark.parametrize("behind", [-3600, 3600])
async def test_a_worker_that_lives_does_not_stall_by_clocks_that_differ(tmp_path: Path, behind: float) -> None:
    temporal = Temporal([Sign(float(number), BEAT) for number in range(100)])
    async with temporal.api(tmp_path, clock=lambda: behind) as api:
        session_id = await running(api)

        async with sse(api, session_id) as frames:
            await no_more_than_heartbeats(frames, temporal, 6)


async def test_a_clock_that_is_behind_only_delays_the_news(tmp_path: Path) -> None:
    temporal = Temporal([Sign(1_000_000_000.0, BEAT)])
    async with temporal.api(tmp_path, clock=lambda: 0.0) as api:
        session_id = await running(api)

        async with sse(api, session_id) as frames:
            await told(frames)

    assert temporal.asked[-1] - temporal.asked[0] >= 2 * BEAT


@pytest.mark.parametrize("answer", [None, Unavailable("Temporal cannot be reached; try again.")])
async def test_nobody_is_told_what_is_not_known(tmp_path: Path, answer: Exception | None) -> None:
    temporal = Temporal([answer])
    async with temporal.api(tmp_path) as api:
        session_id = await running(api)

        async with sse(api, session_id) as frames:
            await no_more_than_heartbeats(frames, temporal, 4)


async def test_a_parked_session_and_one_that_needs_attention_are_not_asked_about(tmp_path: Path) -> None:
    temporal = Temporal([Sign(0, BEAT)])
    attention = Attention(code="AGENT_GONE", message="Nobody serves it.")
    async with temporal.api(tmp_path) as api, AsyncExitStack() as stack:
        parked, helpless, stalled = [await running(api) for _ in range(3)]
        await api.emit(parked, change=SessionChange(status="waiting"))
        await set_attention(api.store, helpless, attention)

        quiet = [await stack.enter_async_context(sse(api, each)) for each in (parked, helpless)]
        async with sse(api, stalled) as frames:
            await told(frames)
        for each in quiet:
            for _ in range(20):
                assert (await each.next()).event != "session.stalled"

    assert temporal.sessions == {stalled}


async def test_an_event_of_another_hand_does_not_hide_the_stall(tmp_path: Path) -> None:
    temporal = Temporal([Sign(0, BEAT)])
    async with temporal.api(tmp_path) as api:
        session_id = await running(api)

        async with sse(api, session_id) as frames:
            first = await told(frames)
            # Readers take it for the end of the stall; but no worker has written it.
            await api.emit(session_id, of_turn(0, "cancel-requested", EventType.CANCEL_REQUESTED))
            assert (await frames.event()).event == EventType.CANCEL_REQUESTED
            assert await told(frames) == first


async def test_a_turn_that_stalls_twice_is_told_twice(tmp_path: Path) -> None:
    first, second = Sign(1.0, BEAT), Sign(2.0, BEAT)
    temporal = Temporal([first, first, second, second])
    async with temporal.api(tmp_path) as api:
        session_id = await running(api)

        async with sse(api, session_id) as frames:
            since = [(await told(frames))["since"] for _ in range(2)]

    assert since == ["1970-01-01T00:00:01.000Z", "1970-01-01T00:00:02.000Z"]
