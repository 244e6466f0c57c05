"""A new project from a template: all of it, or nothing."""

import contextlib
import errno
import keyword
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from perdure.bounds import printable, quoted
from perdure.errors import Conflict, Invalid

#: The templates, and what their agents do.
TEMPLATES = {
    "approvals": "An agent whose refunds people approve.",
    "minimal": "An agent with one tool.",
    "long-job": "An agent that plans a long job, keeps what it finds, and takes checkpoints.",
}
DEFAULT = "approvals"

_FILES = Path(__file__).parent / "templates"
_SUFFIX = ".in"
#: What a folder may hold and still count as empty: a project is often begun with them.
_BEGUN = frozenset({".git", ".venv"})
#: Names that the project itself, Perdure in a checkout, or every program has.
_TAKEN = frozenset({"worker", "api", "activities", "workflows", "tests", "test", "deploy", "wheels", "perdure"})
#: Agents have names of at most 64 characters.
_LONGEST = 40


class FolderInUse(Conflict):
    """The folder holds something already."""

    code = "folder_in_use"


@dataclass(frozen=True)
class Names:
    """The names of a project, made of that of its folder."""

    # As a package index and an agent have it: `my-shop`.
    name: str
    # As Python imports it: `my_shop`.
    module: str


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder, or an empty one.")],
    template: Annotated[str, typer.Option(help=f"One of {', '.join(TEMPLATES)}.")] = DEFAULT,
) -> None:
    """Make a small project: an agent, a test, and what it takes to run it here and in containers."""
    made = create(folder, template)
    typer.echo(f"Made {made.name} in {printable(str(folder))}, with the template {template}.\n")
    if folder.resolve() != Path.cwd():
        typer.echo(f"  cd {shlex.quote(str(folder))}")
    typer.echo(f"  perdure dev --agents {made.module}.agent:agent\n\nREADME.md says more.")


def create(folder: Path, template: str = DEFAULT) -> Names:
    """Write the project into a folder that does not exist or is empty; `FolderInUse` if it is not."""
    import secrets

    if template not in TEMPLATES:
        known = "\n".join(f"  {name:<10} {about}" for name, about in TEMPLATES.items())
        raise Invalid(f"There is no template {quoted(template)!r}. There are:\n{known}")
    target = folder.resolve()
    exists = _checked(target)
    names = names_for(target.name)
    # Inside of a folder that is there: what is beside it may not be ours to write.
    stage = (target if exists else target.parent) / f".perdure-init-{secrets.token_hex(6)}"
    try:
        stage.mkdir(parents=True)
        for file, content in _rendered(template, names):
            (stage / file).parent.mkdir(parents=True, exist_ok=True)
            (stage / file).write_text(content, encoding="utf-8")
        if exists:
            _move_all(stage, target)
        else:
            _become(stage, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return names


def names_for(folder: str) -> Names:
    """Names that Python, package indexes and agents accept, and that hide no other module."""
    import unicodedata

    # First to lower case: that of ß is two letters.
    plain = unicodedata.normalize("NFKD", folder.casefold()).encode("ascii", "ignore").decode()
    module = re.sub(r"[^a-z0-9]+", "_", plain).strip("_")[:_LONGEST].strip("_") or "my_agent"
    if module[0].isdigit():
        module = f"agent_{module}"
    while _is_taken(module):
        module = f"{module}_agent"
    return Names(module.replace("_", "-"), module)


def _is_taken(module: str) -> bool:
    if module in _TAKEN or module in sys.stdlib_module_names or keyword.iskeyword(module):
        return True
    from importlib.machinery import PathFinder

    # The working folder may hold the project itself.
    installed = [path for path in sys.path if path and Path(path).resolve() != Path.cwd()]
    found = PathFinder.find_spec(module, installed)
    return found is not None and found.origin is not None


def _checked(target: Path) -> bool:
    """Whether the folder exists; `FolderInUse` if it cannot be filled."""
    try:
        held = sorted(each.name for each in target.iterdir() if each.name not in _BEGUN)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise FolderInUse(f"{target} is a file: name a folder.") from None
    if held:
        raise FolderInUse(f"{target} is not empty (it has {quoted(held[0])}): name a new folder.")
    return True


def _rendered(template: str, names: Names) -> Iterator[tuple[Path, str]]:
    """The files of the project, by their place in it."""
    from importlib.metadata import version

    attempt = (_FILES / template / f"try.md{_SUFFIX}").read_text(encoding="utf-8").rstrip("\n")
    words = {
        # First, because it has words of its own.
        "try": attempt,
        "name": names.name,
        "module": names.module,
        "about": TEMPLATES[template],
        "version": version("perdure"),
    }
    for root in (_FILES / "common", _FILES / template):
        for source in sorted(root.rglob(f"*{_SUFFIX}")):
            if source.name == f"try.md{_SUFFIX}":
                continue
            content = source.read_text(encoding="utf-8")
            for word, value in words.items():
                content = content.replace("{{" + word + "}}", value)
            place = str(source.relative_to(root)).removesuffix(_SUFFIX)
            yield Path(place.replace("__module__", names.module).replace("dot_", ".")), content


def _become(stage: Path, target: Path) -> None:
    try:
        stage.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise FolderInUse(f"{target} was made by somebody else meanwhile.") from None


def _move_all(stage: Path, target: Path) -> None:
    """Move what is staged into the folder, or nothing of it. The folder may be a shell's own, so it is not replaced."""
    moved: list[Path] = []
    try:
        for each in sorted(stage.iterdir()):
            place = target / each.name
            if place.exists():
                raise FolderInUse(f"{place} was made by somebody else meanwhile.")
            each.rename(place)
            moved.append(place)
    except BaseException:
        for place in moved:
            with contextlib.suppress(OSError):
                place.rename(stage / place.name)
        raise
