"""Development: whoever sits at this machine."""

import ipaddress
from urllib.parse import urlsplit

from perdure.protocol.principals import LOCAL, Principal

from . import Credentials

#: A request that came through a proxy came from elsewhere, whatever its peer address says.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class Loopback:
    """Accepts callers on this machine that claim to be nobody else.

    The address of the peer is not enough: a page of any website can make the browser on this machine call us. So the
    name it called us by must be a loopback name (a rebound DNS name is not), and so must the page's origin.
    """

    async def __call__(self, credentials: Credentials) -> Principal | None:
        headers = credentials.headers
        if credentials.presented or any(name in headers for name in _FORWARDED):
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
