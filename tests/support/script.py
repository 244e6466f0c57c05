"""What the scripted provider does, said by the user's message itself.

    say Hello there                          text, word by word
    think Let me see; say Hello              reasoning first
    call roll {"sides": 6} and clock {}      two calls at once
    call roll {} then say Rolled             a second round, once the results are in
    drip 50 words delay 10                   fifty words, ten milliseconds apart
    fail 429 times 2 after 1; say Hello      two refusals (Retry-After: 1), then the rest
    fail 400 once; say Hello                 a refusal of the first request that says this
    fail 400 quoting                         a refusal that quotes the key, as some providers do
    cut after 3; say a b c d e               the connection breaks after three chunks
    stop after 3; say a b c d e              the stream ends politely, but too early
    break rate_limit_error; say a b          the provider reports an error of this kind after these words
    junk json | bytes | page | nothing       a whole answer that cannot be read, from its first event on
    weigh 95000; say Hello                   reports so many tokens of the prompt
    cached 6; say Hello                      reports that so many of them came from a cache
    limit 4000; say Hello                    refuses a conversation with more characters as too long
    hang                                     no answer at all
    empty                                    an answer without anything in it
    odd text | id | name | nesting           half a character; calls of `add` by an id, or of a tool by a name, that
                                             none can have, or one with arguments of twenty thousand levels
    odd number-id | number-name              calls by an id, or of a tool by a name, that is a number
Anything else is answered with "ok". A JSON object (the request of an execution) has the script as its `script`.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

_THEN = re.compile(r"\s+then\s+")
_VERB = re.compile(
    r"(?:;\s*)?(say|think|call|drip|fail|cut after|stop after|break|junk|weigh|cached|limit|hang|empty|odd)\b\s*",
    re.DOTALL,
)
_DRIP = re.compile(r"(\d+)(?:\s+words)?(?:\s+delay\s+([\d.]+))?")
_FAIL = re.compile(r"(\d+)(?:\s+times\s+(\d+))?(?:\s+after\s+([\d.]+))?(\s+quoting)?(\s+once)?")
_NAME = re.compile(r"([\w-]+)\s*")


@dataclass(frozen=True)
class Fail:
    status: int
    times: int
    retry_after: str | None
    quotes: bool = False
    # What counts are requests with these words, whatever was said before them.
    once: bool = False


@dataclass(frozen=True)
class Plan:
    """One answer."""

    words: tuple[str, ...] = ()
    thoughts: str = ""
    calls: tuple[tuple[Any, str], ...] = ()
    delay: float = 0.0
    fail: Fail | None = None
    cut_after: int | None = None
    stop_after: int | None = None
    breaks: str = ""
    hang: bool = False
    call_id: Any = None
    junk: bytes | None = None
    prompt_tokens: int = 10
    cached_tokens: int = 0
    limit: int | None = None


#: Verbs with a number, and the fields that they set.
_NUMBERS = {
    "cut after": "cut_after",
    "stop after": "stop_after",
    "weigh": "prompt_tokens",
    "cached": "cached_tokens",
    "limit": "limit",
}
_JUNK = {
    "json": b"event: message_start\ndata: {nope\n\n",
    "bytes": b'event: message_start\ndata: "\xff\xfe"\n\n',
    "page": b"<html><body>Welcome</body></html>",
    "nothing": b"data: [DONE]\n\n",
}
_ODD = {
    "text": Plan(words=("half \ud800", "a word")),
    "id": Plan(calls=(("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}')), call_id="\0\ud800" + "x" * 100_000),
    "name": Plan(calls=(("ro\0ll \ud800" + "x" * 100_000, "{}"),)),
    "number-id": Plan(calls=(("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}')), call_id=5),
    "number-name": Plan(calls=((5, "{}"),)),
    "nesting": Plan(calls=(("add", '{"a": ' + "[" * 20_000 + "]" * 20_000 + "}"),)),
}


def plan(said: str, rounds: int, results: str) -> Plan:
    """The answer to a message after so many rounds of tool results."""
    if said.startswith("{"):
        said = json.loads(said).get("script", "")
    segments = _THEN.split(said.strip())
    if rounds >= len(segments):
        return Plan(words=_words(f"Results: {results}"))
    return _read(segments[rounds])


def gone_on(made: Plan, begun: str) -> Plan:
    """The rest of an answer that has begun so, and whose stream breaks no second time."""
    whole = "".join(made.words)
    if not whole.startswith(begun):
        raise ValueError(f"The answer does not begin with {begun!r}")
    return replace(made, words=_words(whole[len(begun) :], strip=False), thoughts="", cut_after=None, stop_after=None)


def _read(segment: str) -> Plan:
    made = Plan()
    rest = segment
    while match := _VERB.match(rest):
        made, rest = _apply(made, match[1], rest[match.end() :])
    return made if made != Plan() or segment.startswith("empty") else Plan(words=("ok",))


def _apply(made: Plan, verb: str, rest: str) -> tuple[Plan, str]:
    match verb:
        case "say":
            return replace(made, words=_words(rest)), ""
        case "think":
            thought, semicolon, rest = rest.partition(";")
            return replace(made, thoughts=thought.strip()), semicolon + rest
        case "call":
            calls, rest = _calls(rest)
            return replace(made, calls=calls), rest
        case "drip":
            found, rest = _take(_DRIP, rest)
            words = tuple(f"w{number} " for number in range(int(found[0])))
            return replace(made, words=words, delay=float(found[1] or 0) / 1000), rest
        case "fail":
            found, rest = _take(_FAIL, rest)
            return replace(
                made, fail=Fail(int(found[0]), int(found[1] or 1), found[2], bool(found[3]), bool(found[4]))
            ), rest
        case "break":
            found, rest = _take(_NAME, rest)
            return replace(made, breaks=found[0]), rest
        case "junk":
            found, rest = _take(_NAME, rest)
            return replace(made, junk=_JUNK[found[0]]), rest
        case "hang":
            return replace(made, hang=True), rest
        case "empty":
            return made, rest
        case "odd":
            found, rest = _take(_NAME, rest)
            return _ODD[found[0]], rest
        case _:
            found, rest = _take(re.compile(r"(\d+)"), rest)
            field: Any = _NUMBERS[verb]
            return replace(made, **{field: int(found[0])}), rest


def _take(pattern: re.Pattern[str], rest: str) -> tuple[tuple[Any, ...], str]:
    match = pattern.match(rest)
    if match is None:
        raise ValueError(f"The script breaks off at {rest!r}")
    return match.groups(), rest[match.end() :].lstrip()


def _calls(rest: str) -> tuple[tuple[tuple[str, str], ...], str]:
    calls: list[tuple[str, str]] = []
    while True:
        (name,), rest = _take(_NAME, rest)
        arguments = "{}"
        if rest.startswith("{"):
            _, end = json.JSONDecoder().raw_decode(rest)
            arguments, rest = rest[:end], rest[end:].lstrip()
        calls.append((name, arguments))
        if not rest.startswith("and "):
            return tuple(calls), rest
        rest = rest.removeprefix("and ").lstrip()


def _words(text: str, *, strip: bool = True) -> tuple[str, ...]:
    return tuple(re.findall(r"\S+\s*|\s+", text.strip() if strip else text))
