"""A message that is edited while a turn begins is read whole: as it was, or as it is now, and never lost."""

from collections.abc import Sequence

import pytest

from perdure.errors import Unavailable
from perdure.store.deliveries import Change, DeliveryRow
from tests.support.lab import SESSION, lab


async def test_an_edit_between_the_read_and_the_begin_of_a_turn_is_read_by_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with lab(["Hello"]) as it:
        ref = await it.deliver("one")
        read = it.store.deliveries

        async def read_and_edit(session_id: str, delivery_ids: Sequence[str]) -> Sequence[DeliveryRow]:
            rows = await read(session_id, delivery_ids)
            assert await it.store.edit_delivery(rows[0], Change({**(rows[0].body or {}), "message": "two"})) is not None
            return rows

        with monkeypatch.context() as edited:
            edited.setattr(it.store, "deliveries", read_and_edit)
            with pytest.raises(Unavailable, match="edited") as raised:
                await it.model(ref)
        await it.model(ref, number=2)
        (row,) = await it.store.deliveries(SESSION, [ref.id])
        received = [event.data for event in await it.store.events(SESSION) if event.type == "message.received"]

    assert raised.value.retryable
    assert (row.turn, row.outcome) == (0, "completed")
    assert [(data or {}).get("message") for data in received] == ["two"]
