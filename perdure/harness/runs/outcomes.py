"""How the calls of a run end: what is recorded of a result or an error, and what readers see."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from perdure.bounds import DEEPEST, deeper_than, described, shortened, whole
from perdure.errors import Invalid
from perdure.harness.tools.toolbox import in_thread
from perdure.protocol import names
from perdure.protocol.events import EventType, NewEvent
from perdure.protocol.wire import JsonObject

from .records import Place, Settled

#: The largest result of a step or a run, in bytes of JSON.
LARGEST = 1_048_576
#: The longest text of an error or a log line, in characters.
LONGEST_TEXT = 4_000
#: So many waits are told apart.
_SHOWN = 10


@dataclass(frozen=True)
class Wait:
    """A call that is not over."""

    what: str
    # When to look again, in seconds since the epoch; None: when something is delivered.
    due: float | None = None


@dataclass(frozen=True)
class Ended:
    """The function has returned or raised."""

    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Parked:
    """The function waits."""

    waits: tuple[Wait, ...]
    positions: tuple[int, ...]

    @property
    def due(self) -> float | None:
        return min((each.due for each in self.waits if each.due is not None), default=None)

    @property
    def what(self) -> str:
        some = ", ".join(each.what for each in self.waits[:_SHOWN])
        return some if len(self.waits) <= _SHOWN else f"{some}, and {len(self.waits) - _SHOWN} more"


class Escaped(Exception):
    """What would end the process, or would be told to Temporal with its text."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


async def guarded(function: Callable[[], Awaitable[Any]]) -> Any:
    """Call an author's function; what `except Exception` does not catch is raised as `Escaped`."""
    try:
        return await function()
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise Escaped(error) from None


async def called(function: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    result: Any = await in_thread(lambda: function(*arguments), name, ended=threading.Event())
    return await result if inspect.isawaitable(result) else result


def as_json(value: Any) -> Any:
    """The value as all attempts see it."""
    try:
        encoded = to_json(value, inf_nan_mode="strings", bytes_mode="base64")
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise Invalid(f"This {type(value).__name__} cannot be sent as JSON: {described(error)}") from None
    if len(encoded) > LARGEST:
        raise Invalid(f"This {type(value).__name__} has {len(encoded)} bytes as JSON; {LARGEST} are allowed.")
    known = from_json(encoded)
    if deeper_than(known, DEEPEST):
        raise Invalid(f"This {type(value).__name__} is nested deeper than {DEEPEST} levels.")
    return known


def text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(no text)"
    return shortened(whole(text), LONGEST_TEXT)


def failed(name: str, message: str) -> Settled:
    return Settled(status="failed", error={"name": name, "message": message})


def step_event(place: Place, settled: Settled) -> NewEvent:
    completed = settled.status == "completed"
    data: JsonObject = {"name": place.name or place.kind, "kind": place.kind, "position": place.position}
    if not completed:
        data |= {"status": settled.status, "error": settled.error}
    return NewEvent(
        type=EventType.RUN_STEP_COMPLETED if completed else EventType.RUN_STEP_FAILED,
        key=names.session_key(f"run/step/{place.position}"),
        data=data,
    )
