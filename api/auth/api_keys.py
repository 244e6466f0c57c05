"""API keys of services. The settings have only their hashes."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from perdure.errors import Misconfigured
from perdure.protocol.principals import Principal

from . import Credentials


@dataclass(frozen=True)
class Key:
    """A configured key: its SHA-256, and the attributes of its holder."""

    digest: bytes
    attributes: Mapping[str, list[str]]


class ApiKeys:
    """Recognises a key in `Authorization: Bearer` or `x-api-key`."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        """`keys` maps the name of each key's holder to the key."""
        self._keys = dict(keys)

    async def __call__(self, credentials: Credentials) -> Principal | None:
        for presented in (credentials.api_key, credentials.bearer):
            name = self._holder(presented) if presented is not None else None
            if name is not None:
                return Principal(
                    principal_id=name,
                    principal_type="service",
                    authenticator="api-key",
                    subject=name,
                    attributes=dict(self._keys[name].attributes),
                )
        return None

    def _holder(self, presented: str) -> str | None:
        digest = hashlib.sha256(presented.encode()).digest()
        holder: str | None = None
        # All keys are compared, so that the time reveals nothing.
        for name, key in self._keys.items():
            if hmac.compare_digest(digest, key.digest):
                holder = name
        return holder


def parse_keys(text: str) -> dict[str, Key]:
    """Read `name=sha256-hex[+attribute=value…][,name=sha256-hex…]`."""
    keys: dict[str, Key] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        first, *more = entry.split("+")
        name, _, digest = (part.strip() for part in first.partition("="))
        attributes: dict[str, list[str]] = {}
        for attribute, _, value in (part.partition("=") for part in more):
            attributes.setdefault(attribute.strip(), []).append(value.strip())
        key = Key(_digest(digest), attributes)
        if not name or len(key.digest) != 32 or not all(label and all(held) for label, held in attributes.items()):
            raise Misconfigured(
                f"PERDURE_API_KEYS: the entry of {name or 'an unnamed key'} is not "
                "NAME=SHA256-HEX, or that and +ATTRIBUTE=VALUE."
            )
        keys[name] = key
    return keys


def _digest(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
