"""Who is asking? An ordered list of authenticators; the first that recognises the caller decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from perdure.errors import Unauthenticated
from perdure.protocol.principals import Principal


@dataclass(frozen=True)
class Credentials:
    """What a request says about its sender."""

    headers: Headers
    # The address of the peer of the connection; None when there is none (a Unix socket).
    peer: str | None = None

    @property
    def bearer(self) -> str | None:
        scheme, _, token = self.headers.get("authorization", "").strip().partition(" ")
        return token.strip() if scheme.lower() == "bearer" and token.strip() else None

    @property
    def api_key(self) -> str | None:
        return self.headers.get("x-api-key", "").strip() or None

    @property
    def presented(self) -> bool:
        """Whether the caller claims to be somebody; a wrong claim is refused and never overlooked."""
        return bool(self.headers.get("authorization", "").strip()) or self.api_key is not None


class Authenticator(Protocol):
    """One way to recognise a caller."""

    async def __call__(self, credentials: Credentials) -> Principal | None:
        """The caller; None when this is not for me; `Unauthenticated` or `Forbidden` when it is, and wrong."""
        ...


class Gate:
    """Lets callers in."""

    def __init__(self, authenticators: Sequence[Authenticator]) -> None:
        self._authenticators = tuple(authenticators)

    async def admit(self, request: HTTPConnection) -> Principal:
        peer = request.client.host if request.client else None
        credentials = Credentials(request.headers, peer)
        for recognise in self._authenticators:
            principal = await recognise(credentials)
            if principal is not None:
                return principal
        raise Unauthenticated
