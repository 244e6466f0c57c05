"""The commands. Each imports its modules when it runs, so that it starts fast."""

import atexit
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .attempts import attempts, leases, timeline
from .chat.command import chat, talk_beside_dev
from .checkpoints import checkpoints, plan, rollback
from .deliveries import deliveries, withdraw
from .deploy import deploy_commands
from .doctor.command import doctor
from .options import DataDir, operating, settings_with
from .project.scaffold import init
from .runs import logs as run_logs
from .runs import run_commands
from .trace.command import trace

if TYPE_CHECKING:
    pass

app = typer.Typer(
    name="perdure",
    help="Durable agent sessions in Python, on Temporal.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

session_commands = typer.Typer()
app.command()(init)
app.command()(doctor)
app.add_typer(session_commands, name="sessions")
app.add_typer(deploy_commands, name="deploy")
app.add_typer(run_commands, name="runs")
app.command(name="logs")(run_logs)
app.command()(chat)
app.command()(deliveries)
app.command()(withdraw)
app.command()(attempts)
app.command()(leases)
app.command()(timeline)
app.command()(trace)
app.command()(plan)
app.command()(checkpoints)
app.command()(rollback)

dead_letter_commands = typer.Typer()
app.add_typer(dead_letter_commands, name="dead-letters")

Agents = Annotated[
    str | None, typer.Option(envvar="PERDURE_AGENTS", help="module:attribute[,module:attribute…]; the first is default")
]
Host = Annotated[str, typer.Option(envvar="PERDURE_HOST", help="Where the API listens.")]
Port = Annotated[int, typer.Option(envvar="PERDURE_PORT", help="The port of the API.", min=0, max=65_535)]
LogLevel = Annotated[str, typer.Option(envvar="PERDURE_LOG_LEVEL", help="debug, info, warning or error.")]
Limit = Annotated[int, typer.Option(help="How many, newest first.", min=1, max=1_000_000)]
ReadyFile = Annotated[
    Path | None, typer.Option(envvar="PERDURE_READY_FILE", help="A file that has our process id while we are ready.")
]


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run the command in `words`, or in the arguments of the process, and end the process with its exit code."""
    code = 0
    try:
        run(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    _end(code)


def _end(code: int) -> NoReturn:
    """End the process, with everything written.

    Temporal's client has threads of its own. One of them that returns a result to Python while the interpreter shuts
    down aborts the process, which then looks like a crash. So the interpreter does not shut down.
    """
    # Libraries of the author's tools may have something to write at exit.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    logging.shutdown()
    try:
        sys.stdout.flush()
    except OSError:
        code = code or 1
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def run(words: Sequence[str] | None = None) -> None:
    """Run the command in this process, which goes on.

    An error prints one sentence and exits with code 1.
    """
    from perdure.errors import PerdureError

    try:
        app(words)
    except KeyboardInterrupt:
        sys.exit(130)
    except PerdureError as error:
        place = _place(error)
        _refuse(f"{error.message} ({place})" if place else error.message)
    except Exception as error:
        requested = os.environ.get("PERDURE_LOG_LEVEL", "").lower() == "debug"
        if requested or logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        place, text = _place(error), str(error).partition("\n")[0]
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        _refuse(f"{what} ({f'{place}; ' if place else ''}PERDURE_LOG_LEVEL=debug shows where)")


@app.command()
def dev(
    agents: Agents = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    temporal_port: Annotated[int, typer.Option(help="The port of Temporal's dev server.", min=1, max=65_535)] = 7233,
    ui_port: Annotated[int, typer.Option(help="The port of Temporal's UI.", min=1, max=65_535)] = 8233,
    data_dir: DataDir = None,
    log_level: LogLevel = "info",
    durable: Annotated[
        bool, typer.Option("--durable", help="Wait for the disk at each commit: a power cut loses nothing either.")
    ] = False,
    reload: Annotated[
        bool, typer.Option(help="Load the code again when a Python file here, or of the agents, has changed.")
    ] = True,
    kill: Annotated[
        str | None, typer.Option(help="Start nothing; kill -9 the `worker` or the `api` of the running `perdure dev`.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Then talk with it here; what it prints is in the logs.")
    ] = False,
) -> None:
    """Start everything on this machine: Temporal's dev server, a worker and the API."""
    from perdure.dev import machine

    settings = settings_with(data_dir=data_dir)
    if kill is not None:
        typer.echo(machine.kill(settings.data_dir, kill))
        return
    if chat:
        # The same words: whatever options there are.
        words = [word for word in sys.argv[2:] if word != "--chat"]
        url = machine.DevOptions(settings.data_dir, agents, host, port).url
        raise typer.Exit(talk_beside_dev(words, settings.data_dir, url))
    addresses = (host, port, temporal_port, ui_port)
    durable = durable or settings.durable
    options = machine.DevOptions(settings.data_dir, agents, *addresses, log_level, durable, reload)
    machine.run(options, typer.echo)


@app.command()
def worker(
    agents: Agents = None,
    log_level: LogLevel = "info",
    ready_file: ReadyFile = None,
    data_dir: DataDir = None,
    pool: Annotated[
        list[str] | None, typer.Option(help="Run only the tools of this pool; several times for several pools.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run nothing: load the agents, and say whether a worker would start.")
    ] = False,
) -> None:
    """Run a worker against PERDURE_TEMPORAL_ADDRESS and PERDURE_DATABASE_URL."""
    from perdure.telemetry import logs

    from . import serve

    logs.configure(log_level)
    pools = ",".join(pool) if pool else None
    settings = settings_with(agents=agents, log_level=log_level, data_dir=data_dir, pools=pools)
    if check:
        serve.check(settings)
        typer.echo("The agents and the runs can be served.")
        return
    serve.run("worker", settings, ready_file)


@app.command()
def api(
    agents: Agents = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    log_level: LogLevel = "info",
    ready_file: ReadyFile = None,
    data_dir: DataDir = None,
) -> None:
    """Serve HTTP against PERDURE_TEMPORAL_ADDRESS and PERDURE_DATABASE_URL."""
    from perdure.telemetry import logs

    from . import serve

    logs.configure(log_level)
    settings = settings_with(agents=agents, host=host, port=port, log_level=log_level, data_dir=data_dir)
    serve.run("api", settings, ready_file)


@app.command()
def migrate(data_dir: DataDir = None) -> None:
    """Create or upgrade the schema of the store, and register what Temporal's UI can search sessions by."""
    from . import operator

    settings = operating(data_dir)
    operator.migrate(settings)
    typer.echo("The store is up to date.")
    typer.echo(operator.register_search_attributes(settings))


@session_commands.callback(invoke_without_command=True)
def sessions(
    context: typer.Context,
    limit: Limit = 20,
    status: Annotated[
        str | None, typer.Option(help="Only sessions with this status, for example `needs_attention`.")
    ] = None,
    parent: Annotated[str | None, typer.Option(help="Only sessions that this session has started.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only sessions with this tag, for example `job:nightly`.")] = None,
    find: Annotated[str | None, typer.Option(help="Only sessions with this in their id, title, agent or tags.")] = None,
    data_dir: DataDir = None,
) -> None:
    """List the newest sessions of the store, or do something with one."""
    # `perdure sessions --data-dir X cancel …` is the same as the option after `cancel`.
    context.obj = data_dir
    if context.invoked_subcommand is not None:
        return
    from . import operator

    for line in operator.sessions(settings_with(data_dir=data_dir), limit, status, parent, tag=tag, find=find):
        typer.echo(line)


@session_commands.command()
def cancel(
    context: typer.Context,
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    turn: Annotated[str | None, typer.Option(help="Only if this turn runs, as `turn_3`.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Stop the turn that a session runs, or withdraw what it waits for."""
    from . import operator

    typer.echo(operator.cancel(operating(data_dir or context.obj), session, turn))


@session_commands.command()
def fork(
    context: typer.Context,
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    turn: Annotated[str | None, typer.Option(help="The last turn that both sessions share: 3 or turn_3.")] = None,
    step: Annotated[
        int | None, typer.Option(help="The last step of it that they share. By default all.", min=0, max=2**31 - 1)
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Or the checkpoint at which the fork begins.")] = None,
    agents: Agents = None,
    data_dir: DataDir = None,
) -> None:
    """Start a session that shares the first turns of another one; it belongs to the same owner."""
    from . import operator

    session_id, token = operator.fork(operating(data_dir or context.obj, agents), session, turn, step, checkpoint)
    typer.echo(f"session:             {session_id}")
    typer.echo(f"continuation token:  {token}")


@session_commands.command()
def export(
    context: typer.Context,
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    data_dir: DataDir = None,
) -> None:
    """Write a session to the standard output, as JSON Lines: `perdure sessions export ID > FILE`."""
    from . import operator

    operator.export(settings_with(data_dir=data_dir or context.obj), session, sys.stdout.buffer.write)
    sys.stdout.buffer.flush()


@session_commands.command(name="import")
def import_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A file that `perdure sessions export` has written.")],
    principal: Annotated[
        str | None, typer.Option(help="Who owns the new session, as `api-key:billing`.", show_default="as exported")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also when the file was imported before.")] = False,
    token: Annotated[bool, typer.Option("--token", help="Print the continuation token as well.")] = False,
    agents: Agents = None,
    data_dir: DataDir = None,
) -> None:
    """Create a session from an export, and print its id."""
    from . import operator

    session_id, secret = operator.import_(operating(data_dir or context.obj, agents), file, principal, again=again)
    typer.echo(session_id)
    if token:
        typer.echo(secret)


@session_commands.command()
def delete(
    context: typer.Context,
    session: Annotated[str | None, typer.Argument(help="The id of the session.")] = None,
    principal: Annotated[
        str | None,
        typer.Option(help="Instead: all sessions and streams that this principal owns, as `api-key:billing`."),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Delete a session for good, or all of a principal, with its streams. A turn that runs is stopped first."""
    from . import deletion

    if (session is None) == (principal is None):
        raise typer.BadParameter("name a session, or a --principal")
    deletion.delete(operating(data_dir or context.obj), session, principal, typer.echo)


@session_commands.command()
def repair(
    context: typer.Context,
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    retry: Annotated[bool, typer.Option("--retry", help="Retry now what failed.")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Continue from the content of the store.")] = False,
    restore: Annotated[
        str | None, typer.Option(help="Continue as after this turn, `turn_3` for one: prompts leave out later turns.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Continue without the history.")] = False,
    fail: Annotated[bool, typer.Option("--fail", help="End the session as failed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Also when no worker would run it now.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Repair a session that needs attention."""
    from . import operator

    ways = {"retry": retry, "rebuild": rebuild, "restore": restore is not None, "fresh": fresh, "fail": fail}
    match [how for how, is_chosen in ways.items() if is_chosen]:
        case ["retry" | "rebuild" | "fail" as how]:
            typer.echo(operator.repair(operating(data_dir or context.obj), session, how, sure=yes))
        case ["restore" | "fresh"]:
            typer.echo(operator.restore(operating(data_dir or context.obj), session, restore, sure=yes))
        case _:
            raise typer.BadParameter("choose one of --retry, --rebuild, --restore, --fresh and --fail")


@session_commands.command()
def reconcile(
    context: typer.Context,
    end_orphans: Annotated[bool, typer.Option("--end-orphans", help="End workflows without a session.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Also when most running workflows belong to no session.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Compare the store and Temporal, start sessions without a workflow, and print the differences."""
    from . import operator

    for line in operator.reconcile(operating(data_dir or context.obj), end_orphans=end_orphans, sure=yes):
        typer.echo(line)


@dead_letter_commands.callback(invoke_without_command=True)
def dead_letters(
    context: typer.Context,
    limit: Limit = 20,
    requeued: Annotated[bool, typer.Option("--requeued", help="Those that were requeued, not the open ones.")] = False,
    data_dir: DataDir = None,
) -> None:
    """List the turns that failed, or have the messages of one delivered again."""
    context.obj = data_dir
    if context.invoked_subcommand is not None:
        return
    from . import operator

    for line in operator.dead_letters(settings_with(data_dir=data_dir), limit, "requeued" if requeued else "open"):
        typer.echo(line)


@dead_letter_commands.command()
def requeue(
    context: typer.Context,
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    turn: Annotated[str, typer.Argument(help="The turn that failed, as `turn_3`.")],
    data_dir: DataDir = None,
) -> None:
    """Deliver the messages of a failed turn to its session again, once."""
    from . import operator

    typer.echo(operator.requeue(operating(data_dir or context.obj), session, turn))


@app.command()
def tail(
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    start: Annotated[int, typer.Option(help="The index of the first event.", min=0, max=2**53)] = 0,
    follow: Annotated[bool, typer.Option(help="Wait for more events until the session ends.")] = True,
    tree: Annotated[
        bool, typer.Option("--tree", help="Also the events of all sessions that were started from it.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Show the events of a session as they happen, one JSON object per line."""
    from . import operator

    if tree:
        if start:
            raise typer.BadParameter("--start is an index of one session; it cannot be used with --tree")
        operator.tail_family(settings_with(data_dir=data_dir), session, typer.echo, follow=follow)
        return
    operator.tail(settings_with(data_dir=data_dir), session, start, typer.echo, follow=follow)


@app.command(name="api-key")
def api_key(
    name: Annotated[str, typer.Argument(help="The name of the key's user.")],
    role: Annotated[list[str] | None, typer.Option(help="A role of the key's user; may be repeated.")] = None,
    attribute: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, as `responders.attribute` asks for it; may be repeated.")
    ] = None,
) -> None:
    """Make a key for the API. It is shown once; the server keeps its hash only."""
    from . import operator

    key, entry = operator.new_api_key(name, [*(f"role={each}" for each in role or ()), *(attribute or ())])
    typer.echo(f"key (shown once, for the caller):      {key}")
    typer.echo(f"entry (for PERDURE_API_KEYS):          {entry}")


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version

    typer.echo(f"perdure {version('perdure')}")


def _place(error: Exception) -> str | None:
    """The line of the author's module that raised the error, if it was raised while agents were loaded."""
    from perdure.agents import registry

    frames = traceback.extract_tb(error.__traceback__)
    loaded = max((number for number, frame in enumerate(frames) if frame.filename == registry.__file__), default=None)
    if loaded is None:
        return None
    here, ours = Path.cwd(), Path(__file__).parent
    for frame in reversed(frames[loaded + 1 :]):
        file = Path(frame.filename)
        if file.is_relative_to(here) and not file.is_relative_to(ours) and "site-packages" not in file.parts:
            return f"{file.relative_to(here)}, line {frame.lineno}"
    return None


def _refuse(sentence: str) -> None:
    typer.echo(f"perdure: {sentence}", err=True)
    sys.exit(1)
