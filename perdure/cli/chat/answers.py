"""What a session asks people, and what they answer in a terminal."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from perdure.bounds import printable, shortened

Json = dict[str, Any]

_APPROVE = ("approve", "yes", "y")
_DENY = ("deny", "no", "n")
_DENIAL = re.compile(r"(?:deny\s|(?:deny|no|n)\s*[,:])\s*(?P<reason>.+)", re.IGNORECASE | re.DOTALL)
_EDIT = re.compile(r"edit\b\s*(?P<arguments>.*)", re.IGNORECASE | re.DOTALL)
#: Characters of a request that are shown.
_LONGEST = 20_000


@dataclass(frozen=True)
class Question:
    """An input request, from an event or from the API."""

    request_id: str
    kind: str
    prompt: str
    tool: str
    arguments: Json
    options: Sequence[Json]
    freeform: bool

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> "Question":
        # Of whom this comes is not known: what has another form than ours must not end the chat.
        details, action = object_of(request.get("details")), object_of(request.get("action"))
        options: object = request.get("options")
        return cls(
            request_id=str(request.get("requestId")),
            kind=str(details.get("kind") or request.get("kind") or ""),
            prompt=str(request.get("prompt") or details.get("summary") or request.get("summary") or ""),
            tool=str(action.get("toolName") or request.get("tool") or ""),
            arguments=object_of(action.get("input") or request.get("arguments")),
            options=[object_of(each) for each in cast("list[Any]", options)] if isinstance(options, list) else [],
            freeform=bool(request.get("allowFreeform")),
        )

    @property
    def is_approval(self) -> bool:
        return self.kind == "approval"

    def lines(self) -> list[str]:
        """The request for a person, and how to answer it."""
        shown = [shortened(self.prompt, _LONGEST)]
        if self.is_approval:
            given = json.dumps(self.arguments, ensure_ascii=False)
            shown.append(printable(f"  {self.tool} {shortened(given, _LONGEST)}"))
            if len(given) > _LONGEST:
                shown.append(f"  ({len(given) - _LONGEST} characters of the arguments are not shown)")
        shown += [f"  {number} {printable(_label(each))}" for number, each in enumerate(self.options, 1)]
        shown.append(f"({self.ways()})")
        return shown

    def ways(self) -> str:
        """How it can be answered."""
        if self.is_approval:
            return "a number, yes, no, `deny REASON`, `edit`, or /later"
        if not self.options:
            return "in your words, or /later"
        return f"a number or an option{', your own words' if self.freeform else ''}, or /later"


@dataclass(frozen=True)
class Unclear:
    """What was typed is no answer."""

    why: str


@dataclass(frozen=True)
class Edit:
    """The call is to be approved with other arguments, which are still to be typed."""


def read_answer(question: Question, line: str) -> Json | Unclear | Edit:
    """The answer that was typed, as `inputResponses` have it."""
    line = line.strip()
    if question.is_approval and (edit := _EDIT.fullmatch(line)):
        return read_arguments(question, edit["arguments"]) if edit["arguments"] else Edit()
    chosen = _chosen(question, line)
    if chosen is not None:
        return {"requestId": question.request_id, "optionId": chosen}
    if question.is_approval:
        if denial := _DENIAL.fullmatch(line):
            return {"requestId": question.request_id, "optionId": "deny", "reason": denial["reason"]}
        # Not sent: whatever is no approval would be a denial.
        return Unclear(f"Answer with {question.ways()}.")
    if line and (question.freeform or not question.options):
        return {"requestId": question.request_id, "text": line}
    return Unclear(f"Answer with {question.ways()}.")


def read_arguments(question: Question, text: str, schema: Json | None = None) -> Json | Unclear:
    """The approval with these arguments, if they are some that the tool takes."""
    try:
        arguments: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Unclear(f"This is no JSON: {error}")
    if not isinstance(arguments, dict):
        return Unclear("Arguments are a JSON object, as {...}.")
    if schema and (problem := _problem(schema, cast("Json", arguments))):
        return Unclear(problem)
    return {"requestId": question.request_id, "optionId": "approve", "arguments": arguments}


def _problem(schema: Json, arguments: Json) -> str | None:
    """What is wrong with the arguments. A schema that cannot be used here is left to the API, which checks, too."""
    import jsonschema_rs

    try:
        found = next(iter(jsonschema_rs.validator_for(schema).iter_errors(arguments)), None)
    except ValueError:
        return None
    if found is None:
        return None
    place = ".".join(str(each) for each in found.instance_path)
    return printable(shortened(f"{place}: {found.message}" if place else found.message, 300))


def _chosen(question: Question, line: str) -> str | None:
    """The one option that a number or a word names."""
    options = [str(each.get("id")) for each in question.options]
    low = line.casefold()
    if line.isdecimal() and len(line) < 4 and 1 <= int(line) <= len(options):
        return options[int(line) - 1]
    if question.is_approval:
        words = {**dict.fromkeys(_APPROVE, "approve"), **dict.fromkeys(_DENY, "deny")}
        if low in words:
            return words[low]
    for name in ("id", "label"):
        named = [str(each.get("id")) for each in question.options if str(each.get(name, "")).casefold() == low]
        if len(named) == 1:
            return named[0]
    return None


def object_of(value: object) -> Json:
    """The object; an empty one for anything else."""
    return cast("Json", value) if isinstance(value, dict) else {}


def _label(option: Json) -> str:
    label, about = str(option.get("label") or option.get("id")), option.get("description")
    return f"{label}: {about}" if about else label
