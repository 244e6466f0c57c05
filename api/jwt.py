"""Signed tokens of an identity provider, checked against the keys that it publishes."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard, cast

import httpx2
from joserfc import jwt
from joserfc.jwk import KeySet
from joserfc.jws import extract_compact

from perdure.bounds import whole
from perdure.errors import PerdureError, Unauthenticated, Unavailable
from perdure.protocol.deliveries import Principal

from .auth import Credentials

log = logging.getLogger("perdure.api.auth")

ALGORITHMS = ("RS256", "ES256", "EdDSA", "Ed25519")
LEEWAY = 30
_KEY_TYPES = {"RS256": "RSA", "ES256": "EC", "EdDSA": "OKP", "Ed25519": "OKP"}
#: Claims of a token that authors may see; all others are dropped.
_ATTRIBUTES = ("email", "name", "preferred_username", "scope", "groups", "roles", "org_id", "tenant")
#: Claims whose values are roles, unless the settings name others.
ROLE_CLAIMS = ("role", "roles", "scope")
#: Seconds for a whole fetch, and how long a request waits for it when its key is known already.
_LONGEST_FETCH = 5.0
_PATIENCE = 1.0


class Keys(Protocol):
    """The source of the provider's public keys."""

    async def named(self, kid: str | None) -> KeySet:
        """The keys, with `kid` among them if the provider has it."""
        ...


class JwksKeys:
    """The published key set: cached, and fetched again when a token names an unknown key."""

    def __init__(
        self,
        url: str,
        *,
        lifetime: float = 600.0,
        pause: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._lifetime = lifetime
        self._pause = pause
        self._clock = clock
        self._keys: KeySet | None = None
        self._fetched = -float("inf")
        self._asked = -float("inf")
        # The running fetch, and until when requests with a known key wait for it.
        self._fetching: asyncio.Task[None] | None = None
        self._patience = 0.0

    async def named(self, kid: str | None) -> KeySet:
        if not self._knows(kid) or self._clock() - self._fetched > self._lifetime:
            await self._refreshed(kid)
        if self._keys is None:
            raise Unavailable("The keys of the identity provider cannot be fetched right now.")
        return self._keys

    async def _refreshed(self, kid: str | None) -> None:
        """Fetch the keys if the pause has passed, and wait for the running fetch."""
        now = asyncio.get_running_loop().time()
        # Unauthenticated callers choose the kid of their tokens; they must not control how often keys are fetched.
        if self._fetching is None and self._clock() - self._asked >= self._pause:
            self._patience = now + _PATIENCE
            self._fetching = asyncio.create_task(self._fetch())
        if self._fetching is not None:
            # A provider that does not respond must not delay callers whose key is known.
            limit = max(0.0, self._patience - now) if self._knows(kid) else None
            await asyncio.wait({self._fetching}, timeout=limit)

    def _knows(self, kid: str | None) -> bool:
        return self._keys is not None and (kid is None or any(key.kid == kid for key in self._keys))

    async def _fetch(self) -> None:
        self._asked = self._clock()
        try:
            async with asyncio.timeout(_LONGEST_FETCH), httpx2.AsyncClient(timeout=_LONGEST_FETCH) as client:
                answer = await client.get(self._url, headers={"accept": "application/json"})
                answer.raise_for_status()
                self._keys = KeySet.import_key_set(answer.json())
                self._fetched = self._clock()
        except Exception as error:
            # Old keys are better than none: an outage of the provider should not refuse all callers.
            log.warning("the keys at %s cannot be read: %s", self._url, str(error) or type(error).__name__)
        finally:
            self._fetching = None


class Jwt:
    """Recognises a user by a bearer token that the issuer signed for this audience."""

    def __init__(self, keys: Keys, *, issuer: str, audience: str, role_claims: Sequence[str] = ROLE_CLAIMS) -> None:
        """`role_claims` name the claims that contain roles; `realm_access.roles` is a claim inside a claim."""
        self._keys = keys
        self._issuer = issuer
        self._role_claims = tuple(role_claims)
        self._claims = jwt.JWTClaimsRegistry(
            leeway=LEEWAY,
            iss={"essential": True, "value": issuer},
            aud={"essential": True, "value": audience},
            exp={"essential": True},
            sub={"essential": True},
        )

    async def __call__(self, credentials: Credentials) -> Principal | None:
        token = credentials.bearer
        if token is None or token.count(".") != 2:
            return None
        try:
            claims = await self._verified(token)
        except PerdureError:
            raise
        except Exception as error:
            # Every other exception means that the token is invalid. The log gets the error's code, because its text may
            # quote the token. The caller gets no reason, because a forger could use it.
            log.info("a bearer token was refused: %s", getattr(error, "error", type(error).__name__))
            raise _invalid() from None
        subject = claims["sub"]
        if not isinstance(subject, str) or not subject or "\0" in subject or whole(subject) != subject:
            # It becomes part of keys in the store, which accepts no NUL and no unpaired surrogate. Other unprintable
            # characters (a joiner, a wide space) are allowed: sessions may belong to such a name.
            raise _invalid()
        return Principal(
            principal_id=subject,
            principal_type="user",
            authenticator="jwt",
            issuer=self._issuer,
            subject=subject,
            attributes=_attributes(claims, self._role_claims),
        )

    async def _verified(self, token: str) -> dict[str, Any]:
        header = extract_compact(token.encode()).headers()
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in ALGORITHMS or not isinstance(kid, str | None):
            raise ValueError(f"algorithm {algorithm!r} is not accepted")
        published = await self._keys.named(kid)
        # A key must have the type of the algorithm, and a key that is published for encryption must not sign.
        fitting = [
            key
            for key in published
            if key.key_type == _KEY_TYPES[algorithm] and (kid is None or key.kid == kid) and key.get("use") != "enc"
        ]
        if not fitting:
            raise ValueError("no published key fits")
        decoded = jwt.decode(token, KeySet(fitting), algorithms=list(ALGORITHMS))
        self._claims.validate(decoded.claims)
        return dict(decoded.claims)


def _invalid() -> Unauthenticated:
    return Unauthenticated("The bearer token is not valid.", challenges=('Bearer error="invalid_token"',))


def _attributes(claims: dict[str, Any], role_claims: Sequence[str]) -> dict[str, str | list[str]]:
    found: dict[str, str | list[str]] = {}
    for name in _ATTRIBUTES:
        value = claims.get(name)
        if name == "scope" and value is not None:
            value = _words(value)
        if isinstance(value, str) or _is_words(value):
            found[name] = value
    roles = [role for claim in role_claims for role in _words(_claim(claims, claim))]
    if roles:
        found["role"] = list(dict.fromkeys(roles))
    return found


def _claim(claims: dict[str, Any], name: str) -> Any:
    """The claim of this name, or of the path with dots. The whole name is tried first, because URLs have dots."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        if not isinstance(value, dict):
            return None
        value = cast("dict[str, Any]", value).get(part)
    return value


def _words(value: Any) -> list[str]:
    """A list of names unchanged; a text such as `scope` is split at its spaces."""
    if isinstance(value, str):
        return value.split()
    return value if _is_words(value) else []


def _is_words(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[Any]", value))
