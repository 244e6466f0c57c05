"""What callers write to streams: the items of a body, and the sweeper that deletes streams that have expired."""

import json
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from perdure.errors import InvalidJson
from perdure.runtime.sweeper import repeating
from perdure.store.streams import JSON, StreamStore, media_type


def items_of(content_type: str, body: bytes) -> tuple[bytes, ...]:
    """The items of a body: each value of a JSON array, another JSON value, or all bytes as they are.

    `InvalidJson` when the type is JSON and the body is not.
    """
    if media_type(content_type) != JSON:
        return (body,) if body else ()
    if not body.strip():
        return ()
    value = _parsed(body)
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    return tuple(_written(each) for each in values)


def _parsed(body: bytes) -> Any:
    try:
        # Not orjson: it would round integers of more than 64 bits.
        return json.loads(body, parse_constant=_refused)
    except (ValueError, RecursionError):
        raise InvalidJson from None


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _written(value: Any) -> bytes:
    """The value in one line: a line break between its tokens would be one more line of a server-sent event."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        # An unpaired surrogate stays as it was escaped.
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise InvalidJson("Invalid JSON body: a number is too large, or the value too deep.") from None


async def delete_streams(store: StreamStore, owner: str) -> int:
    """Delete all streams of an owner, and what is left of them; returns how many they were."""
    deleted = await store.delete_owned(owner)
    # There may be no API that sweeps.
    await StreamSweeper(store).sweep()
    return deleted


class StreamSweeper:
    """Deletes what has expired or was deleted, some at a time. Several may run at once."""

    def __init__(self, store: StreamStore, *, every: float = 5.0, limit: int = 1000) -> None:
        self._store = store
        self._every = every
        self._limit = limit

    def running(self) -> AbstractAsyncContextManager[None]:
        """Sweep repeatedly while this context is open."""
        return repeating(
            self.sweep,
            (self._every * 0.5, self._every * 1.5),
            away="expired streams cannot be deleted now",
            failed="expired streams could not be deleted",
        )

    async def sweep(self) -> None:
        while await self._store.sweep(self._limit) >= self._limit:
            pass
