"""The supervisor keeps its parts alive and takes them down."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.dev.supervisor import Part, PartFailed, Supervisor
from tests.support.processes import wait_until
from tests.support.waiting import until

BEAT = "import os, pathlib, sys, time\npathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\ntime.sleep(600)"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
async def supervisor(tmp_path: Path, said: list[str]) -> AsyncGenerator[Supervisor]:
    supervisor = Supervisor(tmp_path / "logs", said.append)
    yield supervisor
    await supervisor.stop()


async def test_a_killed_part_starts_again(supervisor: Supervisor, tmp_path: Path, said: list[str]) -> None:
    flag = tmp_path / "flag"
    await supervisor.start(part(flag, BEAT))
    first = int(flag.read_text())

    async with kept(supervisor):
        os.kill(first, signal.SIGKILL)
        await until(lambda: flag.read_text() not in ("", str(first)))
        await until(lambda: len(said) == 2)

    assert said == ["The worker was killed by SIGKILL; starting it again.", "The worker is back."]


#: Says that it is asked to end, and ends once it may.
SLOW = (
    "import os, pathlib, signal, sys, time\nflag = pathlib.Path(sys.argv[1])\n"
    "signal.signal(signal.SIGTERM, lambda *_: flag.with_suffix('.asked').touch())\n"
    "flag.write_text(str(os.getpid()))\n"
    "while not flag.with_suffix('.may').exists(): time.sleep(0.01)"
)


async def test_a_part_that_overlaps_ends_its_work_beside_the_new_one(supervisor: Supervisor, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    await supervisor.start(replace(part(flag, SLOW), overlaps=True, patience=30.0))
    old = int(flag.read_text())

    async with kept(supervisor):
        await supervisor.replace("worker")
        new = int(flag.read_text())
        await until(flag.with_suffix(".asked").exists)
        assert (new != old, running(old), running(new)) == (True, True, True)

        flag.with_suffix(".may").touch()
        await until(lambda: not running(old))


async def test_a_part_that_does_not_overlap_has_ended_before_the_new_one_starts(
    supervisor: Supervisor, tmp_path: Path, said: list[str]
) -> None:
    flag = tmp_path / "flag"
    await supervisor.start(part(flag, BEAT))
    old = int(flag.read_text())

    async with kept(supervisor):
        await supervisor.replace("worker")

        assert (running(old), running(int(flag.read_text()))) == (False, True)
    assert said == []


async def test_one_that_cannot_be_replaced_goes_on(supervisor: Supervisor, tmp_path: Path, said: list[str]) -> None:
    flag = tmp_path / "flag"
    program = f"import pathlib, sys\nif pathlib.Path({str(tmp_path / 'broken')!r}).exists(): sys.exit('perdure: no')\n"
    await supervisor.start(replace(part(flag, program + BEAT), overlaps=True))
    old = int(flag.read_text())

    async with kept(supervisor):
        (tmp_path / "broken").touch()
        with pytest.raises(PartFailed, match="The worker did not start: no"):
            await supervisor.replace("worker")
        assert running(old)

        (tmp_path / "broken").unlink()
        os.kill(old, signal.SIGKILL)
        await until(lambda: len(said) == 2)

    assert said == ["The worker was killed by SIGKILL; starting it again.", "The worker is back."]


async def test_a_restart_that_hangs_is_ended_by_the_next_replacement(supervisor: Supervisor, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    hangs = tmp_path / "hangs"
    program = f"import pathlib, time\nif pathlib.Path({str(hangs)!r}).exists(): time.sleep(600)\n"
    await supervisor.start(part(flag, program + BEAT))

    async with kept(supervisor):
        hangs.write_text("")
        os.kill(int(flag.read_text()), signal.SIGKILL)
        await until(lambda: keeper_is_busy(supervisor))
        hangs.unlink()
        await supervisor.replace("worker")

        await until(lambda: running(int(flag.read_text())))


async def test_a_part_whose_program_is_away_for_a_moment_is_started_when_it_is_back(
    supervisor: Supervisor, tmp_path: Path, said: list[str]
) -> None:
    flag, python = tmp_path / "flag", tmp_path / "python"
    python.symlink_to(sys.executable)
    whole = part(flag, BEAT)
    await supervisor.start(replace(whole, command=[str(python), *whole.command[1:]]))
    first = flag.read_text()

    async with kept(supervisor):
        python.unlink()
        os.kill(int(first), signal.SIGKILL)
        await until(lambda: any("could not be started" in each for each in said))
        python.symlink_to(sys.executable)
        await until(lambda: said[-1] == "The worker is back.")

    assert running(int(flag.read_text()))


async def test_all_processes_of_a_part_are_stopped_together(supervisor: Supervisor, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    await supervisor.start(replace(part(flag, SLOW), overlaps=True, patience=1.0))
    pids = [int(flag.read_text())]
    for _ in range(2):
        await supervisor.replace("worker")
        pids.append(int(flag.read_text()))

    await supervisor.stop()

    assert [pid for pid in pids if running(pid)] == []


def keeper_is_busy(supervisor: Supervisor) -> bool:
    [[keeper]] = supervisor._stages  # pyright: ignore[reportPrivateUsage]
    return keeper._changing.locked()  # pyright: ignore[reportPrivateUsage]


async def test_a_part_that_does_not_start_reports_why(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(PartFailed, match="The worker did not start: no such agent"):
        await supervisor.start(part(tmp_path / "flag", "raise SystemExit('perdure: no such agent')"))


async def test_a_part_without_ready_runs_once(supervisor: Supervisor, tmp_path: Path) -> None:
    done = tmp_path / "done"

    await supervisor.start(Part("migration", [sys.executable, "-c", f"open({str(done)!r}, 'w')"], None))

    assert done.exists()


async def test_stopping_ends_the_children_of_the_parts_too(supervisor: Supervisor, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    program = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    await supervisor.start(
        Part("worker", [sys.executable, "-c", program, BEAT, str(flag)], lambda _: until(flag.exists))
    )
    await until(lambda: flag.read_text() != "")
    grandchild = int(flag.read_text())

    await supervisor.stop()

    await until(lambda: not running(grandchild))


async def test_warnings_are_shown_and_the_rest_is_in_the_log(
    supervisor: Supervisor, tmp_path: Path, said: list[str]
) -> None:
    program = (
        "import sys\nfrom perdure.telemetry.logs import configure\nimport logging\nconfigure('info')\n"
        "logging.info('quiet')\nlogging.warning('loud')\n" + BEAT
    )

    await supervisor.start(part(tmp_path / "flag", program))
    await until(lambda: bool(said))

    assert [line.partition(" WARNING ")[2] for line in said] == ["root: loud"]
    assert "INFO root: quiet" in (tmp_path / "logs" / "worker.log").read_text()


def test_a_part_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    program = (
        "import asyncio, pathlib, sys\nfrom perdure.dev.supervisor import Part, Supervisor\n"
        f"beat = {BEAT!r}\nflag = {str(flag)!r}\n"
        "async def never(_): await asyncio.Event().wait()\n"
        f"supervisor = Supervisor(pathlib.Path({str(tmp_path)!r}), print)\n"
        "asyncio.run(supervisor.start(Part('worker', [sys.executable, '-c', beat, flag], never)))"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program])
    wait_until(lambda: flag.exists() and flag.read_text() != "", "the part to start")

    supervisor.kill()
    supervisor.wait()

    wait_until(lambda: not running(int(flag.read_text())), "the part to die")


def part(flag: Path, program: str) -> Part:
    async def ready(pid: int) -> None:
        await until(lambda: flag.exists() and flag.read_text() == str(pid))

    return Part("worker", [sys.executable, "-c", program, str(flag)], ready, patience=2.0)


@asynccontextmanager
async def kept(supervisor: Supervisor) -> AsyncGenerator[None]:
    keeping = asyncio.create_task(supervisor.keep())
    yield
    keeping.cancel()
    await asyncio.wait({keeping})


def running(pid: int) -> bool:
    """Whether the process runs; one that is dead and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
