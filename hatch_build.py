"""Puts the shells into the wheel as `perdure.shells`.

In a checkout `workflows`, `activities`, `api` and `worker` are top-level names; installed, they would collide with
other people's packages. So the wheel carries them inside the package, with their imports of each other rewritten.
"""

import ast
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHELLS = ("workflows", "activities", "api", "worker.py")
NAMES = frozenset(shell.removesuffix(".py") for shell in SHELLS)
PACKAGE = "perdure.shells"


class ShellsHook(BuildHookInterface):
    """Stages rewritten copies, and has them included in the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # An editable install uses the checkout as it is.
        if self.target_name != "wheel" or version == "editable":
            return
        self._staged = Path(tempfile.mkdtemp(prefix="perdure-shells-"))
        stage(Path(self.root), self._staged)
        build_data["force_include"][str(self._staged)] = PACKAGE.replace(".", "/")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_staged"):
            shutil.rmtree(self._staged)


def stage(root: Path, target: Path) -> None:
    """Copy the shells from `root` to `target`, their imports rewritten."""
    (target / "__init__.py").write_text('"""The shells: the worker, and what serves HTTP."""\n')
    for source in _files(root):
        copy = target / source.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".py":
            copy.write_text(rewrite(source.read_text(encoding="utf-8"), str(source)), encoding="utf-8")
        else:
            shutil.copy(source, copy)


def rewrite(source: str, name: str = "<source>") -> str:
    """The same module, importing the shells from where the wheel has them."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source, name)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _shell(node.module or ""):
            _replace(lines, node.lineno, f"from {node.module}", f"from {PACKAGE}.{node.module}")
        if isinstance(node, ast.Import):
            for alias in filter(lambda alias: _shell(alias.name), node.names):
                if alias.asname is None or len(node.names) > 1:
                    raise ValueError(
                        f"{name}:{node.lineno}: write `import {alias.name} as …` alone, or `from … import`."
                    )
                _replace(lines, node.lineno, f"import {alias.name}", f"import {PACKAGE}.{alias.name}")
    return "".join(lines)


def _files(root: Path) -> Iterator[Path]:
    for shell in SHELLS:
        paths = sorted((root / shell).rglob("*")) if (root / shell).is_dir() else [root / shell]
        yield from (path for path in paths if path.is_file() and "__pycache__" not in path.parts)


def _shell(module: str) -> bool:
    return module.partition(".")[0] in NAMES


def _replace(lines: list[str], number: int, old: str, new: str) -> None:
    line = lines[number - 1]
    if line.count(old) != 1:
        raise ValueError(f"Cannot rewrite this import: {line.strip()}")
    lines[number - 1] = line.replace(old, new)
