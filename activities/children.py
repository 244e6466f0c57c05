"""The activities of a driver that start, stop and collect the sessions to which a turn has handed work."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from temporalio import activity

from perdure.protocol import names
from perdure.protocol.requests import (
    CallBack,
    CollectChildren,
    DispatchChildren,
    LookAtChildren,
    Looked,
    Pending,
    ShowInputs,
    ShownInputs,
    StopChildren,
)

from .attempt import attempted

if TYPE_CHECKING:
    from perdure.harness.harness import Harness
    from perdure.harness.tools.children import NewChild
    from perdure.runtime.signals import Signals

#: How many children are started or signalled at the same time.
_AT_ONCE = 8


class ChildActivities:
    """What they write is accepted: a signal that fails is sent by the sweeper."""

    def __init__(self, harness: Harness, signals: Signals) -> None:
        self.harness = harness
        self._signals = signals

    @activity.defn(name=names.DISPATCH_CHILDREN)
    @attempted(reports=True)
    async def dispatch_children(self, order: DispatchChildren) -> Pending:
        pending, created = await self.harness.children.dispatch(order)
        places = asyncio.Semaphore(_AT_ONCE)

        async def start(child: NewChild) -> None:
            async with places:
                await self._signals.start(child.session, child.task.model_dump(mode="json"))

        await asyncio.gather(*map(start, created))
        return pending

    @activity.defn(name=names.STOP_CHILDREN)
    @attempted(reports=True)
    async def stop_children(self, order: StopChildren) -> Pending:
        pending, requests = await self.harness.children.stop(order)
        for request in requests:
            await self._signals.cancel(request)
        return pending

    @activity.defn(name=names.COLLECT_CHILDREN)
    @attempted(reports=True)
    async def collect_children(self, order: CollectChildren) -> None:
        await self.harness.children.collect(order)

    @activity.defn(name=names.SHOW_INPUTS)
    @attempted(reports=True)
    async def show_inputs(self, order: ShowInputs) -> ShownInputs:
        return await self.harness.children.show(order)

    @activity.defn(name=names.LOOK_AT_CHILDREN)
    @attempted(reports=True)
    async def look_at_children(self, order: LookAtChildren) -> Looked:
        return await self.harness.children.look(order)

    @activity.defn(name=names.CALL_BACK)
    @attempted()
    async def call_back(self, order: CallBack) -> None:
        await self.harness.callbacks.deliver(order.session_id)
