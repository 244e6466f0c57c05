"""`perdure deploy`: the commands that switch a versioned deployment from one build to another."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from perdure.runtime.deploys.builds import Build, Builds, Routing

deploy_commands = typer.Typer(
    help="Switch versioned workers from one build to another. PERDURE_DEPLOYMENT names the deployment.",
    no_args_is_help=True,
)

BuildId = Annotated[str, typer.Argument(metavar="BUILD", help="The PERDURE_BUILD_ID of its workers.")]
Patience = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for its workers and for Temporal.")]

#: How many sessions are listed by name.
_NAMED = 20


@deploy_commands.command()
def status() -> None:
    """Show each build: what starts on it, its workers, its open sessions and running turns, and what is stuck."""

    async def work(builds: "Builds") -> None:
        from perdure.runtime.deploys.builds import KINDS

        rows = await builds.status()
        if not rows:
            typer.echo(f"No worker of deployment {builds.deployment} has polled yet.")
            return
        typer.echo(_LINE.format("BUILD", "SESSIONS", "TURNS", "WORKERS", "OPEN SESSIONS", "RUNNING TURNS").rstrip())
        for row in rows:
            counts = (row.workers, row.open_sessions, row.running_turns)
            typer.echo(_LINE.format(row.build_id, row.sessions, row.turns, *counts).rstrip())
        routing = {kind: await builds.routing(kind) for kind in KINDS}
        for line in [*_unsettled(routing), *(line for row in rows for line in _stuck(row))]:
            typer.echo(f"stuck: {line}")
        if count := await builds.count_problems():
            typer.echo(f"stuck: {count} workflows fail repeatedly; list them in Temporal's UI with {_PROBLEMS}")

    _run(work)


_LINE = "{:<20}  {:<9}  {:<9}  {:>7}  {:>13}  {:>13}"
_PROBLEMS = "`TemporalReportedProblems IS NOT NULL`"


def _unsettled(routing: "dict[str, Routing]") -> list[str]:
    lines = [f"Temporal still switches the {kind}" for kind, each in routing.items() if not each.settled]
    if len({each.current for each in routing.values()}) > 1:
        now = ", ".join(f"{each.current or 'none'} for the {kind}" for kind, each in routing.items())
        lines.append(f"the current build is {now}: run `perdure deploy promote` again")
    return lines


def _stuck(row: "Build") -> list[str]:
    """What waits for a worker of this build."""
    if row.workers or not (row.open_sessions or row.running_turns):
        return []
    drain = f", or run `perdure deploy drain {row.build_id} --take-over`"
    is_old = not {"current", "ramping"} & {row.sessions, row.turns}
    has = f"{row.open_sessions} open sessions, {row.running_turns} running turns"
    return [f"build {row.build_id} has {has} and no worker: start one{drain if is_old else ''}"]


@deploy_commands.command()
def promote(build: BuildId, patience: Patience = 60.0) -> None:
    """Make a build the current one: all new turns and sessions start on it. An older build: this is a rollback."""

    async def work(builds: "Builds") -> None:
        from perdure.runtime.deploys import switch

        await switch.promote(builds, build, patience=patience, say=typer.echo)

    _run(work)


@deploy_commands.command()
def ramp(
    build: BuildId,
    percent: Annotated[float, typer.Option(help="How much of what starts goes to it; 0 ends the ramp.")],
    patience: Patience = 60.0,
) -> None:
    """Start a part of the new turns and sessions on a build, and the others on the current one."""

    async def work(builds: "Builds") -> None:
        from perdure.runtime.deploys import switch

        await switch.ramp(builds, build, percent, patience=patience, say=typer.echo)

    _run(work)


@deploy_commands.command()
def drain(
    build: BuildId,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Also move sessions without a worker: the current build replays them.")
    ] = False,
    patience: Annotated[float, typer.Option("--wait", min=0, help="Seconds without progress until it gives up.")] = 60,
    rate: Annotated[float, typer.Option(min=0.1, max=1000, help="The most sessions to move per second.")] = 50,
) -> None:
    """Move the parked sessions of a build to the current one, until its workers may stop."""

    async def work(builds: "Builds") -> None:
        from perdure.errors import Unavailable
        from perdure.runtime.deploys.drain import Drainer

        drainer = Drainer(builds, build, rate=rate, take_over=take_over, say=typer.echo)
        drained = await drainer.run(patience)
        typer.echo(f"{len(drained.moved)} sessions have left build {build}.")
        for session_id, reason in sorted(drained.remaining.items())[:_NAMED]:
            typer.echo(f"{session_id}  {reason}")
        if drained.remaining:
            raise Unavailable(f"{len(drained.remaining)} sessions are still on build {build}; keep its workers.")
        typer.echo(f"Nothing is left on build {build}: its workers may stop.")

    _run(work)


def _run(work: "Callable[[Builds], Awaitable[None]]") -> None:
    from perdure.errors import Unavailable
    from perdure.runtime.connect import ABSENT, temporal_client
    from perdure.runtime.deploys.builds import builds_of
    from perdure.settings import read_settings

    async def run() -> None:
        settings = read_settings()
        try:
            client = await temporal_client(settings)
        except ABSENT:
            where = settings.temporal_address
            raise Unavailable(f"Temporal does not answer at {where} (PERDURE_TEMPORAL_ADDRESS).") from None
        await work(builds_of(client, settings))

    asyncio.run(run())
