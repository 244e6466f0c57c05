"""Dead letters: one for each failed turn, listed newest first, marked once they are requeued."""

from dataclasses import replace
from typing import Any

import pytest

from perdure.errors import Invalid
from perdure.protocol.events import EventType, NewEvent
from perdure.store.base import Store
from perdure.store.lifecycle import DeadLetterQuery
from perdure.store.values import Commit
from tests.support import given
from tests.support.given import ending, running


def failing(turn: int = 0, session_id: str = "s") -> Commit:
    """The turn fails, and the session waits for the next delivery."""
    failed = NewEvent(
        type=EventType.TURN_FAILED,
        key=f"t{turn}/failed",
        turn=turn,
        data={"code": "MODEL_CALL_FAILED", "message": f"no reply for turn {turn}"},
    )
    return replace(ending(turn, session_id), events=[failed])


async def turns(store: Store, **query: Any) -> list[tuple[str, int]]:
    found = await store.dead_letters(replace(DeadLetterQuery(), **query))
    return [(each.session_id, each.turn) for each in found.dead_letters]


async def test_a_failed_turn_leaves_one_and_no_other_turn_does(store: Store) -> None:
    await store.commit(running())
    await store.commit(ending())
    await store.commit(running(1))
    await store.commit(failing(1))

    assert await turns(store) == [("s", 1)]
    letter = await store.dead_letter("s", 1)
    assert letter is not None
    assert (letter.agent, letter.code) == ((await given.read_session(store)).agent, "MODEL_CALL_FAILED")
    assert (letter.message, letter.requeued_at) == ("no reply for turn 1", None)
    assert await store.dead_letter("s", 0) is None


async def test_a_requeued_one_is_listed_apart(store: Store) -> None:
    for turn in (0, 1):
        await store.commit(failing(turn))

    await store.mark_requeued("s", 0)
    first = await store.dead_letter("s", 0)
    await store.mark_requeued("s", 0)

    assert await turns(store) == [("s", 1)]
    assert await turns(store, status="requeued") == [("s", 0)]
    assert first is not None
    assert first.requeued_at is not None
    assert await store.dead_letter("s", 0) == first


async def test_pages_are_newest_first_and_hold_each_once(store: Store) -> None:
    for turn in range(5):
        await store.commit(failing(turn))

    found: list[int] = []
    cursor: str | None = None
    while True:
        page = await store.dead_letters(DeadLetterQuery(limit=2, cursor=cursor))
        found += [each.turn for each in page.dead_letters]
        if (cursor := page.next_cursor) is None:
            break

    assert sorted(found) == list(range(5))
    times = [letter.failed_at for turn in found if (letter := await store.dead_letter("s", turn))]
    assert times == sorted(times, reverse=True)


async def test_they_are_found_by_the_owner_and_the_agent_of_their_session(store: Store) -> None:
    row = await given.read_session(store)
    await store.commit(failing())

    assert await turns(store, owner=row.principal.owner, agent=row.agent) == [("s", 0)]
    assert await turns(store, owner="somebody else") == []
    assert await turns(store, agent="another") == []


async def test_a_foreign_cursor_is_refused(store: Store) -> None:
    with pytest.raises(Invalid):
        await store.dead_letters(DeadLetterQuery(cursor="nonsense"))
