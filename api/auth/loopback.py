"""Development access: callers on this machine."""

import ipaddress
from urllib.parse import urlsplit

from perdure.protocol.principals import LOCAL, Principal

from . import Credentials

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
