"""Files that are for their owner only: made so, and made so again where an older build has let everybody read them."""

import contextlib
import os
import stat
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

_OTHERS = stat.S_IRWXO


def make_private(file: Path) -> None:
    """Create the file, if need be, for its owner alone; and close it and its journals to everybody else."""
    # SQLite gives its journals the rights of the file. It also says better what is wrong, with the first query.
    with contextlib.suppress(OSError):
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    for each in (file, file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")):
        _close(each, _OTHERS)


def close_folder(folder: Path, ours: Iterable[str]) -> None:
    """Close to everybody else what is ours in a folder, by these patterns, and the folder if it holds nothing else."""
    found = list(folder.iterdir())
    mine = [each for each in found if any(fnmatch(each.name, pattern) for pattern in ours)]
    for each in mine:
        if each.is_file():
            _close(each, _OTHERS)
    # A folder of somebody's project has the rights that its owner wants.
    if len(mine) == len(found):
        _close(folder, stat.S_IRWXG | _OTHERS)


def _close(path: Path, rights: int) -> None:
    """Take these rights away, if others than owner and group have any: a group may have its rights on purpose."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _OTHERS:
            path.chmod(mode & ~rights)
