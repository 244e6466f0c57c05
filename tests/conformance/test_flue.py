"""The published client of Flue, unmodified, in Node: one test per scenario in flue/scenarios."""

from pathlib import Path

import pytest

from perdure.store.follow import read_all
from tests.conformance.npm import node_with, run
from tests.support.plugin import StackFactory
from tests.support.stack import Stack

pytestmark = pytest.mark.conformance

FOLDER = Path(__file__).parent / "flue"
SCENARIOS = sorted(path.stem for path in (FOLDER / "scenarios").glob("*.mjs"))


@pytest.fixture(scope="module")
def node() -> str:
    return node_with(FOLDER)


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.conformance.agents:concierge,tests.runs.declared:agents")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_client_of_flue_gets_through(node: str, stack: Stack, scenario: str) -> None:
    run(node, FOLDER, f"scenarios/{scenario}.mjs", PERDURE_URL=stack.url)


async def test_a_request_to_the_model_is_in_no_event(stack: Stack) -> None:
    file = {"type": "file", "mediaType": "text/plain", "data": "c2VjcmV0IG9mIHRoZSBmaWxl"}
    message = [{"type": "text", "text": "say Hello"}, file]
    async with stack.talk() as talk:
        await talk.create(message, clientContext="secret of the context")
        await talk.until_boundary()
    store = await stack.store()

    try:
        events = [event async for event in read_all(store, talk.session_id)]
    finally:
        await store.close()

    stored = "".join(event.model_dump_json() for event in events)
    assert "Hello" in stored
    for hidden in ("Do as the script says", "secret of the context", "c2VjcmV0", "secret of the file"):
        assert hidden not in stored
