"""The client without an event loop, from one thread and from several."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from perdure.client import Client, ClientError, Turn
from tests.support.processes import wait_until
from tests.support.stack import Stack


@pytest.fixture
def client(stack: Stack) -> Generator[Client]:
    with Client(stack.url) as client:
        yield client


def test_a_session_is_talked_with(client: Client) -> None:
    session = client.session()
    turn = session.send("drip 3 words")

    types = [event.type for event in turn]
    second = session.send("say two").result()

    assert types[-1] == "session.waiting"
    assert turn.result().message == "w0 w1 w2 "
    assert (second.message, second.session_id) == ("two", session.id)
    assert "AsyncSession" not in repr(session)


def test_an_approval_is_answered(client: Client) -> None:
    session = client.session()
    (request,) = session.send('call pay {"amount": 5} then say paid').result().input_requests

    result = session.send(input_responses=[{"requestId": request["requestId"], "optionId": "approve"}]).result()

    assert result.message == "paid"


def test_a_turn_that_is_closed_half_read_disturbs_nothing(client: Client) -> None:
    session = client.session()
    with session.send("drip 40 words delay 20") as turn:
        next(turn)

    assert session.send("say next").result().message == "next"
    with pytest.raises(ClientError, match="closed before its end"):
        next(turn)


def test_a_turn_that_is_dropped_half_read_disturbs_nothing(client: Client) -> None:
    session = client.session()
    next(session.send("drip 40 words delay 20"))
    gc.collect()

    assert session.send("say next").result().message == "next"


def test_a_cancelled_turn_says_so(client: Client) -> None:
    turn = client.session().send("drip 500 words delay 20")
    next(event for event in turn if event.type == "message.appended")

    assert turn.cancel() == "accepted"
    assert turn.result().status == "cancelled"


def test_threads_share_a_client(client: Client) -> None:
    def talk(number: int) -> tuple[str | None, str | None]:
        session = client.session()
        return session.send(f"say {number}").result().message, session.send(f"say again {number}").result().message

    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(talk, range(8)))

    assert said == [(str(number), f"again {number}") for number in range(8)]


def indexes_of(turn: Turn) -> list[int]:
    return [event.index or 0 for event in turn]


def test_threads_share_a_turn(client: Client) -> None:
    turn = client.session().send("drip 40 words")

    with ThreadPoolExecutor(4) as threads:
        shares = list(threads.map(indexes_of, [turn] * 4))

    indexes = sorted(index for share in shares for index in share)
    assert indexes == list(range(len(indexes)))
    assert turn.result().status == "completed"


def test_what_is_listed_may_be_left_in_the_middle(client: Client) -> None:
    for number in range(3):
        client.session().send(f"say {number}").result()

    listed = client.sessions()

    assert next(listed)["sessionId"]
    assert len(list(client.sessions(limit=2))) == 2
    assert client.show(next(listed)["sessionId"])["status"] == "waiting"


def test_live_events_end_when_they_are_left(client: Client) -> None:
    session = client.session()
    session.send("say one").result()

    first = next(session.events(0))

    assert (first.type, first.index) == ("session.started", 0)


def test_closing_ends_what_other_threads_wait_for(stack: Stack) -> None:
    client = Client(stack.url)
    turn = client.session().send('call wait {"seconds": 60}')
    next(event for event in turn if event.type == "actions.requested")
    failures: list[ClientError] = []

    def read() -> None:
        try:
            turn.result()
        except ClientError as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    client.close()
    reader.join(30)

    assert [each.code for each in failures] == ["closed"]
    client.close()
    with pytest.raises(ClientError, match="was closed"):
        client.health()


_INTERRUPTED = """
import sys
from perdure.client import Client

with Client(sys.argv[1]) as client:
    session = client.session()
    turn = session.send('call wait {"seconds": 3} then drip 3 words')
    try:
        print("reading", flush=True)
        turn.result()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(turn.result().message, flush=True)
"""


def test_an_interrupt_ends_the_waiting_and_not_the_turn(stack: Stack) -> None:
    program = [sys.executable, "-c", _INTERRUPTED, stack.url]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        os.kill(process.pid, signal.SIGINT)
        rest = process.stdout.read()

    assert rest == "interrupted\nw0 w1 w2 \n"
    assert process.returncode == 0


def test_a_client_that_nobody_closes_keeps_no_program_alive(stack: Stack) -> None:
    program = f"from perdure.client import Client\nturn = Client({stack.url!r}).session().send('say one')\nnext(turn)"

    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)

    wait_until(lambda: process.poll() is not None, "the program to end")
    assert (process.returncode, process.communicate()[1]) == (0, "")
