"""The driver's state, derived from the store in the middle of things."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from perdure.errors import SessionGone, Superseded, Unavailable, UnreadableState
from perdure.harness.journal import TurnJournal
from perdure.harness.prompt import messages_of
from perdure.harness.rebuild import SessionRebuilder
from perdure.protocol.deliveries import LOCAL, Bounds
from perdure.protocol.requests import RebuildSession, TurnRequest
from perdure.session import decisions
from perdure.session.decisions import RunTurn
from perdure.session.state import load_session
from perdure.store.base import Store
from perdure.store.deliveries import DeliveryRow, NewDelivery
from perdure.store.lifecycle import NewFork
from perdure.store.values import Attempt, Commit, NewSession, SessionChange
from tests.support.lab import SESSION, YES, lab

from .till import Till, asked

LOST = RebuildSession(session_id=SESSION, reason="WORKFLOW_LOST")
NOW = Attempt(number=1, generation=1)


async def test_what_silence_has_approved_is_still_run_when_the_driver_is_lost_before() -> None:
    till = Till()
    async with asked(till, 5, expires=60, on_expiry="approve") as (it, _, open):
        resumed = await it.resume(open=open, expired=open)
        assert len(resumed.calls) == 1

        state = await SessionRebuilder(it.store).rebuild(LOST, NOW)

        assert state is not None
        assert state.held is not None
        held = TurnRequest.model_validate(state.held)
        # The turn looks at it again, and finds there what it has to run.
        assert decisions.resumes(held)
        assert (held.open, held.expired) == (open, (open[0].request_id,))
        assert await it.resume(open=held.open, expired=open, generation=2) == resumed


async def test_an_answer_of_the_last_moment_is_carried_out_when_the_driver_is_lost_before() -> None:
    till = Till()
    async with asked(till, 5, expires=60) as (it, _, open):
        answer = await it.answer((open[0], YES))
        # The turn that was to close the request found it open, and answered when it closed what is due.
        begun = SessionChange(status="running", turns=2)
        await it.store.commit(Commit(SESSION, unless_cancelled=1, change=begun))

        state = await SessionRebuilder(it.store).rebuild(LOST, NOW)

        assert state is not None
        held = decisions.turn_request(state, cast(RunTurn, decisions.next_move(state, 0)))
        assert decisions.resumes(held)
        resumed = await it.resume(*held.deliveries, open=held.open, expired=open, turn=held.turn)
        assert len(resumed.calls) == 1
        (row,) = await it.store.deliveries(SESSION, [answer.id])
        assert row.turn == 1


class Interrupted:
    """The store, while another process writes between two reads."""

    def __init__(self, store: Store, meanwhile: Callable[[], Awaitable[object]]) -> None:
        self._store = store
        self._meanwhile = meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def unread(self, session_id: str) -> Sequence[DeliveryRow]:
        await self._meanwhile()
        return await self._store.unread(session_id)


async def test_a_driver_is_not_derived_from_two_moments_of_a_session() -> None:
    async with lab(["Hello", "Goodbye"]) as it:
        await it.model(await it.deliver("Hi"))
        message = await it.deliver("Bye")

        async def turn_continues() -> None:
            await it.model(message, turn=1)

        # A worker that Temporal has forgotten reads the message while the session is looked at.
        with pytest.raises(Unavailable):
            await SessionRebuilder(cast(Store, Interrupted(it.store, turn_continues))).rebuild(LOST, NOW)
        assert "session.rebuilt" not in await it.types()

        state = await SessionRebuilder(it.store).rebuild(LOST, NOW)

        assert state is not None
        assert (state.turn, state.inbox, state.held) == (2, (), None)
        assert (await it.types()).count("session.rebuilt") == 1


async def test_an_attempt_that_temporal_has_forgotten_takes_no_message_from_the_turn_that_follows() -> None:
    async with lab(["Hello", "Goodbye", "never"]) as it:
        await it.model(await it.deliver("Hi"))
        # It is scheduled, and then Temporal loses everything.
        first = await it.deliver("Bye")
        second = await it.deliver("Bye bye")
        state = await SessionRebuilder(it.store).rebuild(LOST, Attempt(number=1, generation=5))
        assert state is not None

        with pytest.raises(Superseded):
            await it.model(first, turn=1, generation=4)
        await it.model(first, second, turn=state.turn, generation=6)

        rows = await it.store.deliveries(SESSION, [first.id, second.id])
        assert [row.turn for row in rows] == [1, 1]
        # Nothing was shown that would have to be taken back.
        assert "step.superseded" not in await it.types()


async def test_a_cancel_request_of_the_turn_that_reads_an_answer_withdraws_nothing() -> None:
    async with asked(Till(), 5) as (it, _, open):
        answer = await it.answer((open[0], YES))
        cancel_request = await it.request_cancel()
        assert cancel_request is not None
        assert cancel_request.turn == 1

        state = await SessionRebuilder(it.store).rebuild(LOST, NOW)

        assert state is not None
        move = decisions.next_move(state, 0)
        assert isinstance(move, RunTurn)
        assert [each.id for each in move.deliveries] == [answer.id]


async def test_what_a_newer_build_has_accepted_keeps_no_session_from_being_rebuilt() -> None:
    till = Till()
    async with asked(till, 5) as (it, _, _open):
        kept = {"id": "later", "kind": "telepathy", "tokenHash": "x"}
        await it.store.accept(NewDelivery(SESSION, "later", {}, "owner", ref=kept))
        await it.store.accept(NewDelivery(SESSION, "plain", {}, "owner"))

        state = await SessionRebuilder(it.store).rebuild(LOST, NOW)

        assert state is not None
        inbox = load_session(state.model_dump(mode="json")).inbox
        assert [(each.id, each.kind) for each in inbox] == [("later", "?telepathy"), ("plain", "message")]
        assert [row.delivery_id for row in await it.store.unread(SESSION)] == ["later", "plain"]


async def test_a_fork_begins_where_its_shared_turns_end() -> None:
    async with lab(["Hello", "Goodbye"]) as it:
        await it.model(await it.deliver("Hi"))
        await it.model(await it.deliver("Bye"), turn=1)
        await it.store.fork(NewFork("f", "token of f", SESSION, 0))

        state = await SessionRebuilder(it.store).rebuild(RebuildSession(session_id="f", reason="FORKED"), NOW)

        assert state is not None
        assert (state.turn, state.told, state.inbox, state.open, state.held) == (1, 1, (), (), None)


async def test_code_without_forks_hands_a_fork_back() -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))
        await it.store.fork(NewFork("f", "token of f", SESSION, 0))
        # What the query of the version before returns of the fork.
        shared = await it.store.record("f", 0, 0, "delivery/0")
        assert shared is not None

        with pytest.raises(UnreadableState):
            messages_of(TurnJournal([shared]), None, 0)


async def test_the_bounds_of_a_session_survive_the_loss_of_its_driver() -> None:
    bounds = Bounds(deadline=9e9, idle_seconds=60, attempts=0)
    async with lab(["Hello"]) as it:
        session = NewSession("bounded", "tester", "conversation", "its token", LOCAL, bounds=bounds)
        await it.store.create_session(session)

        state = await SessionRebuilder(it.store).rebuild(RebuildSession(session_id="bounded", reason="LOST"), NOW)

        assert state is not None
        assert state.bounds == bounds
        assert state.idle_since is not None


async def test_a_session_that_was_deleted_is_not_rebuilt_and_one_that_is_missing_waits() -> None:
    async with lab(["Hello"]) as it:
        await it.model(await it.deliver("Hi"))
        await it.store.begin_deletion(SESSION)

        assert await SessionRebuilder(it.store).rebuild(LOST, NOW) is None
        # The store may be an older copy.
        with pytest.raises(SessionGone):
            await SessionRebuilder(it.store).rebuild(RebuildSession(session_id="missing", reason="LOST"), NOW)
