"""Retention beside the real product: its readers, and the next prompt."""

import pytest

from perdure.errors import Invalid
from perdure.runtime.sweeper import Retention
from perdure.settings import Settings
from perdure.store.lifecycle import Keep
from tests.support.plugin import StackFactory
from tests.support.talk import types

#: Everything is older than it is to be kept.
AT_ONCE = -60.0


@pytest.mark.parametrize("on_postgres", [False, pytest.param(True, marks=pytest.mark.postgres)])
async def test_a_session_whose_past_has_expired_continues_and_is_read_from_the_beginning(
    make_stack: StackFactory, request: pytest.FixtureRequest, on_postgres: bool
) -> None:
    url = request.getfixturevalue("postgres_url") if on_postgres else None
    stack = make_stack(provider=True, agents="tests.runtime.served:chat", database_url=url)
    async with stack.talk() as talk:
        await talk.say('call add {"a": 1, "b": 2} then say three')
        await talk.say("say on")
        before = [event["meta"]["index"] for event in await talk.until("session.waiting", 0)]
        store = await stack.store()
        try:
            retention = Retention(store, Keep(deltas=AT_ONCE, messages=AT_ONCE, records=AT_ONCE))
            while await retention.sweep():
                pass
        finally:
            await store.close()

        assert await talk.say("say still here") == "still here"
        first = await talk.until("session.waiting", 0)
        requests = (await talk.http.get(f"{stack.provider_url}/requests")).json()["requests"]

    assert [event["meta"]["index"] for event in first] == before
    kept = [type for type in types(first) if type != "event.expired"]
    assert kept == [
        *("session.started", "turn.started", "step.started", "step.completed", "step.started", "step.completed"),
        *("turn.completed", "session.waiting"),
    ]
    assert "event.expired" in types(first)
    assert requests[-1]["messages"] > 5
    assert 'call add {"a": 1, "b": 2} then say three' in requests[-1]["texts"]


def test_what_goes_first_is_not_kept_longer() -> None:
    assert Settings(keep_deltas_days=1, keep_records_days=7).keep_seconds == (86_400, None, 604_800)
    with pytest.raises(Invalid):
        _ = Settings(keep_deltas_days=7, keep_messages_days=1).keep_seconds


def test_nothing_is_deleted_by_default() -> None:
    assert Keep(*Settings().keep_seconds).shortest is None
