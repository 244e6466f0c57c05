"""The signal of a cancel says which deliveries it means, also when it is sent again."""

from dataclasses import replace

from perdure.protocol.wire import JsonObject
from perdure.runtime.signals import Signals
from perdure.store.base import Store
from tests.runtime.fake_driver import FakeDriver
from tests.support import given


async def test_a_cancel_that_is_signalled_again_says_what_it_means(
    store: Store, driver: FakeDriver, signals: Signals
) -> None:
    await store.commit(given.ending(0))
    row = (await store.accept(given.delivery())).delivery
    request = await given.cancel(store)
    assert request is not None

    await signals.cancel(request)
    await signals.signal_all("s")

    assert driver.cancels_until == [row.accepted_at, row.accepted_at]
    assert await given.refuse(store)
    await store.commit(given.running(1))
    await given.cancel(store)
    await store.accept(given.delivery("later"))
    await signals.signal_all("s")
    # A turn that runs is meant, whatever waits.
    assert driver.signalled()[-1] == "cancel turn_1"
    assert driver.cancels_until[-1] is None


async def test_a_cancel_whose_message_was_replaced_meanwhile_is_not_signalled_again(
    store: Store, driver: FakeDriver, signals: Signals
) -> None:
    await store.commit(given.ending(0))
    await store.accept(given.delivery())
    await given.cancel(store)

    async def replaces(session_id: str, ref: JsonObject) -> None:
        await store.accept(replace(given.delivery("now"), mode="interrupt"))

    driver.deliver = replaces  # type: ignore[method-assign]
    await signals.signal_all("s")

    assert driver.cancels_until == []
