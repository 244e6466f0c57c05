"""API keys: services that hold a secret of which we know the hash."""

import hashlib
import hmac
from collections.abc import Mapping

from perdure.errors import Misconfigured
from perdure.protocol.principals import Principal

from . import Credentials


class ApiKeys:
    """Recognises a key in `Authorization: Bearer` or `x-api-key`."""

    def __init__(self, hashes: Mapping[str, bytes]) -> None:
        """`hashes` maps the name of each key's holder to the SHA-256 of the key."""
        self._hashes = dict(hashes)

    async def __call__(self, credentials: Credentials) -> Principal | None:
        for presented in (credentials.api_key, credentials.bearer):
            name = self._holder(presented) if presented is not None else None
            if name is not None:
                return Principal(principal_id=name, principal_type="service", authenticator="api-key", subject=name)
        return None

    def _holder(self, presented: str) -> str | None:
        digest = hashlib.sha256(presented.encode()).digest()
        holder: str | None = None
        # All of them, always: the time it takes tells nothing.
        for name, expected in self._hashes.items():
            if hmac.compare_digest(digest, expected):
                holder = name
        return holder


def parse_keys(text: str) -> dict[str, bytes]:
    """Read `name=sha256-hex[,name=sha256-hex…]`."""
    keys: dict[str, bytes] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, digest = (part.strip() for part in entry.partition("="))
        try:
            keys[name] = bytes.fromhex(digest)
        except ValueError:
            keys[name] = b""
        if not name or len(keys[name]) != 32:
            raise Misconfigured(f"PERDURE_API_KEYS: the entry of {name or 'an unnamed key'} is not NAME=SHA256-HEX.")
    return keys
