"""The commands about how far a session has come: its plan, its checkpoints, and the way back to one."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from perdure.bounds import printable, quoted

from .options import DataDir, as_table, settings_with

if TYPE_CHECKING:
    from perdure.protocol.deliveries import Principal
    from perdure.protocol.wire import JsonObject
    from perdure.runtime.progress import Checkpoints
    from perdure.settings import Settings
    from perdure.store.values import SessionRow

T = TypeVar("T")

Session = Annotated[str, typer.Argument(help="The id of the session.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
#: Checkpoints that are read at once.
_PAGE = 200


def plan(
    session: Session,
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON object; null without a plan.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Show the plan that the model has made, and how far it has come."""
    made = _with_store(settings_with(data_dir=data_dir), lambda checkpoints: checkpoints.plan(session))
    for line in [json.dumps(made)] if as_json else _plan_lines(made):
        typer.echo(line)


def checkpoints(session: Session, as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """List the checkpoints of a session, newest first."""

    async def work(checkpoints: "Checkpoints") -> "list[JsonObject]":
        from perdure.runtime.progress import shown

        found: list[JsonObject] = []
        cursor: str | None = None
        while True:
            page = await checkpoints.list(session, limit=_PAGE, cursor=cursor)
            found += map(shown, page.checkpoints)
            cursor = page.next_cursor
            if cursor is None:
                return found

    found = _with_store(settings_with(data_dir=data_dir), work)
    for line in map(json.dumps, found) if as_json else as_table(_HEAD, [_cells(each) for each in found]):
        typer.echo(line)


def rollback(
    session: Session,
    checkpoint: Annotated[str, typer.Argument(help="The id of the checkpoint, as `perdure checkpoints` lists it.")],
    include_logs: Annotated[
        bool, typer.Option("--include-logs", help="Take back the slices that keep a log as well.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Set the state of a session back to a checkpoint. What was said and done since is not undone."""
    _with_store(
        settings_with(data_dir=data_dir),
        lambda checkpoints: checkpoints.roll_back(session, checkpoint, include_logs=include_logs),
    )
    typer.echo(f"The state is as it was at {printable(checkpoint)}; the model is told with the next turn.")


def _with_store(settings: "Settings", work: "Callable[[Checkpoints], Awaitable[T]]") -> T:
    async def run() -> T:
        from perdure.errors import SessionNotFound
        from perdure.runtime.progress import Checkpoints
        from perdure.store.open import checked_store

        async with checked_store(settings.database) as store:

            async def known(session_id: str, _: "Principal | None") -> "SessionRow":
                row = await store.session(session_id)
                if row is None or row.run is not None:
                    raise SessionNotFound(f"The store knows no session {quoted(session_id)}.")
                return row

            return await work(Checkpoints(store, known))

    return asyncio.run(run())


_HEAD = ("checkpoint", "number", "taken", "turn", "step", "bytes", "plan step", "name")


def _cells(shown: "JsonObject") -> tuple[str, ...]:
    fields = ("checkpointId", "number", "takenAt", "turnId", "stepIndex", "bytes", "planStep", "name")
    return tuple(str(shown.get(field, "")) for field in fields)


def _plan_lines(plan: "JsonObject | None") -> list[str]:
    """The plan as a person reads it: `✓` is done, `…` is in progress, `!` is blocked."""
    if plan is None:
        return ["The session has no plan."]
    steps: list[Any] = plan.get("steps") or []
    done = sum(each.get("status") == "done" for each in steps)
    lines = [f"{plan.get('objective', '')} ({plan.get('status', '')}, {done} of {len(steps)} done)"]
    for each in steps:
        status = each.get("status", "")
        lines.append(f"{_MARKS.get(status, '?')} {each.get('stepId', '')}  {each.get('title', '')}")
    return [printable(line).rstrip() for line in lines]


_MARKS = {"done": "✓", "in_progress": "…", "pending": " ", "blocked": "!"}
