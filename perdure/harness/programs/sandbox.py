"""Runs a program that a model wrote, until it ends or waits for the results of its calls.

Each stage is a process of its own: what a program makes of time, memory and values ends at most that process.
This file is run by a worker as the process that forks them: importing the interpreter takes longer than most stages.
The interpreter is Monty: it has no access to files, the network or the clock, and its state can be stored and loaded.
"""

import base64
import contextlib
import hashlib
import importlib
import json
import math
import os
import signal
import socket
import sys
import zlib
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict, cast

if TYPE_CHECKING:
    from pydantic_monty import FutureSnapshot, MontyComplete, MontySession, OSPolicy, ResourceLimits, SyncSnapshot

#: Seconds that a program may compute between two waits, and in all; seconds of CPU time for this process.
_BETWEEN_CALLS = 5.0
_IN_ALL = 20.0
_CPU = 40
#: Bytes of the program's own memory, and of each process.
_MEMORY = 64 * 1024 * 1024
_BYTES = 2 * 1024 * 1024 * 1024
#: Lookups of names and calls of the host, beside the limit of calls.
_MOST_SUSPENSIONS = 2_000
#: The largest values that cross the boundary: how many parts, and how deep. The rest is checked where they go.
_MOST_PARTS = 200_000
_DEEPEST = 100
#: Characters: of a value and of the arguments of one stage as JSON, of what the program prints, of its error, and of
#: its state.
_LARGEST = 4 * 1024 * 1024
_MOST_PRINTED = 10_000
_LONGEST_ERROR = 4_000
_LARGEST_STATE = 1024 * 1024

NO_MEMORY = "The program has used more memory or time than it may."


class Function(TypedDict):
    """A function that the program may call."""

    tool: str
    # The names of its parameters, in order.
    parameters: list[str]


class CallOfProgram(TypedDict):
    tool: str
    # The arguments as JSON; None with a problem.
    arguments: str | None
    problem: str | None
    # Of the name and the arguments: by it a repeated run is compared with the first one.
    digest: str


class Result(TypedDict):
    """The result of a call: a value, or an error that the program can catch."""

    value: Any
    error: str | None
    denied: bool


class PastStage(TypedDict):
    """The calls of which the program has waited for the results."""

    digests: list[str]
    results: list[Result]


class Request(TypedDict):
    code: str
    functions: dict[str, Function]
    seed: str
    now: str
    # How many calls the program may still make.
    calls: int
    # The state of the program where it waits, as `Waiting` had it; None: it runs from the beginning.
    state: str | None
    # All stages so far; with a state only the last one, whose results it waits for.
    past: list[PastStage]
    printed: str
    # Characters that its state may have.
    room: int


class Answer(TypedDict, total=False):
    """What has become of the program: exactly one of the first four is set."""

    value: list[Any]
    error: str
    # The call, counted from 1, at which a repeated run has made another call than the first one.
    diverged: int
    calls: list[CallOfProgram]
    # The state cannot be loaded: the program has to run from its beginning.
    unloadable: bool
    printed: str
    state: str | None
    engine: str


class _Ended(Exception):
    """The program ends with this error."""


class _Diverged(Exception):
    def __init__(self, call: int) -> None:
        self.call = call


class _Unloadable(Exception):
    pass


class _Run:
    """One run of a program, from its beginning or from where it waits."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._functions = request["functions"]
        self._printed = request["printed"]
        self._calls: list[CallOfProgram] = []
        self._ids: list[int] = []
        self._left = request["calls"]
        # The arguments go through the memory of the worker: one value may be in all calls.
        self._room = _LARGEST
        # Whether the interpreter was there.
        self._begun = False

    def run(self) -> Answer:
        from pydantic_monty import Monty, MontyComplete, MontyCrashedError, MontyError, __version__

        answer: Answer
        try:
            with (
                Monty(max_processes=1, request_timeout=_IN_ALL) as pool,
                pool.checkout(script_name="program.py", limits=_limits(), os_policy=self._policy()) as session,
            ):
                self._begun = True
                end = self._advance(session)
                if isinstance(end, MontyComplete):
                    answer = {"value": [self._value(end)]}
                else:
                    answer = {"calls": self._calls, "state": self._packed(end.dump()), "engine": __version__}
        except _Diverged as diverged:
            answer = {"diverged": diverged.call}
        except _Unloadable:
            answer = {"unloadable": True}
        except _Ended as ended:
            answer = {"error": str(ended)}
        except MontyCrashedError:
            if not self._begun:
                return {}
            answer = {"error": NO_MEMORY}
        except MontyError as error:
            answer = {"error": _cut(_displayed(error))}
        answer["printed"] = self._printed
        return answer

    def _advance(self, session: "MontySession") -> "FutureSnapshot | MontyComplete":
        """Run to the end of the program, or until it waits for calls that were never made before."""
        from pydantic_monty import MontyComplete, MontyError

        past = self._request["past"]
        state = self._request["state"]
        if state is not None:
            try:
                step = session.load_snapshot(_unpacked(state), print_callback=self._print)
            except (MontyError, RuntimeError, ValueError, zlib.error) as error:
                raise _Unloadable from error
            # It waits for the same calls, under the same ids.
            waiting = self._until_waiting(step)
            if isinstance(waiting, MontyComplete) or len(waiting.pending_call_ids) != len(past[-1]["results"]):
                raise _Unloadable
            self._ids = sorted(waiting.pending_call_ids)
        else:
            self._printed = ""
            step = session.feed_start(self._request["code"], print_callback=self._print)
            waiting = self._until_waiting(step)
        made = 0
        for stage in past:
            if state is None:
                self._compare(stage, made)
            made += len(stage["digests"])
            if isinstance(waiting, MontyComplete):
                raise _Diverged(made)
            results = {each: _settled(result) for each, result in zip(self._ids, stage["results"], strict=True)}
            self._calls, self._ids, self._room = [], [], _LARGEST
            waiting = self._until_waiting(waiting.resume(cast("Any", results)))
        if isinstance(waiting, MontyComplete) and self._calls:
            names = ", ".join(dict.fromkeys(call["tool"] for call in self._calls))
            raise _Ended(f"The program has ended without waiting for its calls of {names}: none was made. Await them.")
        return waiting

    def _compare(self, stage: PastStage, made: int) -> None:
        digests = [call["digest"] for call in self._calls]
        for number, (mine, recorded) in enumerate(zip(digests, stage["digests"], strict=False)):
            if mine != recorded:
                raise _Diverged(made + number + 1)
        if len(digests) != len(stage["digests"]):
            raise _Diverged(made + min(len(digests), len(stage["digests"])) + 1)

    def _until_waiting(self, step: "SyncSnapshot") -> "FutureSnapshot | MontyComplete":
        from pydantic_monty import FunctionSnapshot, NameLookupSnapshot

        while True:
            if isinstance(step, NameLookupSnapshot):
                step = self._looked_up(step)
            elif isinstance(step, FunctionSnapshot):
                step = self._called(step)
            else:
                return step

    def _looked_up(self, lookup: Any) -> "SyncSnapshot":
        name = lookup.variable_name
        if lookup.object_id is not None or name not in self._functions:
            return lookup.resume()

        def function() -> None: ...

        function.__name__ = function.__qualname__ = name
        return lookup.resume(value=function)

    def _called(self, call: Any) -> "SyncSnapshot":
        if call.is_os_function:
            return call.resume_not_handled()
        function = self._functions.get(call.function_name)
        if function is None:
            return call.resume({"exc_type": "NameError", "message": f"name {call.function_name!r} is not defined"})
        try:
            arguments = _named(function, call.args, call.kwargs)
        except TypeError as wrong:
            return call.resume({"exc_type": "TypeError", "message": f"{call.function_name}() {wrong}"})
        self._left -= 1
        if self._left < 0:
            raise _Ended("The program has made more calls than one program may.")
        text, problem = None, None
        try:
            text = _encoded(arguments)
        except ValueError as unsendable:
            problem = str(unsendable)
        digest = hashlib.sha256(f"{function['tool']} {text} {problem}".encode(errors="surrogatepass")).hexdigest()
        if text is not None and len(text) > self._room:
            text, problem = None, f"with those of the calls before it, it has more than {_LARGEST} characters as JSON"
        self._room -= len(text or "")
        self._calls.append({"tool": function["tool"], "arguments": text, "problem": problem, "digest": digest[:32]})
        self._ids.append(call.call_id)
        return call.resume({"future": ...})

    def _value(self, end: "MontyComplete") -> Any:
        try:
            return json.loads(_encoded(end.output))
        except ValueError as unsendable:
            raise _Ended(f"The value of the program cannot be returned: {unsendable}.") from None

    def _print(self, stream: str, text: str) -> None:
        del stream
        self._printed = (self._printed + text)[:_MOST_PRINTED]

    def _packed(self, state: bytes) -> str | None:
        """The state as text. None: it is too large to be stored, and the program will run from its beginning again."""
        text = base64.b64encode(zlib.compress(state)).decode()
        return text if len(text) <= min(self._request["room"], _LARGEST_STATE) else None

    def _policy(self) -> "OSPolicy":
        # A repeated run must make the same calls: it gets the same time and the same random numbers.
        return {
            "datetime": datetime.fromisoformat(self._request["now"]),
            "sleep": "zero",
            "random_start": {"seed": self._request["seed"]},
        }


def _limits() -> "ResourceLimits":
    return {
        "max_turn_duration_secs": _BETWEEN_CALLS,
        "max_feed_duration_secs": _IN_ALL,
        "max_memory": _MEMORY,
        "max_recursion_depth": 500,
        "max_suspensions": _MOST_SUSPENSIONS,
    }


def _settled(result: Result) -> dict[str, Any]:
    if result["error"] is None:
        return {"return_value": result["value"]}
    return {"exc_type": "PermissionError" if result["denied"] else "RuntimeError", "message": result["error"]}


def _named(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name."""
    parameters = function["parameters"]
    if len(args) > len(parameters):
        raise TypeError(f"takes {len(parameters)} arguments, and {len(args)} were given")
    named = dict(zip(parameters, args, strict=False))
    for name, value in kwargs.items():
        if name in named:
            raise TypeError(f"got the argument {name!r} twice")
        named[name] = value
    return named


def _encoded(value: Any) -> str:
    text = json.dumps(_Plain().made(value), ensure_ascii=False)
    if len(text) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} characters as JSON")
    return text


class _Plain:
    """Makes a value of a program into JSON. Shared parts count wherever they stand, and cycles have no end."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS

    def made(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it has more than {_MOST_PARTS} parts")
        if depth > _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
        match value:
            case None | bool() | str():
                return value
            case float():
                return value if math.isfinite(value) else str(value)
            case int():
                if not -(2**63) <= value < 2**63:
                    raise ValueError("a whole number of more than 64 bits is no JSON here: make it text")
                return value
            case dict():
                known = cast("dict[Any, Any]", value)
                return {_key(name): self.made(inner, depth + 1) for name, inner in known.items()}
            case list() | tuple() | set() | frozenset():
                return [self.made(inner, depth + 1) for inner in cast("list[Any]", value)]
            case bytes():
                return base64.b64encode(value).decode()
            case _ if hasattr(value, "isoformat"):
                return value.isoformat()
            case _ if getattr(value, "is_dataclass", False):
                return self.made(value.attributes, depth)
            case _:
                raise ValueError(f"a value of the type {type(value).__name__} is no JSON")


def _key(name: Any) -> str:
    if isinstance(name, str):
        return name
    if name is None or isinstance(name, bool | int | float):
        return json.dumps(name)[:100]
    raise ValueError("the keys of a dict must be text")


def _unpacked(state: str) -> bytes:
    return zlib.decompress(base64.b64decode(state))


def _displayed(error: Any) -> str:
    return error.display() if hasattr(error, "display") else str(error)


def _cut(text: str) -> str:
    """The text without its middle, if it is too long: what has happened is at its end."""
    if len(text) <= _LONGEST_ERROR:
        return text
    half = _LONGEST_ERROR // 2
    return f"{text[:half]}\n…\n{text[-half:]}"


def _limit_resources() -> None:
    """The kernel ends this process and the interpreter at these limits, also when their worker has died."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # missing on some platforms

        # The worker goes first: a program must not slow down the sessions beside it.
        os.nice(10)
        for what, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, _CPU), (resource.RLIMIT_AS, _BYTES)):
            resource.setrlimit(what, (limit, limit))


def main() -> None:
    """Read a request; write the answer."""
    request: Request = json.load(sys.stdin)
    _limit_resources()
    try:
        answer = _Run(request).run()
    except RecursionError:
        answer = Answer(error=NO_MEMORY)
    except (ImportError, OSError, RuntimeError):
        # The interpreter is not there, or cannot be started now: another worker may run the program.
        answer = Answer()
    sys.stdout.write(json.dumps(answer))


def serve(idle: float) -> None:
    """Fork a process for each socket that comes over standard input, until none has come for so many seconds.

    Nothing of a program is ever read here, so a stage starts without anything of another one.
    """
    # A worker without the interpreter is told so by the first stage.
    with contextlib.suppress(ImportError):
        importlib.import_module("pydantic_monty")

    worker = socket.socket(fileno=os.dup(0))
    worker.settimeout(idle)
    # The kernel forgets those that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(TimeoutError, ConnectionError):
        while True:
            _, files, _, _ = socket.recv_fds(worker, 1, 1)
            if not files:
                return
            if (pid := os.fork()) == 0:
                _run_forked(worker, files[0])
            # Here and in the fork, whichever comes first: the worker may kill the group as soon as it knows it.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            os.close(files[0])
            worker.sendall(pid.to_bytes(4, "big"))


def _run_forked(worker: socket.socket, connection: int) -> None:
    """Read a request from the connection, write the answer, and end this process."""
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        worker.close()
        # The interpreter is a child that is waited for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for standard in (0, 1):
            os.dup2(connection, standard)
        os.close(connection)
        main()
        sys.stdout.flush()
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve(float(sys.argv[1]))
