"""Loads changed code: a new worker and a new API take the place of the old ones, unless the new code is broken."""

import asyncio
import contextlib
import errno
import hashlib
import importlib.util
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import perdure
from perdure.bounds import printable
from perdure.errors import PerdureError

from .program import run_to_end
from .supervisor import Supervisor, command

#: Folders that hold other people's code. So do those with a dot, and virtual environments of any name.
_FOREIGN = frozenset({"node_modules", "__pycache__", "site-packages", "dist-packages"})
#: More is not looked at: somebody has started it in a folder that is no project.
_MOST_FOLDERS = 1_000
_MOST_FILES = 10_000
#: Milliseconds without a further change after which a change counts, and the most that are waited for that.
_QUIET, _LONGEST = 200, 2_000
#: Seconds between two looks where no change is reported: reports can be missed, or are not made at all.
_LOOKS = 1.0
#: Seconds that the agents have to be loaded.
_LOADED = 30.0
#: Bytes of what the check has written that are read, and the files that are named.
_TAIL = 4_096
_NAMED = 3

#: What changes with a file.
Mark = tuple[int, int, int, int]


@dataclass(frozen=True)
class Snapshot:
    """The Python files of a project at one moment."""

    # The hash of each.
    files: Mapping[str, bytes]
    # How each was written last.
    marks: Mapping[str, Mark]
    folders: frozenset[str]
    # False: there are more than we look at.
    complete: bool = True

    def changed_since(self, before: "Snapshot") -> list[str]:
        return sorted(path for path in {*self.files, *before.files} if self.files.get(path) != before.files.get(path))

    def saved_since(self, before: "Snapshot") -> list[str]:
        """Those that were written, also if they say the same as before."""
        return sorted(path for path in {*self.marks, *before.marks} if self.marks.get(path) != before.marks.get(path))


def source_roots(references: str) -> Sequence[Path]:
    """The folders of the modules that `module:attribute,…` names, once they are loaded, and the working folder."""
    found: list[Path] = []
    for reference in references.split(","):
        name = reference.partition(":")[0].strip()
        # The whole of a package may be a part of its agent.
        for each in (name.partition(".")[0], name):
            file = getattr(sys.modules.get(each), "__file__", None)
            if file is not None:
                found.append(Path(file).resolve().parent)
                break
    ours = Path(perdure.__file__).resolve().parent
    own = [each for each in found if not each.is_relative_to(ours) and not _FOREIGN & set(each.parts)]
    return tuple(dict.fromkeys([*own, Path.cwd().resolve()]))


class Sources:
    """The Python files below some folders."""

    def __init__(self, roots: Sequence[Path], data: Path) -> None:
        """`data`: the data directory, which holds no code."""
        self._roots = [str(root) for root in roots]
        self._data = str(data)
        self._seen: dict[str, tuple[Mark, bytes]] = {}

    def look(self) -> Snapshot:
        """What is there now. Only files that were written since the last look are read."""
        files: dict[str, bytes] = {}
        folders: set[str] = set()
        due, complete = deque(self._roots), True
        # Breadth first: what is near is looked at, however much there is.
        while due:
            folder = due.popleft()
            if folder in folders:
                continue
            if len(folders) >= _MOST_FOLDERS or len(files) >= _MOST_FILES:
                complete = False
                break
            folders.add(folder)
            for entry in _entries(folder):
                if self._is_project(entry):
                    due.append(entry.path)
                elif entry.name.endswith(".py"):
                    with contextlib.suppress(OSError):
                        files[entry.path] = self._hash(entry)
        self._seen = {path: each for path, each in self._seen.items() if path in files}
        marks = {path: mark for path, (mark, _) in self._seen.items()}
        return Snapshot(files, marks, frozenset(folders), complete)

    def _is_project(self, entry: "os.DirEntry[str]") -> bool:
        if entry.name.startswith(".") or entry.name in _FOREIGN or entry.path == self._data:
            return False
        try:
            return entry.is_dir(follow_symlinks=False) and not os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))
        except OSError:
            return False

    def _hash(self, entry: "os.DirEntry[str]") -> bytes:
        # Not what the entry knows: on some systems that is old.
        found = os.stat(entry.path)
        if not stat.S_ISREG(found.st_mode):
            # A pipe, or a link to a device: it would be read for ever.
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), entry.path)
        mark = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
        known = self._seen.get(entry.path)
        if known is None or known[0] != mark:
            known = self._seen[entry.path] = mark, hashlib.sha256(Path(entry.path).read_bytes()).digest()
        return known[1]


def _entries(folder: str) -> Iterator["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as found:
            yield from sorted(found, key=lambda entry: entry.name)
    except OSError:
        # It is gone, or not ours to read.
        return


class Reload:
    """Replaces the worker and the API whenever the code has changed and can be loaded."""

    def __init__(
        self,
        sources: Sources,
        supervisor: Supervisor,
        environment: Mapping[str, str | None],
        say: Callable[[str], None],
    ) -> None:
        self._sources = sources
        self._supervisor = supervisor
        self._environment = environment
        self._say = say
        # Kept, because the folder may be deleted while we run.
        self._here = str(Path.cwd())

    async def run(self, loaded: Snapshot) -> None:
        """Load each change, until cancelled. `loaded`: what the processes that run have loaded."""
        if not loaded.complete:
            self._say(f"Only {len(loaded.folders)} folders are watched for changed code: start in a project's folder.")
        refused: Snapshot | None = None
        while True:
            now = await asyncio.to_thread(self._sources.look)
            # What was refused may be right by now as it is: it reads another file, or was half saved when it started.
            changed = now.changed_since(loaded) if refused is None else now.saved_since(refused)
            if not changed:
                await _changes(now.folders)
                continue
            _forget_compiled({*changed, *now.changed_since(loaded)})
            if not now.changed_since(loaded):
                self._say("The code is again what the worker and the API run.")
                refused = None
                continue
            reason = await self._check()
            if (await asyncio.to_thread(self._sources.look)).changed_since(now):
                # It was saved again meanwhile.
                continue
            self._say(f"Changed: {self._named(changed)}.")
            reason = reason or await self._replaced("worker")
            if reason is not None:
                self._say(f"The new code is not loaded, and the old one goes on. Mend it, and save. {reason}")
                refused = now
                continue
            loaded, refused = now, None
            # One that does not start is started again and again, as after a crash.
            failure = await self._replaced("api")
            self._say(failure or "The worker and the API run the new code; calls that have begun end in the old one.")

    async def _replaced(self, part: str) -> str | None:
        """Why this part could not be replaced; None when it was."""
        try:
            await self._supervisor.replace(part)
        except PerdureError as failure:
            return failure.message
        except OSError as error:
            return f"The {part} could not be started: {error}."
        return None

    async def _check(self) -> str | None:
        """Why a worker could not start with the code that is there; None when it could."""
        try:
            return await self._checked()
        except OSError as error:
            # No more processes or files, for one. That is no reason to end what runs.
            return f"It could not be checked: {error}."

    def _named(self, files: Sequence[str]) -> str:
        """The first of them as the author knows them."""
        shown = [
            os.path.relpath(file, self._here) if file.startswith(f"{self._here}{os.sep}") else file for file in files
        ]
        more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
        return printable(", ".join(shown[:_NAMED])) + more

    async def _checked(self) -> str | None:
        environment = {**os.environ, **self._environment}
        known = {name: value for name, value in environment.items() if value is not None}
        ran = await run_to_end(command("worker", "--check"), known, _LOADED, tail=_TAIL)
        if ran.code is None:
            return f"It was not loaded within {_LOADED:g} s."
        if ran.code == 0:
            return None
        return printable(ran.refusal) or f"The check exited with code {ran.code}."


async def _changes(folders: frozenset[str]) -> None:
    """Return when a Python file in one of these folders has changed, or after a second."""
    # Its types name those of another library, which is not here.
    from watchfiles import awatch  # pyright: ignore[reportUnknownVariableType]

    reports = awatch(
        *folders,
        watch_filter=lambda _, path: path.endswith(".py"),
        debounce=_LONGEST,
        step=_QUIET,
        rust_timeout=int(_LOOKS * 1_000),
        yield_on_timeout=True,
        recursive=False,
    )
    try:
        async with contextlib.aclosing(reports):
            await anext(reports)
    except (OSError, RuntimeError):
        # A folder is gone, or the system watches no more files for us.
        await asyncio.sleep(_LOOKS)


def _forget_compiled(files: Iterable[str]) -> None:
    """Delete what Python has compiled of them: it takes two versions of one second and one length for the same."""
    for file in files:
        with contextlib.suppress(OSError, NotImplementedError):
            os.unlink(importlib.util.cache_from_source(file))
