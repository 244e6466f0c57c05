"""What Temporal, and so its UI, gets to see of a session."""

from collections.abc import Generator

import pytest
from temporalio.api.common.v1 import Payload

from perdure.protocol import names
from tests.support.stack import Stack

WORDS = "swordfish"


@pytest.fixture(scope="module", params=["on", "off"])
def detail(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stack(detail: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Stack]:
    environment = {"PERDURE_UI_DETAIL": detail}
    with Stack(tmp_path_factory.mktemp(f"detail-{detail}"), environment=environment) as stack:
        yield stack


async def seen(stack: Stack, *workflows: str) -> tuple[str, list[str]]:
    """Everything in the histories of these workflows, and the summaries in them."""
    client = await stack.client()
    everything, summaries = "", list[str]()
    for workflow_id in workflows:
        handle = client.get_workflow_handle(workflow_id)
        description = await handle.describe()
        everything += str(await description.memo()) + str(await description.static_summary())
        summaries.append(str(await description.static_summary()))
        async for event in handle.fetch_history_events():
            everything += str(event)
            summaries.append(plain(event.user_metadata.summary))
    return everything, summaries


def plain(payload: Payload) -> str:
    return payload.data.decode()


async def test_the_ui_is_readable_and_leaks_nothing_when_detail_is_off(stack: Stack, detail: str) -> None:
    async with stack.talk() as talk:
        await talk.create(f"remember a note: {WORDS}")
        await talk.until_boundary()
        await talk.say(f"and again {WORDS}")
    turns = [names.turn_workflow(talk.session_id, number) for number in (0, 1)]

    everything, summaries = await seen(stack, talk.session_id, *turns)

    said = " ".join(summaries)
    assert "turn 1" in said
    assert "demo" in said
    if detail == "off":
        assert WORDS not in everything
    else:
        # The summaries are the one place where content may show.
        assert WORDS in said
