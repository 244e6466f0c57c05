"""The versions that CI installs are ones that the project says it works with."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?(?:>=(?P<least>[0-9.]+))?")


def declared() -> list[tuple[str, str]]:
    """Every dependency that is declared anywhere, and its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(each for some in project["optional-dependencies"].values() for each in some)]
    found = [_REQUIREMENT.match(text) for text in texts if not text.startswith("perdure[")]
    return [(match["name"], match["least"]) for match in found if match]


def number(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)]


@pytest.mark.parametrize(("name", "least"), declared())
def test_each_dependency_has_a_lower_bound_and_a_pinned_version_above_it(name: str, least: str | None) -> None:
    pinned = {key.lower().replace("_", "-"): value for key, value in PINNED.items()}[name.lower()]

    assert least is not None
    assert number(pinned) >= number(least)
