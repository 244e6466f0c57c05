"""The command: runs all probes at once, each within its time."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from perdure.bounds import printable
from perdure.cli.options import DataDir, settings_with

from .findings import Finding, fail

if TYPE_CHECKING:
    from perdure.settings import Settings

T = TypeVar("T")

#: Seconds that a probe has. The model's is the longest, so this is how long all of it takes at most.
SERVER, LOADING, CALL = 6.0, 11.0, 12.0
#: Seconds that probes which were given up have to end.
_END = 0.5


@dataclass(frozen=True)
class Probe:
    name: str
    # What did not answer, if it does not.
    what: str
    seconds: float
    run: Callable[[], Awaitable[Sequence[Finding]]]


def doctor(
    agents: Annotated[
        str | None, typer.Option(help="Check these as well: module:attribute[,…].", show_default="PERDURE_AGENTS")
    ] = None,
    call: Annotated[
        bool, typer.Option("--call", help="Have each model of the agents answer one tiny prompt. It costs a little.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Check this machine, Temporal, the store and the agents, and say what to do. Changes nothing."""
    settings = settings_with(data_dir=data_dir, agents=agents)
    findings = examine(settings, call=call)
    for line in (json.dumps(asdict(each)) for each in findings) if as_json else _lines(findings):
        typer.echo(line)
    if any(each.status == "fail" for each in findings):
        raise typer.Exit(1)


def examine(settings: "Settings", *, call: bool = False) -> Sequence[Finding]:
    """What all probes have found, in their order."""
    from . import agents, machine, servers

    # First: to open the store may correct the rights of its file.
    here = [*machine.versions(), *machine.variables(settings), *machine.keys(settings), *machine.folder(settings)]
    # What the probes import keeps a busy machine for seconds: they count from here, not from when it is their turn.
    begun = time.monotonic()
    probes = [
        Probe("ports", "The port of the API", SERVER, lambda: machine.ports(settings)),
        Probe("temporal", f"Temporal at {settings.temporal_address}", SERVER, lambda: servers.temporal(settings)),
        Probe("store", "The store", SERVER, lambda: servers.store(settings)),
        Probe("agents", "Loading the agents", LOADING + 1, lambda: agents.declarations(settings, begun + LOADING)),
    ]
    if call:
        probes.append(Probe("model", "The model", CALL + 1, lambda: agents.call_models(settings, begun + CALL)))
    return [*here, *_run(_all(probes))]


async def _all(probes: Sequence[Probe]) -> Sequence[Finding]:
    found = await asyncio.gather(*(_one(probe) for probe in probes))
    return [finding for each in found for finding in each]


async def _one(probe: Probe) -> Sequence[Finding]:
    """Its findings. It is not waited for after its time, even if it does not let itself be stopped."""
    task = asyncio.ensure_future(probe.run())
    done, _ = await asyncio.wait({task}, timeout=probe.seconds)
    if not done:
        task.cancel()
        late = f"{probe.what} did not answer within {probe.seconds:g} s."
        return [fail(probe.name, late, "See whether it runs, and whether a firewall is between.")]
    try:
        return task.result()
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return [fail(probe.name, f"It could not be checked ({text}).", "Report this: a probe should not fail.")]


def _run(work: Awaitable[T]) -> T:
    """Run it in a loop of its own, and leave behind whatever does not end: `asyncio.run` would wait for that."""
    loop = asyncio.new_event_loop()
    result: list[T] = []
    raised: list[BaseException] = []

    async def main() -> None:
        result.append(await work)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_END)

    def run() -> None:
        try:
            loop.run_until_complete(main())
        except BaseException as error:
            raised.append(error)

    # A thread that nobody waits for. The loop stays open for what still ends in it.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with contextlib.suppress(KeyboardInterrupt):
        thread.join()
    if raised:
        raise raised[0]
    if not result:
        raise KeyboardInterrupt
    return result[0]


_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


def _lines(findings: Sequence[Finding]) -> Sequence[str]:
    width = max(len(each.probe) for each in findings)
    lines: list[str] = []
    for each in findings:
        mark, color = _MARKS[each.status]
        lines.append(f"{typer.style(mark, fg=color)}  {each.probe:<{width}}  {printable(each.message)}")
        if each.todo:
            lines.append(f"{'':<{width + 6}}  → {printable(each.todo)}")
    counts = {status: sum(each.status == status for each in findings) for status in ("warn", "fail")}
    return [*lines, "", f"{counts['fail']} failed, {counts['warn']} to look at."]
