"""The driver of a child on a real server."""

import asyncio

import pytest

from perdure.protocol import names
from perdure.protocol.requests import Finished, Parked
from perdure.session.state import ParentRef
from tests.support.processes import PATIENCE
from tests.support.workflows import Bench, Outside
from tests.workflows.scenarios.stage import ASKED, Scripted

pytestmark = pytest.mark.usefixtures("working")


def child_of(session_id: str) -> ParentRef:
    return ParentRef(session_id=session_id, action="subagent-call:clerk:c0", root_session_id=session_id)


async def test_a_child_signals_its_parent_that_it_has_ended(bench: Bench, outside: Outside) -> None:
    parent = await bench.start(outside)
    child = await bench.start(outside, mode="task", parent=child_of(parent.handle.id))

    await child.deliver("dlv_0")
    await asyncio.wait_for(child.handle.result(), PATIENCE)

    # Nobody waits for it there.
    await outside.until(lambda: [each.code for each in outside.refused] == ["child_not_awaited"])
    assert outside.refused[0].delivery_id == names.delivery_of_child(child.handle.id)


@pytest.mark.parametrize("asks", [True, False])
async def test_a_child_ends_although_its_family_is_gone(bench: Bench, outside: Outside, asks: bool) -> None:
    outside.answer = Scripted({(0, 0): Parked(open=(ASKED,)) if asks else Finished()})
    child = await bench.start(outside, mode="task", parent=child_of("ses_gone"))

    await child.deliver("dlv_0")
    if asks:
        await child.parked()
        await child.handle.signal(names.CANCEL, {"turnId": "turn_0"})

    await asyncio.wait_for(child.handle.result(), PATIENCE)
