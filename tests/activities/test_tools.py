"""A tool call that comes to workers of another pool."""

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.tools import ToolActivities
from perdure.protocol.requests import CallRef, Coordinates, ToolCall
from tests.support.lab import SESSION, lab


@pytest.mark.parametrize(("asked", "serves"), [("gpu", None), (None, "gpu"), ("gpu", "ocr")])
async def test_a_call_of_another_pool_is_handed_back_and_nothing_is_written(
    asked: str | None, serves: str | None
) -> None:
    async with lab([]) as it:
        before = await it.events()
        ref = CallRef(call_id="call_1", tool="where", pool=asked)
        call = ToolCall(at=Coordinates(session_id=SESSION, turn=0), agent="demo", call=ref)

        with pytest.raises(ApplicationError) as refused:
            await ActivityEnvironment().run(ToolActivities(it.harness, serves).call_tool, call)

        assert (refused.value.type, refused.value.non_retryable) == ("WRONG_POOL", False)
        assert await it.events() == before
