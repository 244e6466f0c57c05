"""The page for newcomers names functions that exist, where it says that they are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.findall(r"`([A-Za-z_.]+)`\s+in\s+`([a-z_/]+\.py)`", PAGE)


def defined(file: Path) -> set[str]:
    """The functions and classes of a module, and the methods of its classes."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            found.update(f"{node.name}.{method.name}" for method in methods)
    return found


def test_the_page_names_many_functions() -> None:
    assert len(NAMED) > 25


@pytest.mark.parametrize(("name", "file"), sorted(set(NAMED)))
def test_each_named_function_is_in_the_module_that_the_page_names(name: str, file: str) -> None:
    assert name in defined(ROOT / file)
