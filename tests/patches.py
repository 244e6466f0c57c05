"""The patches of the workflows, compared with their list: `python -m tests.patches`, a part of `make lint`."""

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from perdure.session.state import KINDS, REFERENCE_VERSIONS, SESSION, version_patch
from tests.rooms import ROOT, product
from workflows.patches import PATCHES, Patch
from workflows.versions import OUTCOMES

#: Functions whose patch ids are not written where they are asked for, and the tables that contain the ids.
FROM_TABLES = {
    ("workflows/versions.py", "reads"): [patch for patch in (*KINDS.values(), *REFERENCE_VERSIONS.values()) if patch],
    ("workflows/versions.py", "reads_outcome"): [patch for patch in OUTCOMES.values() if patch],
    ("workflows/versions.py", "reads_version"): [version_patch(each) for each in range(2, SESSION.version + 1)],
}

_CALLS = ("patched", "deprecate_patch")


def problems(root: Path = ROOT, patches: Sequence[Patch] = PATCHES) -> list[str]:
    """What the list and the code of this tree disagree about, in words."""
    wrong: list[str] = []
    used = {id for ids in FROM_TABLES.values() for id in ids}
    for module in product(root):
        for function, node in _mentions(module.tree):
            place = f"{module.path}:{node.lineno}"
            match node:
                case ast.Call(args=[ast.Constant(value=str(id))], keywords=[]):
                    used.add(id)
                case ast.Call() if (str(module.path), function) in FROM_TABLES:
                    pass
                case ast.Call():
                    wrong.append(f"{place}: write the id of a patch as one literal, so that it can be found")
                case _:
                    wrong.append(f"{place}: call it as workflow.patched(…), so that it can be found")
    listed = [patch.id for patch in patches]
    wrong += [f"the patch {id!r} is not in workflows/patches.py" for id in sorted(used - {*listed})]
    wrong += [f"nothing uses the patch {id!r} of workflows/patches.py" for id in listed if id not in used]
    wrong += [f"workflows/patches.py lists {id!r} twice" for id in sorted({*listed}) if listed.count(id) > 1]
    return wrong


def _mentions(tree: ast.Module) -> Iterator[tuple[str, ast.expr | ast.ImportFrom]]:
    """Each call of Temporal's patch functions, any other mention of them, and the function around it."""
    called: set[ast.expr] = set()

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.ImportFrom]]:
        match node:
            case ast.FunctionDef(name=function) | ast.AsyncFunctionDef(name=function):
                pass
            case ast.Call(func=ast.Attribute(attr=name) as attribute) if name in _CALLS:
                called.add(attribute)
                yield function, node
            case ast.Attribute(attr=name) if name in _CALLS and node not in called:
                yield function, node
            case ast.ImportFrom(names=names) if any(each.name in _CALLS for each in names):
                yield function, node
            case _:
                pass
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(tree, "")


if __name__ == "__main__":
    found = problems()
    sys.stderr.writelines(f"{each}\n" for each in found)
    sys.exit(bool(found))
