"""The rules for packages, modules and names that a program can check: `python -m tests.rooms`, a part of `make lint`.

Each rule yields what breaks it, in words. CONTRIBUTING.md says why there are such rules.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHELLS = ("workflows", "activities", "api")

MODULES_PER_PACKAGE = 12
MODULES = 245
SMALL = 80

#: Small modules with one importer that are modules all the same.
ALLOWED = {
    "api/app.py": "the routes, apart from the process that serves them",
    "activities/children.py": "the activities of a driver for its children",
    "activities/model.py": "the activities of one task queue",
    "activities/runs.py": "the activities of one task queue",
    "activities/tools.py": "the activities of one task queue",
    "perdure/agents/progress/tools.py": "what takes long to import, for agents that plan",
    "workflows/turn.py": "one workflow",
}

#: Names of the private dialect that were replaced by the field's own words. Durable names are strings, and stay.
RETIRED = ("breath", "gatekeeper", "loose_end", "scene", "settling", "sorting", "steadfast_", "stirred", "telling")

#: What the public API and the wire name: each has a row in docs/glossary.md.
NOUNS = (
    *("session", "turn", "step", "delivery", "receipt", "action", "park", "continuation token", "route"),
    *("record", "event", "boundary", "attempt", "generation", "fence", "effects", "snapshot", "store", "harness"),
    *("input request", "answer", "vote", "responders", "quorum", "principal", "approval", "question", "withdrawal"),
    *("conclusion", "watcher", "sweeper", "reconciler", "cancel request", "attention", "held turn"),
)


@dataclass(frozen=True)
class Module:
    path: Path
    tree: ast.Module
    lines: int

    @property
    def name(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @property
    def package(self) -> str:
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]


def product(root: Path) -> list[Module]:
    files = [root / "worker.py", *(file for top in ("perdure", *SHELLS) for file in (root / top).rglob("*.py"))]
    found: list[Module] = []
    for file in sorted(file for file in files if file.exists() and "shells" not in file.parts):
        text = file.read_text()
        found.append(Module(file.relative_to(root), ast.parse(text), len(text.splitlines())))
    return found


def crowded_packages(modules: list[Module]) -> Iterator[str]:
    packages: dict[str, int] = {}
    for module in modules:
        if module.path.stem not in ("__init__", "__main__"):
            packages[str(module.path.parent)] = packages.get(str(module.path.parent), 0) + 1
    for package, count in sorted(packages.items()):
        if count > MODULES_PER_PACKAGE:
            yield f"{package} has {count} modules; a reader finds the way among {MODULES_PER_PACKAGE}"
    if sum(packages.values()) > MODULES:
        yield f"there are {sum(packages.values())} modules; {MODULES} are enough"


def lonely_modules(modules: list[Module]) -> Iterator[str]:
    importers = _importers(modules)
    for module in modules:
        users = importers[module.name]
        small = module.lines < SMALL and len(users) == 1 and module.path.stem != "__init__"
        if small and str(module.path) not in ALLOWED:
            yield f"{module.path} has {module.lines} lines and one importer, {users.copy().pop()}: it belongs there"
    for path in ALLOWED.keys() - {str(module.path) for module in modules}:
        yield f"{path} is allowed to be small, and is not there"


def _importers(modules: list[Module]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {module.name: set() for module in modules}
    for module in modules:
        for name in _imported(module):
            if name in found and name != module.name:
                found[name].add(module.name)
    return found


def _imported(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.package.split(".")[: len(module.package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def gerunds_and_retired_names(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        if module.path.stem.endswith("ing") and module.path.stem != "testing":
            yield f"{module.path}: a module is named by a noun"
        for name in sorted(set(_names(module.tree))):
            if any(word in name.lower() for word in RETIRED):
                yield f"{module.path}: {name!r} is a word of the retired vocabulary"


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name
            case _:
                pass


def silent_packages(modules: list[Module]) -> Iterator[str]:
    """Each package of the core says what it owns."""
    for module in modules:
        if module.path.stem == "__init__" and not (ast.get_docstring(module.tree) or "").strip():
            yield f"{module.path} does not say what the package owns"


def words_without_a_row(root: Path) -> Iterator[str]:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|", (root / "docs" / "glossary.md").read_text(), re.MULTILINE)
    known = {word.strip() for row in rows for word in row.split("/")}
    for noun in NOUNS:
        if noun not in known:
            yield f"docs/glossary.md has no row for {noun!r}"


def long_lines(root: Path) -> Iterator[str]:
    """Lines of a page, outside of tables and programs, have at most 120 columns, so that changes can be compared."""
    for page in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")]):
        in_program = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            in_program ^= line.lstrip().startswith("```")
            if len(line) > 120 and not in_program and not line.startswith("|"):
                yield f"{page.relative_to(root)}:{number} has {len(line)} columns"


def broken(root: Path = ROOT) -> list[str]:
    modules = product(root)
    return [
        *crowded_packages(modules),
        *lonely_modules(modules),
        *gerunds_and_retired_names(modules),
        *silent_packages(modules),
        *words_without_a_row(root),
        *long_lines(root),
    ]


if __name__ == "__main__":
    found = broken()
    sys.stderr.writelines(f"{each}\n" for each in found)
    sys.exit(bool(found))
