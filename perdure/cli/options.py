"""What several commands have in common: where the data is, and the settings with what was given laid over them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from perdure.bounds import printable

if TYPE_CHECKING:
    from perdure.settings import Settings

# The settings read PERDURE_DATA_DIR when the option is not given.
DataDir: TypeAlias = Annotated[
    Path | None, typer.Option(help="Where sessions and logs are kept.", show_default="PERDURE_DATA_DIR, else .perdure")
]


def settings_with(**given: Any) -> "Settings":
    """The environment, with the options that were given laid over it."""
    from perdure.settings import read_settings

    return read_settings(**given)


def operating(data_dir: Path | None, agents: str | None = None) -> "Settings":
    """The settings for what needs Temporal."""
    from perdure.runtime.local import beside_dev

    return beside_dev(settings_with(data_dir=data_dir, agents=agents))


def as_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Sequence[str]:
    """The rows for a person to read, under a head; nothing when there are none."""
    lines = [head, *([printable(cell) for cell in row] for row in rows)] if rows else []
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) if lines else 0)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
