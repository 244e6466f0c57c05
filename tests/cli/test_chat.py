"""`perdure chat` in a real terminal, against the real product."""

import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from perdure.client import Client
from perdure.dev.supervisor import command
from tests.cli.terminal import Terminal
from tests.support.plugin import StackFactory
from tests.support.processes import clean_environment, free_port, wait_until
from tests.support.stack import Stack

WORDS = "".join(f"w{number} " for number in range(60))


@pytest.fixture(scope="module")
def stack(module_stack: StackFactory) -> Stack:
    return module_stack(provider=True, agents="tests.client.agents:agent,tests.client.agents:clerk")


def chat(stack: Stack, *words: str, **environment: str) -> Terminal:
    return Terminal("chat", "--url", stack.url, *words, environment=environment)


def session_of(terminal: Terminal) -> str:
    """The id that the chat shows."""
    terminal.type("/session").shows("--session ses_")
    found = re.search(r"--session (ses_\w+)", terminal.screen)
    assert found is not None
    return found[1]


def test_what_the_model_says_is_shown_with_what_it_has_cost(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.shows("concierge (openai-chat:scripted)")
        terminal.type("say hello there").shows("\nhello there\n")
        terminal.shows("tokens in").shows("tokens out")
        terminal.type("/quit")

        assert terminal.ends() == 0
        assert "To come back: perdure chat --session ses_" in terminal.screen
        assert f"--url {stack.url}" in terminal.screen


def test_a_call_is_one_line_with_its_arguments_its_outcome_and_its_time(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type('call add {"a": 1, "b": 2} then say three').shows("\nthree\n")
        terminal.type('call wait {"seconds": 0.2} and broken {} then say two').shows("\ntwo\n")

    lines = terminal.screen.splitlines()
    assert [each for each in lines if re.fullmatch(r'  add \{"a": 1, "b": 2\} … 3 \(\d\.\d s\)', each)]
    assert [each for each in lines if re.fullmatch(r"  wait \S+ 0\.2\}.* waited \(\d\.\d s\)", each)]
    assert [each for each in lines if re.match(r"  broken \{\}.*failed: ", each)]


def test_reasoning_is_dim(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type("think let me see; say done").shows("\ndone\n")

    assert "let me see" in terminal.screen


def test_an_approval_is_given_by_word(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type('call pay {"amount": 5} then say paid').shows("Pay 5\n").shows("1 ")
        terminal.type("perhaps", prompt="answer> ").shows("Answer with")
        terminal.type("yes", prompt="answer> ").shows("\npaid\n")

    assert 'pay {"amount": 5, "to": "ada"}' in terminal.screen
    assert "Paid 5 to ada." in terminal.screen


def test_an_approval_is_denied_with_a_reason(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type('call pay {"amount": 5}').type("deny too expensive", prompt="answer> ")
        terminal.shows("too expensive", 2)

    assert "denied" in terminal.screen


def test_edited_arguments_are_compared_with_the_tool_before_they_are_sent(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type('call pay {"amount": 5} then say paid')
        terminal.type('edit {"amount": 5', prompt="answer> ").shows("This is no JSON")
        terminal.type('edit {"amount": "much"}', prompt="answer> ").shows("amount: ")
        terminal.type("edit", prompt="answer> ")
        # What is there is changed, as in any line.
        wait_until(lambda: terminal.screen.endswith("}"), "the arguments to be there")
        terminal.press(b"\x15" + b'{"amount": 3, "to": "bob"}\n').shows("\npaid\n")

    assert "Paid 3 to bob." in terminal.screen


def test_arguments_that_are_edited_command_no_terminal_and_stay_what_they_are(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type('call pay {"amount": 1, "to": "\\u009b2J\\u202eada"} then say paid')
        terminal.type("edit", prompt="answer> ")
        wait_until(lambda: terminal.screen.endswith("}"), "the arguments to be there")
        terminal.press(b"\n").shows("\npaid\n")
        assert not re.search("[\u0080-\u009f\u202a-\u202e]", terminal.raw)
        session_id = session_of(terminal)

    with Client(stack.url) as client:
        [event] = client.events(session_id, types="action.result").events
    assert event.data["result"]["output"] == "Paid 1 to \u009b2J\u202eada."


def test_two_requests_are_answered_one_after_the_other(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type('call pay {"amount": 1} and pay {"amount": 2} then say both')
        terminal.type("1", prompt="answer> ").type("2", prompt="answer> ").shows("\nboth\n")

    assert "Paid 1 to ada." in terminal.screen
    assert "denied" in terminal.screen


def test_what_a_subagent_asks_is_answered(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type('call clerk {"message": "call pay {\\"amount\\": 3}"} then say settled')
        terminal.type("yes", prompt="answer> ").shows("\nsettled\n")

    assert "clerk works in ses_" in terminal.screen


def test_what_a_subagent_has_asked_is_answered_after_coming_back(stack: Stack) -> None:
    with chat(stack) as first:
        first.type('call clerk {"message": "call pay {\\"amount\\": 3}"} then say settled')
        first.type("/later", prompt="answer> ")
        session_id = session_of(first)

    with chat(stack, "--session", session_id) as second:
        second.type("edit", prompt="answer> ")
        wait_until(lambda: second.screen.endswith("}"), "the arguments to be there")
        second.press(b"\x15" + b'{"amount": 4}\n').shows("\nsettled\n")


def test_a_question_is_answered_in_words(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type('call ask_question {"prompt": "Which one?", "options": ["red", "blue"]} then say done')
        terminal.shows("Which one?").type("BLUE", prompt="answer> ").shows("\ndone\n")


def test_what_is_left_for_later_is_asked_again(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type('call pay {"amount": 5} then say paid').type("/later", prompt="answer> ")
        terminal.type("say anything").shows("waits for an answer")
        terminal.type("/answer").type("yes", prompt="answer> ").shows("\npaid\n")


def test_what_waits_is_withdrawn(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type('call pay {"amount": 5} then say paid').type("/cancel", prompt="answer> ").shows("Cancelled.")
        terminal.type("say next").shows("\nnext\n")
        terminal.type("/cancel").shows("nothing to cancel")


def test_an_interrupt_stops_the_turn_and_the_chat_goes_on(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type("drip 500 words delay 20").shows("w5 ")
        terminal.interrupt().shows("Cancelling").shows("Cancelled.")
        terminal.type("say next").shows("\nnext\n")


def test_an_interrupt_takes_back_a_message_that_waits_and_leaves_the_turn_of_another_alone(stack: Stack) -> None:
    with chat(stack) as terminal, Client(stack.url) as client:
        terminal.type("say one").shows("\none\n")
        session_id = session_of(terminal)
        turn = client.session({"sessionId": session_id}).send("drip 200 words delay 20")
        terminal.type("say two").shows("w5 ")
        terminal.interrupt().shows("Its sender has withdrawn").shows("> ", 4)

        assert turn.result().status == "completed"
        assert client.show(session_id)["counts"]["turns"] == 2


def test_a_second_interrupt_leaves_and_says_how_to_come_back(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.type("say one").shows("\none\n")
        terminal.type('call wait {"seconds": 2} then say slow').shows("wait {").shows("…")
        terminal.interrupt().shows("Cancelling").interrupt()

        assert terminal.ends() == 130
        assert "To come back: perdure chat --session ses_" in terminal.screen


def test_two_interrupts_at_the_prompt_leave(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.shows("> ").press(b"half a line").shows("half a line")
        terminal.interrupt().shows("Ctrl-C again").shows("> ", 2).interrupt()

        assert terminal.ends() == 130


def test_the_end_of_input_leaves(stack: Stack) -> None:
    with chat(stack) as terminal:
        terminal.shows("> ").press(b"\x04")

        assert terminal.ends() == 0


def test_a_session_is_taken_up_again_with_its_last_messages(stack: Stack) -> None:
    with chat(stack) as first:
        first.type("say one").shows("\none\n")
        first.type('call add {"a": 1, "b": 2} then say two').shows("\ntwo\n")
        session_id = session_of(first)

    with chat(stack, "--session", session_id, "--history", "1") as second:
        second.type("say three").shows("\nthree\n")
        second.type('call pay {"amount": 5} then say paid').type("/quit", prompt="answer> ").ends()
        assert "> say one" not in second.screen
        assert "> call add" in second.screen

    with chat(stack, "--session", session_id) as third:
        third.shows("> say one").type("yes", prompt="answer> ").shows("\npaid\n")
        third.type("/usage").shows("tool calls")


def test_a_turn_that_runs_is_watched_when_its_session_is_taken_up_again(stack: Stack) -> None:
    with Client(stack.url) as client:
        turn = client.session().send("drip 60 words delay 40")
        next(event for event in turn if event.type == "message.appended")

        with chat(stack, "--session", turn.session_id) as terminal:
            terminal.shows(WORDS.strip()).type("say next").shows("\nnext\n")


def test_what_others_say_in_the_session_is_shown_with_their_words(stack: Stack) -> None:
    with chat(stack) as terminal, Client(stack.url) as client:
        terminal.type("say one").shows("\none\n")
        client.session({"sessionId": session_of(terminal)}).send("say of another").result()
        terminal.type("say two").shows("\ntwo\n")

    assert "\n> say of another\nof another\n" in terminal.screen
    assert terminal.screen.count("say two") == 1


def test_another_agent_is_talked_with(stack: Stack) -> None:
    with chat(stack, "--agent", "clerk") as terminal:
        terminal.shows("clerk (").type("say hello").shows("\nhello\n")


def test_text_of_others_commands_no_terminal(stack: Stack) -> None:
    hostile = "say \x1b[2J\x1b]0;owned\x07 bell \x9b31m"
    with Client(stack.url) as client:
        session = client.session()
        session.send(hostile).result()
        session.send("call hostile {} then say done").result()

    with chat(stack, "--session", session.id or "") as terminal:
        terminal.shows("\ndone\n")
        terminal.type("call hostile {} then say again").shows("\nagain\n")

    assert "\\u001b[2J\\u001b]0;owned\\u0007 bell \\u009b31m" in terminal.screen
    assert "\x1b[2J" not in terminal.raw
    assert "\x1b]0" not in terminal.raw
    assert "\x07" not in terminal.raw
    assert "\x9b" not in terminal.raw
    assert "\u202e" not in terminal.raw


def test_no_colours_where_none_are_wanted(stack: Stack) -> None:
    with chat(stack, NO_COLOR="1") as terminal:
        terminal.type('call add {"a": 1, "b": 2} then say three').shows("\nthree\n").shows("> ", 2)

    assert "\x1b[2m" not in terminal.raw


# --- without a terminal ------------------------------------------------------------------------------------------


def piped(stack: Stack, lines: str, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command("chat", "--url", stack.url, *words),
        input=lines,
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_lines_from_a_pipe_are_said_one_after_the_other(stack: Stack) -> None:
    run = piped(stack, 'say one\ncall pay {"amount": 5} then say paid\nyes\n')

    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout
    assert run.stdout.startswith("one\n")
    assert "Paid 5 to ada." in run.stdout
    assert "\npaid\n" in run.stdout


def test_a_failed_turn_fails_a_program(stack: Stack) -> None:
    run = piped(stack, "fail 400\n")

    assert run.returncode == 1
    assert "MODEL_CALL_FAILED" in run.stdout


# --- nobody there ------------------------------------------------------------------------------------------------


def test_where_nothing_answers_one_sentence_says_what_to_do() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    run = subprocess.run(
        command("chat", "--url", url), env=clean_environment(), capture_output=True, text=True, check=False, timeout=60
    )

    assert run.returncode == 1
    assert (
        run.stderr
        == f"perdure: Nothing answers at {url}. `perdure dev` starts everything; --url names another place.\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--session", "ses_nowhere"], "404"),
        (["--agent", "nobody"], "There are: concierge, clerk. (404 agent_not_found)"),
        (["--url", "nonsense"], "must be a URL"),
    ],
)
def test_what_is_not_there_is_one_sentence(stack: Stack, words: list[str], sentence: str) -> None:
    run = piped(stack, "say one\n", *words)

    assert run.returncode == 1
    assert run.stderr.startswith("perdure: ")
    assert run.stderr.count("\n") == 1
    assert sentence in run.stderr


def test_a_key_comes_from_the_environment(make_stack: StackFactory, tmp_path: Path) -> None:
    import hashlib

    key = "sk-of-the-chat"
    keys = f"ann={hashlib.sha256(key.encode()).hexdigest()}"
    stack = make_stack(workers=0, agents="tests.client.agents:agent", environment={"PERDURE_API_KEYS": keys})

    with chat(stack, PERDURE_KEY=key) as terminal:
        terminal.shows("concierge").type("/quit").ends()
    refused = piped(stack, "say one\n")
    wrong = piped(stack, "say one\n", "--key", "another")

    assert key not in terminal.screen
    assert refused.stderr == f"perdure: The API at {stack.url} wants a key: give one with --key, or in PERDURE_KEY.\n"
    assert wrong.stderr == (
        f"perdure: The API at {stack.url} refuses this key: give another one with --key, or in PERDURE_KEY.\n"
    )


@pytest.mark.parametrize("answer", [b"<h1>It works!</h1>", b'{"ok": true}', None], ids=["a page", "another API", "404"])
def test_somebody_else_at_the_port_is_told_from_an_api(answer: bytes | None) -> None:
    class Else(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if answer else 404)
            self.end_headers()
            self.wfile.write(answer or b"")

    with ThreadingHTTPServer(("127.0.0.1", 0), Else) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        run = subprocess.run(
            command("chat", "--url", url),
            env=clean_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        server.shutdown()

    assert run.returncode == 1
    assert run.stderr.endswith(
        f"perdure: What answers at {url} is no API of Perdure. "
        "`perdure dev` starts everything; --url names another place.\n"
    )
