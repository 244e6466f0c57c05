"""Finds queries and migrations: one .sql file each, inside the package."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable


def queries(dialect: str) -> Mapping[str, str]:
    """The text of every query by name: those that all stores share, then those of one dialect."""
    root = files("perdure.store")
    return {**_texts(root / "sql"), **_texts(root / dialect / "sql")}


def migrations(dialect: str) -> Sequence[str]:
    """The texts of a dialect's migrations, in order; the first makes version 1."""
    texts = _texts(files("perdure.store") / dialect / "migrations")
    return [texts[name] for name in sorted(texts)]


def statements(script: str) -> Sequence[str]:
    """The statements of a migration; each ends with a semicolon at the end of a line."""
    return [text for part in script.split(";\n") if (text := part.strip())]


def _texts(folder: Traversable) -> dict[str, str]:
    return {
        entry.name.removesuffix(".sql"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".sql")
    }
