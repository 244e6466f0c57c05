"""The state of a session goes from this client to the official one of eve 0.13, and back."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perdure.client import Client
from tests.conformance.npm import node_with
from tests.support.stack import Stack

pytestmark = pytest.mark.conformance

FOLDER = Path(__file__).parents[1] / "conformance" / "eve013"


@pytest.fixture(scope="module")
def node() -> str:
    return node_with(FOLDER)


def in_node(node: str, stack: Stack, state: Any, message: str) -> Any:
    """What the official client gets for the message, and its state afterwards."""
    environment = {**os.environ, "EVE_URL": stack.url, "STATE": json.dumps(state), "MESSAGE": message}
    run = subprocess.run(
        [node, "state.mjs"], cwd=FOLDER, env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_session_goes_to_the_official_client_and_back(node: str, stack: Stack) -> None:
    with Client(stack.url) as client:
        session = client.session()
        session.send('call add {"a": 1, "b": 2} then say one').result()

        theirs = in_node(node, stack, session.state, "drip 4 words")
        again = client.session(theirs["state"])
        result = again.send("say three").result()

    assert theirs["message"] == "w0 w1 w2 w3 "
    assert theirs["state"].keys() == session.state.keys()
    assert theirs["state"]["streamIndex"] == session.state["streamIndex"] + theirs["events"]
    assert (result.message, result.turn_id, result.session_id) == ("three", "turn_2", session.id)


def test_a_session_of_the_official_client_is_continued(node: str, stack: Stack) -> None:
    theirs = in_node(node, stack, {"streamIndex": 0}, "say one")

    with Client(stack.url) as client:
        session = client.session(theirs["state"])
        result = session.send("say two").result()
        back = in_node(node, stack, session.state, "say three")

    assert (result.message, result.turn_id) == ("two", "turn_1")
    assert back["message"] == "three"
    assert back["state"]["sessionId"] == session.id
