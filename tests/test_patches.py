"""A patch that is not listed, or that nothing uses, is noticed."""

import shutil
from datetime import date
from pathlib import Path

import pytest

from tests import patches
from workflows.patches import PATCHES, Patch


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the workflows, for a test to edit."""
    shutil.copytree(patches.ROOT / "workflows", tmp_path / "workflows")
    return tmp_path


def test_the_list_of_patches_is_that_of_the_code(tree: Path) -> None:
    assert patches.problems() == []
    assert patches.problems(tree) == []


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        ('workflow.patched("new")', "the patch 'new' is not in workflows/patches.py"),
        ('workflow.deprecate_patch("new")', "the patch 'new' is not in workflows/patches.py"),
        ('workflow.patched("inbox-" + "in-order")', "turn.py:400: write the id of a patch as one literal"),
        ('workflow.patched(f"inbox-{order}")', "turn.py:400: write the id of a patch as one literal"),
        ('workflow.patched(id="inbox-in-order")', "turn.py:400: write the id of a patch as one literal"),
        ("guard = workflow.patched", "turn.py:400: call it as workflow.patched(…)"),
        ("from temporalio.workflow import patched as guard", "turn.py:400: call it as workflow.patched(…)"),
    ],
)
def test_a_patch_that_the_list_does_not_have_is_noticed(tree: Path, edit: str, what: str) -> None:
    turn = tree / "workflows" / "turn.py"
    lines = turn.read_text().splitlines()
    turn.write_text("\n".join([*lines, *[""] * (399 - len(lines)), edit]))

    [problem] = patches.problems(tree)

    assert what in problem


def test_a_listed_patch_that_nothing_uses_is_noticed(tree: Path) -> None:
    gone = Patch("gone", "both", date(2026, 11, 19), "…")

    assert patches.problems(tree, [*PATCHES, gone]) == ["nothing uses the patch 'gone' of workflows/patches.py"]
    assert patches.problems(tree, [*PATCHES, PATCHES[0]]) == ["workflows/patches.py lists 'inbox-in-order' twice"]


@pytest.mark.parametrize(("function", "id"), [("reads", "kind-later"), ("reads_version", "session-state-2")])
def test_a_kind_or_a_version_that_is_guarded_by_an_unlisted_patch_is_noticed(
    tree: Path, monkeypatch: pytest.MonkeyPatch, function: str, id: str
) -> None:
    place = ("workflows/versions.py", function)
    monkeypatch.setitem(patches.FROM_TABLES, place, [*patches.FROM_TABLES[place], id])

    assert patches.problems(tree) == [f"the patch {id!r} is not in workflows/patches.py"]
