"""Continuation tokens. The raw token is a secret: the store and Temporal see its hash only."""

import hashlib
import hmac


def derive(secret: bytes, session_id: str) -> str:
    """The default token of a session. It cannot be guessed without the secret; a repeated request gets the same one."""
    digest = hmac.new(secret, b"continuation-token/" + session_id.encode(), hashlib.sha256).hexdigest()
    return f"eve:{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:48]}"


def hashed(token: str) -> str:
    return hashlib.sha256(b"perdure/route/" + token.encode(errors="surrogatepass")).hexdigest()


def auth_route(session_id: str) -> str:
    """The route of a session's OAuth callbacks."""
    return f"{session_id}:auth"
