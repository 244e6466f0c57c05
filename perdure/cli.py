"""The command line. What a command needs is imported inside it, so that each starts quickly."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from perdure.settings import Settings

app = typer.Typer(
    name="perdure",
    help="Durable agent sessions in Python, on Temporal.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

session_commands = typer.Typer()
app.add_typer(session_commands, name="sessions")

Agents = Annotated[
    str | None, typer.Option(envvar="PERDURE_AGENTS", help="module:attribute[,module:attribute…]; the first is default")
]
Host = Annotated[str, typer.Option(envvar="PERDURE_HOST", help="Where the API listens.")]
Port = Annotated[int, typer.Option(envvar="PERDURE_PORT", help="The port of the API.")]
LogLevel = Annotated[str, typer.Option(envvar="PERDURE_LOG_LEVEL", help="debug, info, warning or error.")]
ReadyFile = Annotated[
    Path | None, typer.Option(envvar="PERDURE_READY_FILE", help="Holds our process id while we are ready to work.")
]


def main(words: Sequence[str] | None = None) -> None:
    """Run the command that these words name, or the one that we were called with.

    An error is one sentence and exit code 1.
    """
    from perdure.errors import PerdureError

    try:
        app(words)
    except KeyboardInterrupt:
        sys.exit(130)
    except PerdureError as error:
        _refuse(error.message)
    except Exception as error:
        if _debugging():
            raise
        _refuse(f"{_told(error)} (PERDURE_LOG_LEVEL=debug shows where)")


@app.command()
def dev(
    agents: Agents = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    temporal_port: Annotated[int, typer.Option(help="The port of Temporal's dev server.")] = 7233,
    ui_port: Annotated[int, typer.Option(help="The port of Temporal's UI.")] = 8233,
    data_dir: Annotated[Path, typer.Option(envvar="PERDURE_DATA_DIR", help="Where sessions and logs are kept.")] = Path(
        ".perdure"
    ),
    log_level: LogLevel = "info",
) -> None:
    """Start everything on this machine: Temporal's dev server, a worker and the API."""
    from perdure.runtime import dev

    options = dev.DevOptions(
        data_dir=data_dir,
        agents=agents,
        host=host,
        port=port,
        temporal_port=temporal_port,
        ui_port=ui_port,
        log_level=log_level,
    )
    dev.run(options, typer.echo)


@app.command()
def worker(agents: Agents = None, log_level: LogLevel = "info", ready_file: ReadyFile = None) -> None:
    """Run a worker against PERDURE_TEMPORAL_ADDRESS and PERDURE_DATABASE_URL."""
    from perdure.runtime import logs, shells

    logs.configure(log_level)
    shells.run("worker", _settings(agents=agents, log_level=log_level), ready_file)


@app.command()
def api(
    agents: Agents = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    log_level: LogLevel = "info",
    ready_file: ReadyFile = None,
) -> None:
    """Serve HTTP against PERDURE_TEMPORAL_ADDRESS and PERDURE_DATABASE_URL."""
    from perdure.runtime import logs, shells

    logs.configure(log_level)
    shells.run("api", _settings(agents=agents, host=host, port=port, log_level=log_level), ready_file)


@app.command()
def migrate() -> None:
    """Create or upgrade the schema of the store."""
    from perdure.runtime import operate

    operate.migrate(_settings())
    typer.echo("The store is up to date.")


@session_commands.callback(invoke_without_command=True)
def sessions(context: typer.Context, limit: Annotated[int, typer.Option(help="How many, newest first.")] = 20) -> None:
    """List the newest sessions of the store, or do something with one."""
    if context.invoked_subcommand is not None:
        return
    from perdure.runtime import operate

    for line in operate.sessions(_settings(), limit):
        typer.echo(line)


@session_commands.command()
def cancel(
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    turn: Annotated[str | None, typer.Option(help="Only if this turn runs, as `turn_3`.")] = None,
) -> None:
    """Stop the turn that a session runs, or withdraw what it waits for."""
    from perdure.runtime import operate

    typer.echo(operate.cancel(_settings(), session, turn))


@app.command()
def tail(
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    start: Annotated[int, typer.Option(help="The index of the first event.")] = 0,
    follow: Annotated[bool, typer.Option(help="Wait for more until the session is over.")] = True,
) -> None:
    """Show the events of a session as they happen, one JSON object per line."""
    from perdure.runtime import operate

    operate.tail(_settings(), session, start, typer.echo, follow=follow)


@app.command(name="api-key")
def api_key(name: Annotated[str, typer.Argument(help="Who will use the key.")]) -> None:
    """Make a key for the API. It is shown once; the server keeps its hash only."""
    from perdure.runtime import operate

    key, entry = operate.new_api_key(name)
    typer.echo(f"key (shown once, for the caller):      {key}")
    typer.echo(f"entry (for PERDURE_API_KEYS):          {entry}")


@app.command()
def version() -> None:
    """Say which version this is."""
    from importlib.metadata import version

    typer.echo(f"perdure {version('perdure')}")


def _settings(**given: Any) -> "Settings":
    """The environment, with the options that were given laid over it."""
    from pydantic import ValidationError

    from perdure.errors import Invalid
    from perdure.settings import Settings

    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        raise Invalid(f"PERDURE_{name}: {first['msg']}.") from None


def _debugging() -> bool:
    """Whether whoever runs this wants to see tracebacks."""
    import logging
    import os

    asked = os.environ.get("PERDURE_LOG_LEVEL", "").lower() == "debug"
    return asked or logging.getLogger().isEnabledFor(logging.DEBUG)


def _told(error: Exception) -> str:
    """An exception as one line."""
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _refuse(sentence: str) -> None:
    typer.echo(f"perdure: {sentence}", err=True)
    sys.exit(1)
