"""What the console writes again of the wire, because it has no build step that could take it from Python."""

import re
from typing import Any, get_args

import pytest

from api.console.pages import STATIC
from perdure.agents.tool import Effects
from perdure.protocol.deliveries import QueueMode
from perdure.protocol.events import PIECES, TERMINAL
from perdure.protocol.inputs import InputStatus
from perdure.store.values import ShownStatus


def values(file: str, name: str) -> set[str]:
    """The texts of a list in a module, or the names of an object."""
    source = (STATIC / file).read_text()
    found = re.search(rf"^(?:export )?const {name} = ([\[{{].*?[\]}}]);", source, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{file} has no {name}"
    pattern = r'"([^"]+)"' if found[1].startswith("[") else r"(\w+): "
    return set(re.findall(pattern, found[1]))


@pytest.mark.parametrize(
    ("file", "name", "known"),
    [
        ("feed.js", "TERMINAL", TERMINAL),
        ("fold.js", "PIECES", PIECES),
        ("work.js", "MODES", get_args(QueueMode)),
        ("parts.js", "STATUS", get_args(ShownStatus)),
        ("views/sessions.js", "STATES", get_args(ShownStatus)),
        ("views/agents.js", "EFFECTS", get_args(Effects)),
        ("views/ask.js", "ENDS", {*get_args(InputStatus), "unknown"} - {"open", "answered"}),
    ],
)
def test_a_list_of_the_console_has_what_the_wire_has(file: str, name: str, known: Any) -> None:
    assert values(file, name) == set(known)
