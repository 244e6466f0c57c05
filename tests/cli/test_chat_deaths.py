"""A chat in a real terminal whose worker or API is killed in the middle of a word, and `perdure dev --chat`."""

import re
from pathlib import Path

import pytest

from perdure.dev.machine import kill
from tests.cli.terminal import Terminal
from tests.support.plugin import StackFactory
from tests.support.processes import free_port, wait_until
from tests.support.stack import Stack

pytestmark = pytest.mark.chaos

WORDS = "".join(f"w{number} " for number in range(60))


@pytest.fixture
def stack(make_stack: StackFactory) -> Stack:
    """A stack of the test's own: parts of it die."""
    environment = {"PERDURE_HEARTBEAT_TIMEOUT": "2"}
    return make_stack(provider=True, agents="tests.client.agents:agent", environment=environment)


def restart_api(stack: Stack) -> None:
    stack.apis[0].kill()
    stack.start_api({"PERDURE_PORT": stack.url.rpartition(":")[2]}, wait=False)


def restart_worker(stack: Stack) -> None:
    stack.workers[0].kill()
    stack.start_worker(wait=False)


@pytest.mark.parametrize("die", [restart_api, restart_worker])
def test_a_death_in_the_middle_of_a_text_leaves_the_text_as_it_is(stack: Stack, die: object) -> None:
    assert callable(die)
    with Terminal("chat", "--url", stack.url) as terminal:
        terminal.type("drip 60 words delay 30").shows("w5 ")
        die(stack)
        terminal.shows("tokens in")

        said = re.search(r"words delay 30\n(w0 .*?)\n[^\n]*tokens in", terminal.screen, re.DOTALL)
        assert said is not None
        assert said[1] == WORDS
        terminal.type("say next").shows("\nnext\n")


def test_a_text_that_the_provider_breaks_off_and_says_again_is_shown_once(stack: Stack) -> None:
    with Terminal("chat", "--url", stack.url) as terminal:
        terminal.type("cut after 8; say one two three four five six").shows("tokens in")

    assert "six\none two three four five six\n10 tokens in" in terminal.screen


def test_an_outage_is_told_when_it_lasts_and_the_chat_goes_on(stack: Stack) -> None:
    with Terminal("chat", "--url", stack.url) as terminal:
        terminal.type('call wait {"seconds": 6} then say waited').shows("wait {").shows("…")
        stack.apis[0].kill()
        terminal.shows("The API is away")
        stack.start_api({"PERDURE_PORT": stack.url.rpartition(":")[2]}, wait=False)
        terminal.shows("The API is back.").shows("\nwaited\n")


def test_why_nothing_happens_is_told(make_stack: StackFactory) -> None:
    stack = make_stack(workers=0, provider=True, agents="tests.client.agents:agent")
    with Terminal("chat", "--url", stack.url) as terminal:
        terminal.type("say hello").shows("No worker polls")
        stack.start_worker()
        terminal.shows("\nhello\n")


def test_a_message_to_an_api_that_is_away_is_sent_when_it_is_back(stack: Stack) -> None:
    with Terminal("chat", "--url", stack.url) as terminal:
        terminal.type("say one").shows("\none\n")
        stack.apis[0].kill()
        terminal.type("say two").shows("The API is away")
        stack.start_api({"PERDURE_PORT": stack.url.rpartition(":")[2]}, wait=False)
        terminal.shows("\ntwo\n")


def test_dev_with_a_chat_is_one_terminal(tmp_path: Path) -> None:
    ports = ["--port", str(free_port()), "--temporal-port", str(free_port()), "--ui-port", str(free_port())]
    data = tmp_path / "data"
    with Terminal("dev", "--chat", *ports, "--data-dir", str(data)) as terminal:
        wait_until(lambda: terminal.screen.endswith("> "), "the chat", 120)
        terminal.type("hello").shows("You said: hello\n")
        terminal.type('use wait_seconds {"seconds": 2}').shows("wait_seconds {").shows("…")
        kill(data, "worker")
        terminal.shows("wait_seconds: Waited 2 seconds.").type("/quit")

        assert terminal.ends() == 0
        assert "start `perdure dev` again" in terminal.screen

    log = (data / "logs" / "dev.log").read_text()
    assert "Perdure is ready." in log
    assert "starting it again" in log
    assert "starting it again" not in terminal.screen


def test_dev_that_cannot_start_says_why(tmp_path: Path) -> None:
    words = ["--agents", "nowhere:agent", "--data-dir", str(tmp_path / "data")]
    with Terminal("dev", "--chat", *words) as terminal:
        assert terminal.ends() == 1
        assert "nowhere" in terminal.screen.splitlines()[-1]
