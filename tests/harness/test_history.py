import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelResponse, TextPart
from pydantic_ai.usage import RequestUsage

from perdure import tool
from perdure.errors import ModelFailed, UnreadableState
from perdure.harness import turn_begin
from perdure.harness.journal import REPLY
from perdure.harness.prompt import NOT_EXECUTED
from perdure.harness.turn_begin import History, HistoryCache
from perdure.models.base import Reply, usage_of
from perdure.store.base import RawRecord, Store
from perdure.store.lifecycle import Restoration
from perdure.store.values import Commit, NewRecord, SessionRow
from perdure.testing import ScriptedModel, call
from tests.support.lab import SESSION, Lab, lab


async def row_of(it: Lab, session: str = SESSION) -> SessionRow:
    row = await it.store.session(session)
    assert row is not None
    return row


@tool(effects="pure")
def nothing() -> str:
    """Do nothing."""
    return "nothing"


class CountingStore:
    """Counts the records that were read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.read: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def raw_records(
        self, session_id: str, *, from_turn: int = 0, to_turn: int | None = None
    ) -> Sequence[RawRecord]:
        found = await self._store.raw_records(session_id, from_turn=from_turn, to_turn=to_turn)
        self.read.append(len(found))
        return found


async def test_a_finished_turn_is_read_once() -> None:
    async with lab(["reply"] * 6) as it:
        counting = CountingStore(it.store)
        histories = HistoryCache(cast(Store, counting))
        for turn in range(6):
            delivery = await it.deliver(f"message {turn}")
            await histories.load(await row_of(it), turn)
            await it.model(delivery, turn=turn)

        # The first turn also keeps what notes are marked with.
        assert counting.read == [0, 3, 2, 2, 2, 2]


async def test_turns_that_another_worker_handled_are_not_missed() -> None:
    model = ScriptedModel(["zero", "one", "two", "three"])
    async with lab(model) as it:
        here, there = it.harness, it.worker()
        for turn, worker in enumerate([here, there, there, here]):
            it.harness = worker
            await it.model(await it.deliver(f"m{turn}"), turn=turn)

        texts = [part.content for message in model.prompts[-1].messages for part in message.parts]  # type: ignore
        assert texts == ["m0", "zero", "m1", "one", "m2", "two", "m3"]


async def test_later_prompts_begin_with_the_same_messages_so_that_they_are_not_encoded_again() -> None:
    # The message of a turn that failed becomes one request with the next one.
    model = ScriptedModel(["zero", ModelFailed("refused"), "two", "three", "four"])
    async with lab(model) as it:
        for turn in range(5):
            await it.model(await it.deliver(f"m{turn}"), turn=turn)

    before, last = model.prompts[-2:]
    # The newest request and its reply are read again from what was recorded.
    assert [here is there for here, there in zip(before.messages, last.messages, strict=False)] == [True] * 4 + [False]
    assert before.sent is last.sent


async def test_a_small_cache_forgets_and_stays_right() -> None:
    model = ScriptedModel(["zero", "one", "two"])
    async with lab(model) as it:
        it.harness = it.worker(histories=HistoryCache(it.store, capacity=1))
        for turn in range(3):
            await it.model(await it.deliver(f"m{turn}"), turn=turn)

        texts = [part.content for message in model.prompts[-1].messages for part in message.parts]  # type: ignore
        assert texts == ["m0", "zero", "m1", "one", "m2"]


async def test_an_attempt_at_an_older_turn_does_not_see_later_ones() -> None:
    async with lab(["zero", "one", "two"]) as it:
        histories = HistoryCache(it.store)
        for turn in range(3):
            await it.model(await it.deliver(f"m{turn}"), turn=turn)
        await histories.load(await row_of(it), 3)

        past, turn = await histories.load(await row_of(it), 1)

        assert past.until == 1
        assert len(past.conversation.messages) == 2
        assert [delivery.message for delivery in turn.deliveries()] == ["m1"]
        assert (await histories.load(await row_of(it), 3))[0].until == 3


async def test_a_session_that_is_too_large_to_keep_drives_no_other_out() -> None:
    async with lab(["reply", "reply"]) as it:
        large = Lab(it.store, it.agent, it.models.now, "conversation", it.settings, session="large")
        await it.model(await it.deliver("hello"))
        await large.model(await large.deliver("x" * 20_000))
        counting = CountingStore(it.store)
        histories = HistoryCache(cast(Store, counting), capacity=10_000)

        for session in (SESSION, "large", SESSION):
            await histories.load(await row_of(it, session), 1)

        assert [count > 0 for count in counting.read] == [True, True, False]


# --- histories that are read ahead ------------------------------------------------------------------------------


async def test_what_is_read_ahead_is_not_read_again() -> None:
    model = ScriptedModel(["zero", "one", "two", "three"])
    async with lab(model) as it:
        for turn in range(3):
            await it.model(await it.deliver(f"m{turn}"), turn=turn)
        counting = CountingStore(it.store)
        it.harness = it.worker(cast(Store, counting))

        it.harness.warm(SESSION)
        it.harness.warm(SESSION)
        await it.model(await it.deliver("m3"), turn=3)

        # The last turn that had begun could still have been running: it was read when the next one began.
        assert counting.read == [7, 2]
        assert said(model) == ["m0", "zero", "m1", "one", "m2", "two", "m3"]


async def test_a_turn_that_still_runs_is_not_taken_for_one_that_has_ended() -> None:
    model = ScriptedModel(["zero", [call("nothing")], "done", "two"])
    async with lab(model, nothing) as it:
        await it.model(await it.deliver("m0"))
        (ref,) = await it.calls(await it.deliver("m1"), turn=1)
        other = it.worker()

        other.warm(SESSION)
        await asyncio.sleep(0)
        await it.tool(ref, turn=1)
        await it.model(turn=1, step=1)
        it.harness = other
        await it.model(await it.deliver("m2"), turn=2)

        assert said(model) == ["m0", "zero", "m1", None, "nothing", "done", "m2"]


async def test_a_call_that_ends_in_a_later_turn_is_not_kept_as_it_was() -> None:
    model = ScriptedModel(["zero", [call("nothing")], "two", "three", "four"])
    async with lab(model, nothing) as it:
        await it.model(await it.deliver("m0"))
        (ref,) = await it.calls(await it.deliver("m1"), turn=1)
        await it.model(await it.deliver("m2"), turn=2)
        other = it.worker()

        other.warm(SESSION)
        # The same worker reads it in the middle of another turn, too.
        it.harness = other
        await it.model(await it.deliver("m3"), turn=3)
        before = said(model)
        await it.tool(ref, turn=1)
        await it.model(await it.deliver("m4"), turn=4)

        assert before == ["m0", "zero", "m1", None, NOT_EXECUTED, "m2", "two", "m3"]
        assert said(model) == ["m0", "zero", "m1", None, "nothing", "m2", "two", "m3", "three", "m4"]


async def test_what_cannot_be_read_ahead_is_reported_by_the_model_call() -> None:
    async with lab(["zero", "one", "two"]) as it:
        for turn in range(2):
            await it.model(await it.deliver(f"m{turn}"), turn=turn)
        await spoil(it, 0)
        it.harness = it.worker()
        delivery = await it.deliver("m2")

        it.harness.warm(SESSION)

        with pytest.raises(UnreadableState):
            await it.model(delivery, turn=2)


async def test_a_long_session_is_read_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel(["reply"] * 8)
    async with lab(model) as it:
        for turn in range(7):
            await it.model(await it.deliver(f"m{turn}"), turn=turn)
        counting = CountingStore(it.store)
        it.harness = it.worker(cast(Store, counting))
        monkeypatch.setattr(turn_begin, "_PAGE", 3)

        await it.model(await it.deliver("m7"), turn=7)

        assert counting.read == [7, 6, 2]
        assert said(model) == [text for turn in range(7) for text in (f"m{turn}", "reply")] + ["m7"]


# --- turns of two texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["plain", 'né \u2028 😀 \\ "', "</note>", "NaN", "\\ud83d", ""])
async def test_a_plain_turn_is_read_as_every_other(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = RequestUsage(input_tokens=3, output_tokens=2, details={"reasoning": 1})
    details: dict[str, Any] = {"finish_reason": "stop", "of": [1.5, None, {"é": True}]}
    parts = [TextPart(text or "x", id="msg_1", provider_name="p", provider_details=details), TextPart(text)]
    response = ModelResponse(
        parts, usage=usage, model_name="m", provider_name="p", provider_details=details, provider_response_id="r"
    )
    async with lab([Reply(response, "stop", usage_of(response)), "end"]) as it:
        await it.model(await it.deliver(text))
        await it.model(await it.deliver("more"), turn=1)
        row = await row_of(it)
        fast, _ = await HistoryCache(it.store).load(row, 2)
        monkeypatch.setattr(turn_begin, "plain_turn", never_plain)

        slow, _ = await HistoryCache(it.store).load(row, 2)

        assert [each[:2] for each in fast.conversation.messages] == [each[:2] for each in slow.conversation.messages]
        assert dumped(fast) == dumped(slow)
        assert (fast.call_ids, fast.weight, fast.mark) == (slow.call_ids, slow.weight, slow.mark)


def never_plain(records: object) -> None:
    """Read every turn in the usual way."""


def dumped(history: History) -> list[Any]:
    """The messages without the times at which their texts were read."""
    messages = ModelMessagesTypeAdapter.dump_python([each.message for each in history.conversation.messages])
    return [
        {**message, "parts": [{**part, "timestamp": None} for part in message["parts"]], "timestamp": None}
        if message["kind"] == "request"
        else message
        for message in messages
    ]


# --- histories that cannot be read ------------------------------------------------------------------------------


async def spoil(it: Lab, turn: int) -> None:
    """Let a turn have a reply that nobody can read."""
    nonsense = NewRecord(turn, 9, "reply", REPLY.current, {"nonsense": True})
    await it.store.commit(Commit(SESSION, records=[nonsense]))


def said(model: ScriptedModel) -> list[object]:
    return [getattr(part, "content", None) for message in model.prompts[-1].messages for part in message.parts]


async def test_a_history_that_cannot_be_read_stops_the_session() -> None:
    model = ScriptedModel(["zero", "one"])
    async with lab(model) as it:
        await it.model(await it.deliver("m0"))
        await spoil(it, 0)
        it.harness = it.worker()
        delivery = await it.deliver("m1")

        with pytest.raises(UnreadableState):
            await it.model(delivery, turn=1)

        assert len(model.prompts) == 1
        assert (await row_of(it)).left_out == []


async def test_an_agent_may_prefer_a_fresh_start() -> None:
    model = ScriptedModel(["zero", "one", "two"])
    async with lab(model, on_unreadable="fresh") as it:
        await it.model(await it.deliver("m0"))
        await spoil(it, 0)
        it.harness = it.worker()

        await it.model(await it.deliver("m1"), turn=1)
        await it.model(await it.deliver("m2"), turn=2)

        assert said(model) == ["m1", "one", "m2"]
        (reset,) = [event for event in await it.events() if event.type == "session.reset"]
        assert reset.data == {"reason": "UNREADABLE_STATE", "keptFromTurn": "turn_1"}


async def test_a_turn_that_cannot_read_itself_waits_whatever_the_agent_prefers() -> None:
    async with lab(["zero", "one"], on_unreadable="fresh") as it:
        await it.model(await it.deliver("m0"))
        delivery = await it.deliver("m1")
        await spoil(it, 1)

        with pytest.raises(UnreadableState):
            await it.model(delivery, turn=1)


async def test_a_restored_session_continues_as_after_that_turn() -> None:
    model = ScriptedModel(["zero", "one", "two", "three"])
    async with lab(model) as it:
        for turn in range(3):
            await it.model(await it.deliver(f"m{turn}"), turn=turn)
        await spoil(it, 1)

        await it.store.restore(Restoration(SESSION, "OPERATOR", kept=0))
        await it.model(await it.deliver("m3"), turn=3)

        assert said(model) == ["m0", "zero", "m3"]
