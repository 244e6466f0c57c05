"""The docs say what is there."""

import re
from pathlib import Path
from typing import Any

import pytest

from perdure.settings import Settings

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_documented(name: str) -> None:
    assert f"PERDURE_{name.upper()}" in (ROOT / "docs" / "settings.md").read_text()


def test_every_patch_is_documented() -> None:
    code = "".join(path.read_text() for path in (ROOT / "workflows").glob("*.py"))
    guarded = set(re.findall(r"workflow\.patched\(\"([^\"]+)\"\)", code))
    table = (ROOT / "docs" / "deploying.md").read_text().partition("### Patches")[2].partition("\n## ")[0]

    assert guarded
    assert guarded == set(re.findall(r"^\| `([a-z-]+)` \| (?:driver|turn) \| \d{4}-\d\d-\d\d \| ", table, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]

    assert [link for link in local if not (page.parent / link).exists()] == []


def blocks(page: str) -> list[str]:
    """The Python of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


async def test_the_agents_of_the_authors_guide_work() -> None:
    declared, asking, _, _, tested, asked = blocks("authoring.md")
    names: dict[str, Any] = {}

    for block in (declared, asking, tested, asked):
        exec(block, names)

    await names["test_the_shop_adds_tea"]()
    await names["test_a_large_refund_is_asked_for"]()
