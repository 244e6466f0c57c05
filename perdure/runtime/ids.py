"""New ids: sortable by time, unguessable in the rest."""

import secrets
import time

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def ulid() -> str:
    """48 bits of milliseconds and 80 random bits, in Crockford's base 32."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def session_id() -> str:
    return f"ses_{ulid()}"


def delivery_id() -> str:
    return f"dlv_{ulid()}"
