"""What the scripted provider has to do. Each message is sent once, so that it names its turn."""

import json
from dataclasses import dataclass
from typing import Literal

from .world import unique


@dataclass(frozen=True)
class Script:
    """A message, and what the model says in the end."""

    message: str
    answer: str
    #: By which the ledger knows the calls.
    note: str = ""


def say() -> Script:
    word = unique()
    return Script(f"say {word}", word)


def drip(words: int = 20, delay: int = 30) -> Script:
    """A text that takes its time (milliseconds a word)."""
    return Script(f"drip {words} words delay {delay} {unique()}", "".join(f"w{number} " for number in range(words)))


def call(tool: str, *, gate: Literal["before", "after"] | None = None, slowly: bool = False) -> Script:
    """One call, and then a text. The call waits at a gate before or after its effect; the gate is its note.

    Slowly: the call comes in pieces, so that a part of the answer is always written before its end.
    """
    note, word = unique("n"), unique()
    arguments = {"note": note, **({gate: note} if gate else {})}
    pace = "drip 3 words delay 40; " if slowly else ""
    return Script(f"{pace}call {tool} {json.dumps(arguments)} then say {word}", word, note)


def calls(*tools: str) -> Script:
    """Several calls at once, and then a text."""
    word = unique()
    asked = " and ".join(f"{tool} {json.dumps({'note': unique('n')})}" for tool in tools)
    return Script(f"call {asked} then say {word}", word)


def question() -> Script:
    """A question with two options, and then a text."""
    word = unique()
    asked = {"prompt": f"Which, for {word}?", "options": ["red", "blue"]}
    return Script(f"call ask_question {json.dumps(asked)} then say {word}", word)
