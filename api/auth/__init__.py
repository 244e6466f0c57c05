"""Authentication: an ordered list of authenticators; the first that recognises the caller decides."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from perdure.errors import Unauthenticated
from perdure.protocol.principals import Principal

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
