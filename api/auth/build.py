"""The authenticators of the settings."""

from typing import TYPE_CHECKING

from perdure.errors import Misconfigured
from perdure.settings import Settings

from . import Authenticator
from .api_keys import ApiKeys, parse_keys
from .loopback import Loopback, is_loopback

if TYPE_CHECKING:
    from .jwt import Jwt


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
            f"PERDURE_HOST is {settings.host}, which others can reach, and no sign-in is set up: set PERDURE_API_KEYS, "
            "or PERDURE_JWT_ISSUER, PERDURE_JWT_AUDIENCE and PERDURE_JWT_JWKS_URL, or bind to 127.0.0.1."
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
