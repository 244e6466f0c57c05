"""File permissions: data files are readable by their owner only, also those that an older build left open."""

import contextlib
import os
import stat
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

_OTHERS = stat.S_IRWXO


def make_private(file: Path) -> None:
    """Create the file if it is missing, and make it and its journals unreadable for other users."""
    # SQLite gives its journals the permissions of the file. Errors are ignored: the first query reports them better.
    with contextlib.suppress(OSError):
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    for each in (file, file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")):
        _close(each, _OTHERS)


def close_folder(folder: Path, ours: Iterable[str]) -> None:
    """Remove other users' access to our files in a folder, and to the folder if it holds nothing else.

    `ours`: patterns of the names of our files.
    """
    found = list(folder.iterdir())
    mine = [each for each in found if any(fnmatch(each.name, pattern) for pattern in ours)]
    for each in mine:
        if each.is_file():
            _close(each, _OTHERS)
    # A folder with other content is the user's own; its permissions are not changed.
    if len(mine) == len(found):
        _close(folder, stat.S_IRWXG | _OTHERS)


def _close(path: Path, rights: int) -> None:
    """Remove these permissions if other users have any. A group alone may have access on purpose."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _OTHERS:
            path.chmod(mode & ~rights)
