"""The commands about runs."""

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from perdure.bounds import printable

from .options import DataDir, operating, settings_with

if TYPE_CHECKING:
    from perdure.protocol.events import Event
    from perdure.settings import Settings
    from perdure.store.runs import RunRecord

run_commands = typer.Typer()

Format: TypeAlias = Literal["pretty", "json"]

_Id = Annotated[str, typer.Argument(help="The id of the run.")]


@run_commands.callback(invoke_without_command=True)
def runs(
    context: typer.Context,
    limit: Annotated[int, typer.Option(help="How many, newest first.", min=1, max=1_000)] = 20,
    name: Annotated[str | None, typer.Option(help="Only runs of this name.")] = None,
    status: Annotated[str | None, typer.Option(help="Only `active`, `completed` or `errored` runs.")] = None,
    data_dir: DataDir = None,
) -> None:
    """List the newest runs of the store, or start, show or cancel one."""
    context.obj = data_dir
    if context.invoked_subcommand is None:
        for line in listed(settings_with(data_dir=data_dir), limit, name, status):
            typer.echo(line)


@run_commands.command()
def start(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The name of the run.")],
    input: Annotated[str, typer.Option(help="The input, as JSON.")] = "{}",
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end, and print the result as JSON.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Start a run, and print its id."""
    # Standard output has nothing but the result.
    noted = functools.partial(typer.echo, err=True)
    said, ok = begun(operating(data_dir or context.obj), name, input, noted, wait=wait)
    typer.echo(said)
    if not ok:
        raise typer.Exit(1)


@run_commands.command()
def show(context: typer.Context, run: _Id, data_dir: DataDir = None) -> None:
    """Show a run: its input, what it waits for, and its result or error."""
    for line in shown(settings_with(data_dir=data_dir or context.obj), run):
        typer.echo(line)


@run_commands.command()
def cancel(context: typer.Context, run: _Id, data_dir: DataDir = None) -> None:
    """Stop a run, and what it waits for."""
    typer.echo(cancelled(operating(data_dir or context.obj), run))


def logs(
    run: _Id,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more until the run ends.")] = False,
    format: Annotated[str, typer.Option(help="`pretty` or `json`.")] = "pretty",
    data_dir: DataDir = None,
) -> None:
    """Show what a run has logged and done."""
    if format not in ("pretty", "json"):
        raise typer.BadParameter("the format is pretty or json")
    told(settings_with(data_dir=data_dir), run, typer.echo, follow=follow, pretty=format == "pretty")


def listed(settings: "Settings", limit: int, name: str | None, status: str | None) -> Sequence[str]:
    """The newest runs, one line each."""
    from perdure.errors import Invalid
    from perdure.store.open import checked_store
    from perdure.store.runs import RunQuery

    known: Any = status
    if known not in (None, "active", "completed", "errored"):
        raise Invalid("A run's status is one of active, completed, errored.")

    async def work() -> Sequence[str]:
        async with checked_store(settings.database) as store:
            page = await store.runs(RunQuery(name=name, status=known, limit=limit))
            lines: list[str] = []
            for each in page.runs:
                row = await store.session(each.run_id)
                needs = row.attention["code"] if row is not None and row.attention is not None else None
                about = f"needs attention: {needs}" if needs else _about(each)
                line = f"{each.run_id}  {each.status:<9}  {each.started_at}  {each.name}  {about}"
                lines.append(printable(line).rstrip())
            return lines

    return asyncio.run(work())


def _about(record: "RunRecord") -> str:
    if record.waiting_for is not None:
        return f"waits for {record.waiting_for}"
    return "" if record.duration_ms is None else f"{record.duration_ms} ms"


def shown(settings: "Settings", run_id: str) -> Sequence[str]:
    """What is known of the run, one field a line."""
    from perdure.store.open import checked_store

    async def work() -> Sequence[str]:
        async with checked_store(settings.database) as store:
            record, row = await store.run(run_id), await store.session(run_id)
            if record is None or row is None:
                raise _not_known(run_id)
            needs, error = row.attention, record.error or {}
            fields = {
                "id": record.run_id,
                "name": record.name,
                "status": record.status,
                "started": record.started_at,
                "ended": record.ended_at,
                "attempts": str(record.attempts),
                "input": json.dumps(record.input, ensure_ascii=False),
                "waits for": record.waiting_for,
                "needs attention": None if needs is None else f"{needs['code']}: {needs['message']}",
                "result": json.dumps(record.result, ensure_ascii=False) if record.status == "completed" else None,
                "error": f"{error.get('name')}: {error.get('message')}" if record.status == "errored" else None,
            }
            return [printable(f"{name:<17}{value}") for name, value in fields.items() if value is not None]

    return asyncio.run(work())


def _not_known(run_id: str) -> Exception:
    from perdure.errors import RunNotFound

    return RunNotFound(f"The store knows no run {run_id}.")


def begun(settings: "Settings", name: str, given: str, note: Callable[[str], None], *, wait: bool) -> tuple[str, bool]:
    """Start a run. What to print, and whether the run has not failed."""
    from perdure.agents.registry import load_runs
    from perdure.errors import Invalid
    from perdure.runtime.open import open_sessions
    from perdure.store.open import checked_store

    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        raise Invalid("--input is not JSON.") from None
    # The default of the setting is the demo, which has no runs.
    named = {"agents", "runs"} & settings.model_fields_set
    registry = load_runs(settings.runs, settings.agents) if named else None

    async def work() -> tuple[str, bool]:
        async with checked_store(settings.database) as store:
            runs = (await open_sessions(settings, store, runs=registry)).runs
            started = await runs.start(name, value)
            if not wait:
                return started.run_id, True
            note(f"Waiting; `perdure logs {started.run_id} --follow` shows what it does.")
            record = await runs.wait(started.run_id)
            if record.status == "completed":
                return json.dumps(record.result, ensure_ascii=False), True
            error = record.error or {}
            return printable(f"{record.run_id}  {error.get('name')}: {error.get('message')}"), False

    return asyncio.run(work())


def cancelled(settings: "Settings", run_id: str) -> str:
    """Cancel a run. The result is a sentence for the operator."""
    from perdure.runtime.open import open_sessions
    from perdure.store.open import checked_store

    async def work() -> str:
        async with checked_store(settings.database) as store:
            accepted = await (await open_sessions(settings, store)).runs.cancel(run_id)
            return "It will be stopped; `perdure logs` shows run.cancelled." if accepted else "It has ended before."

    return asyncio.run(work())


def told(settings: "Settings", run_id: str, say: Callable[[str], None], *, follow: bool, pretty: bool) -> None:
    """Print each event of the run; with `follow`, until it has ended."""
    from perdure.store.follow import events_of
    from perdure.store.open import checked_store

    async def work() -> None:
        async with checked_store(settings.database) as store:
            if await store.run(run_id) is None:
                raise _not_known(run_id)
            async for event in events_of(store, run_id, follow=follow):
                content = json.dumps(event.model_dump(mode="json", exclude_none=True), ensure_ascii=False)
                say(printable(_line(event) if pretty else content))

    asyncio.run(work())


def _line(event: "Event") -> str:
    data: dict[str, Any] = event.data or {}
    if event.type == "run.log":
        attributes: dict[str, Any] = data.get("attributes") or {}
        more = "".join(f" {name}={value}" for name, value in attributes.items())
        return f"{event.at}  {data['level']:<5}  {data['message']}{more}"
    return f"{event.at}  {event.type}  {_about_event(event.type, data)}".rstrip()


def _about_event(type: str, data: dict[str, Any]) -> str:
    """What the line of an event says beside its type."""
    match type:
        case "input.requested":
            # `perdure logs` is for people: this is what they answer, and with which id.
            return ", ".join(f"{each['prompt']} ({each['requestId']})" for each in data["requests"])
        case "input.resolved":
            return f"{data['status']} ({data['requestId']})"
        case "session.attention" | "delivery.refused":
            return f"{data['code']}: {data['message']}"
        case "session.recovered":
            return str(data["code"])
        case "subagent.called":
            return f"{data['name']} ({data['childSessionId']})"
        case _:
            error: dict[str, Any] = data.get("error") or {}
            failed = f"{error.get('name')}: {error.get('message')}" if error else ""
            return "  ".join(filter(None, (data.get("name") or data.get("waitingFor"), failed)))
