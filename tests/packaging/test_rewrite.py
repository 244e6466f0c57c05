"""The build hook rewrites the shells' imports of each other, and nothing else."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("written", "shipped"),
    [
        ("from workflows.turn import TurnWorkflow\n", "from perdure.shells.workflows.turn import TurnWorkflow\n"),
        ("from api import app\n", "from perdure.shells.api import app\n"),
        ("import api.app as app\n", "import perdure.shells.api.app as app\n"),
        ("if True:\n    from api.x import (\n        y,\n    )\n", None),
        ("from .turn import x\nfrom perdure.workflows import y\nimport apis\n", ""),
    ],
)
def test_an_import_of_a_shell_is_rewritten(hook: ModuleType, written: str, shipped: str | None) -> None:
    expected = written.replace("from api.", "from perdure.shells.api.") if shipped is None else shipped or written

    assert hook.rewrite(written) == expected


@pytest.mark.parametrize("written", ["import api.app\n", "import os, api as a\n"])
def test_an_import_that_cannot_be_rewritten_stops_the_build(hook: ModuleType, written: str) -> None:
    with pytest.raises(ValueError, match="write `import"):
        hook.rewrite(written)


def test_no_shell_imports_another_by_its_bare_name_in_the_wheel(hook: ModuleType, tmp_path: Path) -> None:
    hook.stage(ROOT, tmp_path)

    modules = list(tmp_path.rglob("*.py"))

    assert tmp_path / "worker.py" in modules
    assert all(hook.rewrite(module.read_text()) == module.read_text() for module in modules)
