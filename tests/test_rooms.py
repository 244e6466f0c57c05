"""The rules for packages and names can be broken, and that is noticed."""

from pathlib import Path

import pytest

from tests import rooms

GLOSSARY = "".join(f"| **{noun}** | … |\n" for noun in rooms.NOUNS)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A product that keeps all rules."""
    monkeypatch.setattr(rooms, "ALLOWED", {})
    write(tmp_path, "docs/glossary.md", GLOSSARY)
    write(tmp_path, "perdure/__init__.py", '"""What it owns."""\n')
    write(tmp_path, "perdure/store.py", "kept = 1\n")
    write(tmp_path, "perdure/one.py", "from .store import kept\n")
    write(tmp_path, "perdure/two.py", "from perdure import store\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_a_product_that_keeps_the_rules_breaks_none(tree: Path) -> None:
    assert rooms.broken(tree) == []


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("perdure/two.py", "pass\n", "store.py has 1 lines and one importer, perdure.one: it belongs there"),
        ("perdure/telling.py", "pass\n", "a module is named by a noun"),
        ("perdure/one.py", "from .store import kept\nscene = 1\n", "'scene' is a word of the retired vocabulary"),
        ("perdure/more/__init__.py", "", "does not say what the package owns"),
        ("docs/glossary.md", GLOSSARY.replace("**quorum**", "quorum"), "no row for 'quorum'"),
        ("docs/page.md", "short\n" + "x" * 121 + "\n", "docs/page.md:2 has 121 columns"),
    ],
)
def test_a_broken_rule_is_noticed(tree: Path, name: str, text: str, what: str) -> None:
    write(tree, name, text)

    assert [each for each in rooms.broken(tree) if what in each]


def test_too_many_modules_are_noticed(tree: Path) -> None:
    for number in range(13):
        write(tree, f"perdure/crowd/m{number}.py", "pass\n")

    assert any("perdure/crowd has 13 modules" in each for each in rooms.broken(tree))


def test_an_allowance_that_nothing_needs_any_more_is_noticed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "ALLOWED", {"perdure/gone.py": "a reason"})

    assert any("perdure/gone.py" in each for each in rooms.broken(tree))
