"""Descriptions out of docstrings: Google, NumPy and Sphinx style."""

import inspect
import re
from dataclasses import dataclass, field

_GOOGLE = re.compile(r"(?P<title>[A-Z][A-Za-z ]+):\s*$")
_GOOGLE_ITEM = re.compile(r"(?P<name>\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)$")
_NUMPY_ITEM = re.compile(r"(?P<name>\w+)\s*(?::.*)?$")
_SPHINX = re.compile(r":(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?(?P<name>\w+)\s*:\s*(?P<text>.*)$")
_FIELD = re.compile(r":\w+[^:]*:")
_PARAMETERS = frozenset({"Args", "Arguments", "Parameters", "Params", "Other Parameters", "Keyword Args"})
_SECTIONS = _PARAMETERS | frozenset(
    {"Returns", "Return", "Raises", "Yields", "Example", "Examples", "Note", "Notes", "See Also", "Warns", "References"}
)


@dataclass
class Described:
    text: str = ""
    parameters: dict[str, str] = field(default_factory=dict[str, str])


def describe(function: object) -> Described:
    """What the docstring says of a function and of each parameter."""
    lines = (inspect.getdoc(function) or "").splitlines()
    described = Described()
    text: list[str] = []
    position = 0
    while position < len(lines):
        title, skip = _section(lines, position)
        if title is None and not _FIELD.match(lines[position]):
            text.append(lines[position])
            position += 1
            continue
        end = _end(lines, position + skip) if title else _end_of_field(lines, position)
        block = lines[position + skip : end] if title else lines[position:end]
        if title is None:
            _read_sphinx(block, described.parameters)
        elif title in _PARAMETERS:
            _read_items(block, _NUMPY_ITEM if skip == 2 else _GOOGLE_ITEM, described.parameters)
        position = end
    described.text = "\n".join(text).strip()
    return described


def _section(lines: list[str], position: int) -> tuple[str | None, int]:
    """The title of the section that begins here, and how many lines the title takes."""
    line = lines[position].rstrip()
    if line in _SECTIONS and position + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[position + 1].strip()):
        return line, 2
    match = _GOOGLE.match(line)
    if match and match["title"] in _SECTIONS:
        return match["title"], 1
    return None, 0


def _end(lines: list[str], start: int) -> int:
    for position in range(start, len(lines)):
        if _section(lines, position)[0] or _FIELD.match(lines[position]):
            return position
    return len(lines)


def _end_of_field(lines: list[str], start: int) -> int:
    for position in range(start + 1, len(lines)):
        if not lines[position].startswith((" ", "\t")):
            return position
    return len(lines)


def _read_sphinx(block: list[str], parameters: dict[str, str]) -> None:
    match = _SPHINX.match(block[0])
    if match:
        parameters[match["name"]] = _joined([match["text"], *block[1:]])


def _read_items(block: list[str], item: re.Pattern[str], parameters: dict[str, str]) -> None:
    """Items stand at the outermost indentation of the block; what is deeper belongs to the item above."""
    indents = [len(line) - len(line.lstrip()) for line in block if line.strip()]
    outer = min(indents, default=0)
    name: str | None = None
    texts: dict[str, list[str]] = {}
    for line in filter(str.strip, block):
        match = item.match(line.strip()) if len(line) - len(line.lstrip()) == outer else None
        if match:
            name = str(match["name"]).lstrip("*")
            texts[name] = [match.groupdict().get("text") or ""]
        elif name:
            texts[name].append(line)
    parameters.update({known: _joined(lines) for known, lines in texts.items()})


def _joined(lines: list[str]) -> str:
    return " ".join(filter(None, (line.strip() for line in lines)))
