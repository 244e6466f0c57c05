"""What several commands have in common: where the data is, and the settings with what was given laid over them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    from perdure.settings import Settings

# The settings read PERDURE_DATA_DIR when the option is not given.
DataDir: TypeAlias = Annotated[Path | None, typer.Option(help="Where sessions and logs are kept. [default: .perdure]")]


def settings_with(**given: Any) -> "Settings":
    """The environment, with the options that were given laid over it."""
    from perdure.settings import read_settings

    return read_settings(**given)


def operating(data_dir: Path | None, agents: str | None = None) -> "Settings":
    """The settings for what needs Temporal."""
    from perdure.runtime.local import beside_dev

    return beside_dev(settings_with(data_dir=data_dir, agents=agents))
