"""What is reported to Temporal of a tool that raised."""

from dataclasses import replace

import pytest
from temporalio.api.failure.v1 import Failure
from temporalio.converter import DefaultFailureConverter, DefaultPayloadConverter
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.tools import ToolActivities
from perdure import tool
from perdure.protocol.requests import Coordinates, ToolCall
from perdure.testing import call
from tests.support.lab import SESSION, lab


@tool(effects="pure", retries=2)
def act() -> None:
    try:
        raise KeyError("4711 0815")
    except KeyError as number:
        raise ValueError("the card 4711 0815 is not covered") from number


async def test_a_failure_that_is_tried_again_holds_no_content(caplog: pytest.LogCaptureFixture) -> None:
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, attempt=1, heartbeat_timeout=None)
    async with lab([call("act")], act) as it:
        (ref,) = await it.calls(await it.deliver("Go"))
        made = ToolCall(at=Coordinates(session_id=SESSION, turn=0), agent="tester", call=ref)

        with pytest.raises(ApplicationError) as raised:
            await environment.run(ToolActivities(it.harness).call_tool, made)

    kept = Failure()
    DefaultFailureConverter().to_failure(raised.value, DefaultPayloadConverter(), kept)
    assert kept.message == "The tool failed, and may be tried again."
    assert "4711" not in str(kept)
    # The worker's own log has it all.
    assert "the card 4711 0815 is not covered" in caplog.text
    assert "KeyError: '4711 0815'" in caplog.text
