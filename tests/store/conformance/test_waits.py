"""What many sessions wait for, read at once."""

from perdure.store.base import Store
from perdure.store.inputs import Waits
from tests.store.conformance.test_families import child
from tests.support import given
from tests.support.given import answer, answering, chooses, opening


async def test_each_session_has_its_open_requests_a_root_those_of_its_family_and_what_it_has_not_read(
    store: Store,
) -> None:
    for new in (child("a", "s"), child("aa", "s", "a"), given.session("other"), given.session("calm")):
        await store.create_session(new)
    for session_id, request_id in (("aa", "r1"), ("s", "r2"), ("other", "r3"), ("s", "closed")):
        await store.commit(opening(request_id, session_id=session_id))
    await answer(store, answering(("closed", chooses("approve"))))
    await store.accept(given.delivery("d1", session_id="other"))
    await store.accept(given.delivery("d2", session_id="other"))

    waits = await store.waits(["s", "a", "aa", "other", "calm", "unknown"])

    asked = {each: [row.request.request_id for row in found.inputs] for each, found in waits.items()}
    assert asked == {"s": ["r1", "r2"], "a": [], "aa": ["r1"], "other": ["r3"], "calm": [], "unknown": []}
    # An answer is a delivery, too.
    assert {each: found.queued for each, found in waits.items()} == {
        each: await store.count_unread(each) for each in waits
    }
    assert (waits["other"].queued, waits["s"].queued > 0) == (2, True)
    assert waits["calm"] == Waits()


async def test_what_no_session_waits_for_is_nothing(store: Store) -> None:
    assert await store.waits([]) == {}
