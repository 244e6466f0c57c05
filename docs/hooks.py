"""Pages of the site that are made of files outside docs/, so that links hold on a plain checkout, too."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parent.parent
_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
#: Where links from a checkout lead on the site.
_LINKS = [
    *((rf"\]\({re.escape(file)}", f"]({page}") for file, page in _PAGES.items()),
    (r"\]\(docs/decisions\)", "](decisions/0001-store.md)"),
    (r"\]\(docs/", "]("),
    (r"\]\((?:\.\./)?examples\)", "](examples.md)"),
    (r"\]\((?:\.\./)?examples/(\w+)\.py\)", r"](examples.md#\1)"),
]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ does not hold."""
    pages = {page: (_ROOT / file).read_text() for file, page in _PAGES.items()}
    for page, content in {**pages, "examples.md": _examples()}.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead the links of a checkout to the pages of the site."""
    for pattern, link in _LINKS:
        markdown = re.sub(pattern, link, markdown)
    return markdown


def _examples() -> str:
    """All examples, each under its name."""
    modules = sorted(path for path in (_ROOT / "examples").glob("*.py") if path.stem != "__init__")
    return "# Examples\n\n" + "\n".join(f"## {path.stem}\n\n```python\n{path.read_text()}```\n" for path in modules)
