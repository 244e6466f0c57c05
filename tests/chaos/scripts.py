"""What the scripted provider is told to answer, each in one place. Messages are unique, so that they name a turn."""

import json
from typing import Any

from .world import unique


def say() -> tuple[str, str]:
    """A message, and the answer to it."""
    word = unique()
    return f"say {word}", word
