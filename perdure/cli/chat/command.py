"""`perdure chat`, and what `perdure dev --chat` does before it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.bounds import printable

if TYPE_CHECKING:
    from perdure.client import Client, ClientError

    from .screen import Screen

_DEFAULT = "http://127.0.0.1:8000"
#: Seconds of an outage before it is told: a line about a restart, which is shorter, would stand inside a word.
_SHORT = 3.0
_ELSEWHERE = "`perdure dev` starts everything; --url names another place."
_READY = "Perdure is ready."
_STOPPING = 20.0
#: Bytes of a log that is put aside.
_LARGE = 1_048_576

Url = Annotated[
    str | None,
    typer.Option(
        envvar="PERDURE_URL",
        help="Where the API is.",
        show_default=f"that of the `perdure dev` of this folder, else {_DEFAULT}",
        show_envvar=True,
    ),
]


def chat(
    url: Url = None,
    key: Annotated[
        str | None, typer.Option(envvar="PERDURE_KEY", help="An API key or a token.", show_envvar=True)
    ] = None,
    session: Annotated[str | None, typer.Option(help="Come back to this session.")] = None,
    agent: Annotated[str | None, typer.Option(help="The agent of a new session.", show_default="the first one")] = None,
    history: Annotated[int, typer.Option(help="How many messages of the session are shown first.", min=0)] = 10,
) -> None:
    """Talk with a session in the terminal, here or on another machine."""
    code = talk(url or _beside_dev() or _DEFAULT, key, session=session, agent=agent, history=history)
    if code:
        raise typer.Exit(code)


def _beside_dev() -> str | None:
    """Where the API of the `perdure dev` is that runs here: another port may be that of somebody else."""
    from perdure.cli.options import settings_with
    from perdure.runtime.local import read_api_url

    return read_api_url(settings_with().data_dir)


def talk(
    url: str,
    key: str | None = None,
    *,
    session: str | None = None,
    agent: str | None = None,
    history: int = 10,
    farewell: str = "The session goes on. To come back:",
) -> int:
    """Talk until the person leaves; the exit code."""
    from perdure.client import Client, ClientError

    from .conversation import Chat, refusal
    from .screen import Lines, Screen

    live = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen.of_process(live=live)
    try:
        with Client(url, key=key, outage=None, on_outage=_Outages(screen)) as client:
            if not _is_perdure(client):
                typer.echo(f"perdure: What answers at {printable(url)} is no API of Perdure. {_ELSEWHERE}", err=True)
                return 1
            _greet(client, screen, agent if session is None else None, live=live)
            come_back = [] if url == _DEFAULT else ["--url", url]
            lines = Lines(screen, live=live)
            chat = Chat(client, screen, lines, agent=agent, come_back=come_back, farewell=farewell)
            if session is not None and not chat.resume(session, history):
                return 0
            return chat.run()
    except ClientError as error:
        typer.echo(f"perdure: {printable(_absent(url, key, error) or refusal(error))}", err=True)
        return 1


def _is_perdure(client: "Client") -> bool:
    """Whether it is one of us who answers: on a common port it may be anybody."""
    from perdure.client import ClientError

    try:
        return "workflowId" in client.health()
    except ClientError as error:
        if error.status in (404, 405) or error.code in ("unreadable", "not_a_stream"):
            return False
        raise


def _greet(client: "Client", screen: "Screen", agent: str | None, *, live: bool) -> None:
    """Say who is there."""
    from perdure.client import ClientError

    try:
        info = client.info(agent)
    except ClientError as error:
        if error.code != "agent_not_found":
            raise
        raise ClientError(f"{error.message}{_those(client)}", status=error.status, code=error.code) from None
    if live:
        about: dict[str, Any] = info.get("agent") or {}
        model: dict[str, Any] = about.get("model") or {}
        known = f" ({model['id']})" if "id" in model else ""
        screen.line(f"{about.get('name')}{known}. /help lists commands.", "dim")


def _those(client: "Client") -> str:
    """Which agents there are; nothing where the API is older and does not say."""
    from perdure.client import ClientError

    try:
        agents: list[dict[str, Any]] = client.request("GET", "/v1/agents")["agents"]
    except (ClientError, KeyError):
        return ""
    return f" There are: {', '.join(str(each.get('name')) for each in agents)}."


def _absent(url: str, key: str | None, error: "ClientError") -> str | None:
    """The sentence for somebody who has called the wrong place, or without a key."""
    match error.status:
        case None if error.passing:
            return f"Nothing answers at {url}. {_ELSEWHERE}"
        case 401 if key:
            return f"The API at {url} refuses this key: give another one with --key, or in PERDURE_KEY."
        case 401:
            return f"The API at {url} wants a key: give one with --key, or in PERDURE_KEY."
        case _:
            return None


class _Outages:
    """Tells of an outage that is no mere restart."""

    def __init__(self, screen: "Screen") -> None:
        self._screen = screen
        self._timer: threading.Timer | None = None
        self._told = False

    def __call__(self, error: "ClientError | None") -> None:
        if self._timer is not None:
            self._timer.cancel()
        if error is not None:
            self._timer = threading.Timer(_SHORT, self._tell)
            self._timer.daemon = True
            self._timer.start()
        elif self._told:
            self._told = False
            self._screen.line("The API is back.", "dim")

    def _tell(self) -> None:
        self._told = True
        self._screen.line("The API is away; it is tried again.", "dim")


# --- with `perdure dev` --------------------------------------------------------------------------------------------


def talk_beside_dev(words: Sequence[str], data_dir: Path, url: str) -> int:
    """Run `perdure dev` with these words, its output in a file, and talk until the person leaves; the exit code."""
    log = data_dir.absolute() / "logs" / "dev.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > _LARGE:
        log.replace(log.with_suffix(".log.1"))
    # Another one may write there: this one will be told that the folder is taken.
    begin = log.stat().st_size if log.exists() else 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        # The terminal is closed: what was started goes with it.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with _running(["dev", *words], log) as dev:
        typer.echo(f"Starting. What is logged is in {log.parent}.")
        while dev.poll() is None and _READY not in _since(log, begin):
            time.sleep(0.05)
        if dev.poll() is not None:
            said = _since(log, begin).strip().splitlines() or ["It has ended."]
            typer.echo(said[-1], err=True)
            return 1
        farewell = "The session is kept. To come back, start `perdure dev` again, and then:"
        return talk(url, os.environ.get("PERDURE_KEY"), farewell=farewell)


def _since(log: Path, begin: int) -> str:
    """What was written from there on."""
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


@contextlib.contextmanager
def _running(words: Sequence[str], log: Path) -> Generator["subprocess.Popen[bytes]"]:
    """The command as a process of its own, which Ctrl-C does not reach, and which ends with this one."""
    from perdure.dev.supervisor import command, die_with_parent, kill_group

    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        process = subprocess.Popen(
            command(words[0], *words[1:]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOPPING)
        finally:
            kill_group(process.pid)
