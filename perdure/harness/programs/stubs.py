"""The tools of an agent as functions of Python: their names, and typed stubs for the model."""

import builtins
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic_ai.tools import ToolDefinition

from perdure.errors import InvalidDeclaration
from perdure.protocol.wire import JsonObject

_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_ANY = "Any"
#: How deep the types of parameters are written out.
_DEEPEST = 5


def python_names(agent: str, tools: Sequence[str]) -> Mapping[str, str]:
    """The tools by their names in a program; raises `InvalidDeclaration` if two would have the same one."""
    found: dict[str, str] = {}
    for tool in tools:
        name = _identifier(tool)
        if found.setdefault(name, tool) != tool:
            raise InvalidDeclaration(
                f"Agent {agent!r}: the tools {found[name]!r} and {tool!r} have the same name in a program, {name}: "
                "rename one."
            )
    return found


def parameters_of(definition: ToolDefinition) -> list[str]:
    """The names of the parameters, in order."""
    return list(_mapping(definition.parameters_json_schema.get("properties")))


def stubs(functions: Mapping[str, ToolDefinition]) -> str:
    """The declarations of all functions, with the types that they use."""
    types = _Types()
    declared = [_stub(name, definition, types) for name, definition in functions.items()]
    return "\n\n".join([*types.declarations, *declared])


def _identifier(tool: str) -> str:
    name = re.sub(r"\W", "_", tool)
    name = f"_{name}" if not name or name[0].isdigit() else name
    return f"{name}_" if keyword.iskeyword(name) or hasattr(builtins, name) else name


def _stub(name: str, definition: ToolDefinition, types: "_Types") -> str:
    schema = definition.parameters_json_schema
    required = schema.get("required", [])
    returned = _mapping(definition.return_schema)
    definitions = {**_mapping(schema.get("$defs")), **_mapping(returned.get("$defs"))}
    parameters: list[str] = []
    notes: list[str] = []
    for parameter, inner in _mapping(schema.get("properties")).items():
        annotation = types.annotation(inner, definitions)
        if parameter.isidentifier() and not keyword.iskeyword(parameter):
            parameters.append(f"{parameter}: {annotation}" + ("" if parameter in required else " = ..."))
        else:
            notes.append(f'Pass {parameter!r} ({annotation}) with **{{"{parameter}": …}}.')
        if isinstance(inner, dict) and (text := cast(JsonObject, inner).get("description")):
            notes.append(f"{parameter}: {text}")
    arguments = f"*, {', '.join(parameters)}" if parameters else ""
    text = "\n".join([*filter(None, [definition.description]), *notes]).replace('"""', "'''")
    body = f'    """{_indented(text)}"""' if text else "    ..."
    return f"async def {name}({arguments}) -> {types.annotation(returned, definitions)}:\n{body}"


def _indented(text: str) -> str:
    return "\n    ".join(text.splitlines())


class _Types:
    """Makes annotations of JSON schemas. Objects with named parts become `TypedDict`s."""

    def __init__(self) -> None:
        self.declarations: list[str] = []
        self._declared: dict[str, Mapping[str, Any]] = {}

    def annotation(self, schema: Any, definitions: Mapping[str, Any], depth: int = 0) -> str:
        known = _mapping(schema)
        if not known or depth > _DEEPEST:
            return _ANY
        if isinstance(target := known.get("$ref"), str):
            name = target.rpartition("/")[2]
            return self.annotation({"title": name, **_mapping(definitions.get(name))}, definitions, depth + 1)
        if isinstance(choices := known.get("enum"), list) or (choices := [known["const"]] if "const" in known else []):
            return f"Literal[{', '.join(map(repr, cast('list[Any]', choices)))}]"
        for union in ("anyOf", "oneOf"):
            if parts := _list(known.get(union)):
                return self._union(parts, definitions, depth)
        kind = known.get("type")
        if isinstance(kind, list):
            return self._union([{**known, "type": each} for each in cast("list[Any]", kind)], definitions, depth)
        if kind == "array":
            return f"list[{self.annotation(known.get('items'), definitions, depth + 1)}]"
        if kind == "object":
            return self._object(known, definitions, depth)
        return _TYPES.get(str(kind), _ANY)

    def _union(self, parts: Sequence[Any], definitions: Mapping[str, Any], depth: int) -> str:
        found = dict.fromkeys(self.annotation(part, definitions, depth + 1) for part in parts)
        return _ANY if _ANY in found else " | ".join(found)

    def _object(self, schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> str:
        name, properties = str(schema.get("title", "")), _mapping(schema.get("properties"))
        usable = all(each.isidentifier() and not keyword.iskeyword(each) for each in (name, *properties))
        if not (properties and usable):
            return f"dict[str, {self.annotation(schema.get('additionalProperties'), definitions, depth + 1)}]"
        if self._declared.setdefault(name, schema) is not schema:
            # Two types of one name would be confused.
            return name if self._declared[name] == schema else "dict[str, Any]"
        required = _list(schema.get("required"))
        lines = [f"class {name}(TypedDict):"]
        for each, inner in properties.items():
            annotation = self.annotation(inner, definitions, depth + 1)
            lines.append(f"    {each}: {annotation if each in required else f'NotRequired[{annotation}]'}")
        self.declarations.append("\n".join(lines))
        return name


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
