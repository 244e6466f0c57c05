"""The fixtures of the durable shapes, and what may happen to them.

`NAME/1.json` has values as a build stored them in version 1; `NAME/1.2.json` has those of a later build that had added
fields. `NAME/1-to-2.json` has what the migrator made of them when it was shipped, and a hash of its code.
"""

import ast
import hashlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sample import paths_of
from .shapes import Shape

DIRECTORY = Path(__file__).parent.parent / "fixtures" / "versions"

_NAME = re.compile(r"(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Fixture:
    """Values that a build has stored in one version."""

    shape: str
    version: int
    #: Counts the forms that builds have stored in this version.
    edition: int
    path: Path

    @property
    def stored(self) -> list[Any]:
        return json.loads(self.path.read_text())


def kept(directory: Path, shape: str) -> list[Fixture]:
    """The fixtures of a shape, oldest first."""
    files = [(match, path) for path in (directory / shape).glob("*.json") if (match := _NAME.fullmatch(path.stem))]
    found = [Fixture(shape, int(match[1]), int(match[2] or 1), path) for match, path in files]
    return sorted(found, key=lambda each: (each.version, each.edition))


class Refused(Exception):
    """A shape or a migrator has changed in a way that what is stored cannot survive."""


async def missing(shapes: Sequence[Shape], directory: Path = DIRECTORY) -> dict[Path, str]:
    """The fixtures that this build has to add, and their content; raises `Refused` if it would have to change one."""
    files: dict[Path, str] = {}
    problems: list[str] = []
    for shape in shapes:
        try:
            files |= await _fixture(shape, directory)
            files |= _liftings(shape, directory)
        except Refused as refused:
            problems.append(f"{shape.name}: {refused}")
    if problems:
        raise Refused("\n".join(problems))
    return files


async def _fixture(shape: Shape, directory: Path) -> dict[Path, str]:
    """What this build stores, if no fixture of the version has it yet."""
    samples = await shape.samples()
    if not samples:
        raise Refused("there is no sample; have tests/versions/story.py make one.")
    same = [each for each in kept(directory, shape.name) if each.version == shape.version]
    was = {path for fixture in same for path in _paths(fixture.stored, shape)}
    now = _paths(samples, shape)
    if gone := sorted(was - now):
        advice = "raise the version and write a migrator"
        raise Refused(f"version {shape.version} was shipped with {', '.join(gone)}, and has it no longer; {advice}.")
    if was == now:
        return {}
    edition = f".{len(same) + 1}" if same else ""
    return {directory / shape.name / f"{shape.version}{edition}.json": _text(samples)}


def _paths(values: Sequence[Any], shape: Shape) -> set[str]:
    return paths_of(
        [{name: value for name, value in each.items() if name != shape.foreign} if each else each for each in values]
    )


def _liftings(shape: Shape, directory: Path) -> dict[Path, str]:
    """What each migrator makes of the fixtures of its version, where that is not kept yet."""
    files: dict[Path, str] = {}
    for version, migrator in enumerate(shape.migrators, shape.first):
        stored = [value for each in kept(directory, shape.name) if each.version == version for value in each.stored]
        path = directory / shape.name / f"{version}-to-{version + 1}.json"
        text = _text({"migrator": digest(migrator), "lifted": [migrator(value) for value in stored]})
        if not path.exists():
            files[path] = text
        elif path.read_text() != text:
            raise Refused(
                f"the migrator from version {version} was shipped and has changed; put it back, and write the next one."
            )
    return files


def expected(fixture: Fixture, shape: Shape) -> list[Any]:
    """What the values of a fixture are in today's version, as their migrator made them when it was shipped."""
    if fixture.version == shape.version:
        return fixture.stored
    same = [each for each in kept(fixture.path.parent.parent, shape.name) if each.version == fixture.version]
    before = sum(len(each.stored) for each in same[: same.index(fixture)])
    path = fixture.path.parent / f"{fixture.version}-to-{fixture.version + 1}.json"
    values = json.loads(path.read_text())["lifted"][before : before + len(fixture.stored)]
    for migrator in shape.migrators[fixture.version + 1 - shape.first :]:
        values = [migrator(value) for value in values]
    return values


def digest(migrator: Callable[..., Any]) -> str:
    """A hash of the function's code that does not depend on its name, its docstring, its comments and its layout."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(migrator)))
    except (TypeError, OSError, SyntaxError):
        tree = ast.Module([], [])
    match tree.body:
        case [ast.FunctionDef() as function]:
            function.name = "migrator"
            if ast.get_docstring(function) is not None:
                function.body = function.body[1:] or [ast.Pass()]
            return hashlib.sha256(ast.unparse(function).encode()).hexdigest()
        case _:
            raise Refused(f"the migrator {migrator!r} must be a function with a name of its own.")


def _text(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
