"""Terminal callbacks: the one that a create request may name, checked strictly, and those of other servers."""

import ipaddress
import socket
from typing import Any, cast
from urllib.parse import unquote_to_bytes, urlsplit

from perdure.bounds import DEEPEST, deeper_than, quoted
from perdure.errors import Invalid
from perdure.protocol.wire import JsonObject
from perdure.settings import Settings

from .auth import is_development

_FIELDS = ("callId", "subagentName", "token", "url")
_ROUTE = "/eve/v1/callback/"
_FORBIDDEN = "callback.url: Callback url host must not be a private or reserved address."
_MOST_KEYS = 10
#: Of each field, in characters.
_LONGEST = 4_096
#: The types of JSON values in the contract's words; every other value is an object.
_KINDS = {"NoneType": "null", "bool": "boolean", "int": "number", "float": "number", "str": "string", "list": "array"}
_RESERVED = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "::/128",
        "fc00::/7",
        "fe80::/10",
    )
)


def check_callback(value: Any) -> JsonObject:
    """The callback; `Invalid` with all faults, unless it is a valid one."""
    if not isinstance(value, dict):
        raise _refused([f"callback: Invalid input: expected object, received {_kind(value)}"])
    callback = cast("dict[str, Any]", value)
    issues = [issue for name in _FIELDS for issue in _field_issues(callback, name)]
    unknown = [name for name in callback if name not in _FIELDS]
    if unknown:
        issues.append(f"callback: Unrecognized key{'s' if len(unknown) > 1 else ''}: {_listed(unknown)}")
    issues = issues or _url_issues(callback["url"], callback["token"])
    if issues:
        raise _refused(issues)
    if any(len(callback[name]) > _LONGEST for name in _FIELDS):
        raise _refused([f"callback: Too big: expected strings to have <={_LONGEST} characters"])
    return callback


async def with_reach(callback: JsonObject, settings: Settings) -> JsonObject:
    """The callback with the addresses that it may reach; `Invalid` if its own is not one of them, as far as known."""
    # Imported here because it imports pydantic-ai, which a process without callbacks does not need.
    from perdure.harness.remote.outbound import is_allowed

    reach = "private" if settings.local_callbacks else "loopback" if is_development(settings) else "public"
    if not await is_allowed(callback["url"], reach):
        raise _refused([_FORBIDDEN])
    return {**callback, "reach": reach}


def parse_report(fields: JsonObject) -> JsonObject:
    """The body of a callback that another server delivers."""
    for name in ("callId", "subagentName"):
        if not isinstance(fields.get(name), str) or not fields[name]:
            raise Invalid(f"Missing callback {name}.")
    if fields.get("kind") not in ("session.completed", "session.failed"):
        raise Invalid("Unsupported callback kind.")
    if deeper_than(fields.get("output"), DEEPEST):
        raise Invalid("Unsupported callback output.")
    return fields


def _listed(names: list[str]) -> str:
    listed = [f'"{quoted(name)}"' for name in names[:_MOST_KEYS]]
    more = len(names) - len(listed)
    return ", ".join([*listed, f"and {more} more"] if more else listed)


def _refused(issues: list[str]) -> Invalid:
    return Invalid(f"Invalid callback metadata: {'; '.join(issues)}")


def _field_issues(callback: dict[str, Any], name: str) -> list[str]:
    value = callback.get(name)
    if not isinstance(value, str):
        received = _kind(value) if name in callback else "undefined"
        return [f"callback.{name}: Invalid input: expected string, received {received}"]
    if not value:
        return [f"callback.{name}: Too small: expected string to have >=1 characters"]
    return []


def _url_issues(url: str, token: str) -> list[str]:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host, parts = None, None
    if parts is None or not parts.scheme or not host:
        return ["callback.url: Callback url must be absolute."]
    if parts.scheme.lower() not in ("http", "https"):
        return ["callback.url: Callback url must be an http(s) url."]
    issues: list[str] = []
    if _url_token(parts.path) != token:
        issues.append("callback.url: Callback url token must match callback token.")
    if _is_reserved(host):
        issues.append(_FORBIDDEN)
    return issues


def _url_token(path: str) -> str | None:
    segment = path.removeprefix(_ROUTE)
    if segment == path or not segment or "/" in segment:
        return None
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        return None


def _is_reserved(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        address = _legacy_address(host)
    if address is None:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any((mapped or address) in network for network in _RESERVED)


def _legacy_address(host: str) -> ipaddress.IPv4Address | None:
    """`0x0a000001` and `10.1` are addresses too, according to the URL standard."""
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None


def _kind(value: object) -> str:
    return _KINDS.get(type(value).__name__, "object")
