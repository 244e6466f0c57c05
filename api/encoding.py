"""JSON as bytes: fast, and without a value that it cannot write."""

import json
from typing import Any

import orjson


def dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        # An unpaired surrogate, or a number of more than 64 bits: a tool may well return one, and then the stream of
        # its session must not break on it for ever.
        return json.dumps(value, separators=(",", ":")).encode()
