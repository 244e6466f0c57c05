"""Authentication: an ordered list of authenticators; the first that recognises the caller decides."""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from perdure.errors import Forbidden, Misconfigured, Unauthenticated
from perdure.protocol.deliveries import LOCAL, Principal
from perdure.settings import Settings

if TYPE_CHECKING:
    from .jwt import Jwt


_CLAIMS = ("x-api-key", "authorization")


@dataclass(frozen=True)
class Credentials:
    """The credentials and the origin of a request."""

    headers: Headers
    # The address of the peer of the connection; None when there is none (a Unix socket).
    peer: str | None = None
    http_version: str = "1.1"

    @property
    def bearer(self) -> str | None:
        scheme, _, token = self.headers.get("authorization", "").strip().partition(" ")
        return token.strip() if scheme.lower() == "bearer" and token.strip() else None

    @property
    def api_key(self) -> str | None:
        return self.headers.get("x-api-key", "").strip() or None

    @property
    def presented(self) -> bool:
        """Whether the request has credentials; wrong ones are refused and never ignored."""
        return any(name in _CLAIMS and value.strip() for name, value in self.headers.items())

    def claims(self) -> Sequence["Credentials"]:
        """Each credential as if it were the only one, API keys first. A request without credentials is one entry."""
        if not self.presented:
            return (self,)
        others = [(name, value) for name, value in self.headers.raw if name.decode("latin-1").lower() not in _CLAIMS]
        return tuple(
            replace(self, headers=Headers(raw=[*others, (name.encode(), value.encode("latin-1"))]))
            for name in _CLAIMS
            for value in self.headers.getlist(name)
            if value.strip()
        )


class Authenticator(Protocol):
    """One way to recognise a caller."""

    async def __call__(self, credentials: Credentials) -> Principal | None:
        """The caller; None for a credential of another kind; `Unauthenticated` or `Forbidden` when it is wrong."""
        ...


class Gate:
    """Authenticates requests."""

    def __init__(self, authenticators: Sequence[Authenticator]) -> None:
        self._authenticators = tuple(authenticators)

    async def admit(self, request: HTTPConnection) -> Principal:
        """The caller. Every credential must be valid; of several principals the first one counts."""
        peer = request.client.host if request.client else None
        credentials = Credentials(request.headers, peer, request.scope.get("http_version", "1.1"))
        recognised = [await self._recognise(claim) for claim in credentials.claims()]
        return recognised[0]

    async def _recognise(self, credentials: Credentials) -> Principal:
        for recognise in self._authenticators:
            principal = await recognise(credentials)
            if principal is not None:
                return principal
        raise Unauthenticated


#: The role whose holders are operators.
OPERATOR = "operator"


class Operators:
    """Who may look at the work of all callers: holders of the role `operator`, and those who are named."""

    def __init__(self, named: str = "") -> None:
        """`named`: names of API keys, or callers as authors name them (`jwt:ada`), separated by commas."""
        names = [each.strip() for each in named.split(",") if each.strip()]
        self._addresses = frozenset(each if ":" in each else f"api-key:{each}" for each in names)

    def include(self, principal: Principal) -> bool:
        roles = principal.attributes.get("role", ())
        held = (roles,) if isinstance(roles, str) else roles
        return OPERATOR in held or principal.address in self._addresses

    def trust(self, principal: Principal) -> bool:
        """Whether it is one of them, or the developer on this machine, who needs no key."""
        return principal == LOCAL or self.include(principal)

    def check(self, principal: Principal) -> None:
        """`Forbidden` for all others, also on a development machine."""
        if not self.include(principal):
            raise Forbidden("This is for operators.")


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


#: Headers of proxies, and prefixes of such headers. A proxied request may come from another machine.
_FORWARDED = frozenset(
    {
        "cdn-loop",
        "client-ip",
        "fastly-client-ip",
        "forwarded",
        "proxy-connection",
        "remote-user",
        "surrogate-capability",
        "true-client-ip",
        "via",
        "x-client-ip",
        "x-cloud-trace-context",
        "x-cluster-client-ip",
        "x-host",
        "x-proxyuser-ip",
        "x-real-ip",
        "x-remote-addr",
        "x-remote-ip",
        "x-request-start",
        "x-scheme",
        "x-varnish",
    }
)
_FORWARDED_AS = (
    "ali-cdn-",
    "cf-",
    "cloudfront-",
    "eagleid",
    "fly-",
    "ngrok-",
    "tailscale-",
    "x-amz-cf-",
    "x-amzn-",
    "x-appengine-",
    "x-arr-",
    "x-azure-",
    "x-envoy-",
    "x-fd-",
    "x-forwarded",
    "x-original-",
    "x-vercel-",
)


class Loopback:
    """Accepts callers on this machine without credentials.

    The address of the peer is not enough: a page of any website can make the browser on this machine send requests. So
    the `Host` must be a loopback name (a rebound DNS name is not), and so must the page's origin.
    """

    async def __call__(self, credentials: Credentials) -> Principal | None:
        headers = credentials.headers
        if credentials.presented or _came_through_a_proxy(credentials):
            return None
        if credentials.peer is None or not is_loopback(credentials.peer):
            return None
        if not _names_loopback(f"//{headers.get('host', '')}"):
            return None
        if "origin" in headers and not _names_loopback(headers.get("origin", "")):
            return None
        if headers.get("sec-fetch-site", "") == "cross-site":
            return None
        return LOCAL


def _came_through_a_proxy(credentials: Credentials) -> bool:
    # Some proxies add no header by default. Those among them that use HTTP/1.0 are recognised by it.
    if credentials.http_version == "1.0":
        return True
    return any(name in _FORWARDED or name.startswith(_FORWARDED_AS) for name in credentials.headers)


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    host = host.strip().rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _names_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)


def build_authenticators(settings: Settings) -> list[Authenticator]:
    """API keys first, then tokens. Loopback access only without both, unless `trust_loopback` is set.

    Raises `Misconfigured` rather than leave a public address open.
    """
    authenticators: list[Authenticator] = []
    keys = parse_keys(settings.api_keys)
    if keys:
        authenticators.append(ApiKeys(keys))
    token = _jwt(settings)
    if token is not None:
        authenticators.append(token)
    if settings.trust_loopback and not is_loopback(settings.host):
        raise Misconfigured(
            f"PERDURE_TRUST_LOOPBACK needs a PERDURE_HOST that only this machine can reach, not {settings.host}."
        )
    if is_development(settings):
        authenticators.append(Loopback())
    if not authenticators:
        raise Misconfigured(
            f"PERDURE_HOST is {settings.host}, which others can reach, and there is no way to sign in: set "
            "PERDURE_API_KEYS, or PERDURE_JWT_ISSUER, PERDURE_JWT_AUDIENCE and PERDURE_JWT_JWKS_URL, "
            "or bind to 127.0.0.1."
        )
    return authenticators


def is_development(settings: Settings) -> bool:
    """Whether callers on this machine need no key."""
    configured = bool(parse_keys(settings.api_keys) or settings.jwt_issuer)
    return is_loopback(settings.host) and (settings.trust_loopback or not configured)


def _jwt(settings: Settings) -> "Jwt | None":
    issuer, audience, url = settings.jwt_issuer, settings.jwt_audience, settings.jwt_jwks_url
    if not (issuer or audience or url):
        return None
    if not (issuer and audience and url):
        # Without an audience, a token for any other service would be accepted here.
        raise Misconfigured(
            "PERDURE_JWT_ISSUER, PERDURE_JWT_AUDIENCE and PERDURE_JWT_JWKS_URL belong together: set all."
        )
    # Imported late: it imports all of `cryptography`, which an API without tokens does not need.
    from .jwt import JwksKeys, Jwt

    roles = [claim.strip() for claim in settings.jwt_role_claims.split(",") if claim.strip()]
    return Jwt(JwksKeys(url), issuer=issuer, audience=audience, role_claims=roles)
