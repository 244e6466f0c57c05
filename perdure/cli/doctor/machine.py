"""The probes of this machine: versions, the environment, the data directory and the port."""

import asyncio
import contextlib
import os
import platform
import shutil
import socket
import stat
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from perdure.runtime.local import is_owned
from perdure.settings import Settings, unknown

from .findings import Finding, fail, ok, warn

_PACKAGES = ("perdure", "temporalio", "pydantic-ai-slim")
#: Below so many bytes a store soon cannot write any more.
_LITTLE = 500 * 1024 * 1024
#: Secrets of which is said whether they are there, and nothing else.
_KEYS = ("PERDURE_SECRET", "PERDURE_API_KEYS", "PERDURE_TEMPORAL_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_API_KEY")
_PROVIDERS = {"anthropic": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY", "openai-chat": "OPENAI_API_KEY"}
_ANSWER = 2.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def versions() -> Sequence[Finding]:
    found = [f"python {platform.python_version()}"]
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return [ok("versions", ", ".join(found))]


def variables(settings: Settings) -> Sequence[Finding]:
    """Variables that change nothing, and settings that do not fit together."""
    findings: list[Finding] = []
    for name, meant in unknown(os.environ):
        todo = f"Did you mean {meant}?" if meant else "Remove it, or see the list of settings."
        findings.append(warn("settings", f"{name} is not a setting, and changes nothing.", todo))
    if (settings.deployment is None) != (settings.build_id is None):
        findings.append(
            fail("settings", "PERDURE_DEPLOYMENT and PERDURE_BUILD_ID belong together.", "Set both, or neither.")
        )
    return findings or [ok("settings", "No unknown PERDURE_* variable.")]


def keys(settings: Settings) -> Sequence[Finding]:
    """Which secrets are set. Their values are not read further."""
    present = [name for name in _KEYS if os.environ.get(name)]
    findings = [ok("keys", f"Set: {', '.join(present) or 'none'}.")]
    needed = _PROVIDERS.get((settings.model or "").partition(":")[0])
    if needed and needed not in present:
        findings.append(fail("keys", f"PERDURE_MODEL is {settings.model}, and {needed} is not set.", f"Set {needed}."))
    if settings.database_url is not None and not settings.database.startswith("sqlite") and settings.secret is None:
        findings.append(
            fail(
                "keys",
                "PERDURE_SECRET is not set, and APIs on PostgreSQL need it.",
                "`openssl rand -hex 32` makes one.",
            )
        )
    if settings.host not in _LOOPBACK and not settings.api_keys and not settings.jwt_issuer:
        findings.append(
            fail("keys", f"The API listens on {settings.host}, and knows no caller.", "`perdure api-key NAME`, or JWT.")
        )
    return findings


def folder(settings: Settings) -> Sequence[Finding]:
    """The data directory, which nothing here creates."""
    path = settings.data_dir.absolute()
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return [fail("folder", f"{nearest} is not a folder.", "Name another one with PERDURE_DATA_DIR.")]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [fail("folder", f"{nearest} cannot be written by this user.", "Change its rights, or PERDURE_DATA_DIR.")]
    findings: list[Finding] = []
    if nearest != path:
        findings.append(ok("folder", f"{path} is not there yet; the first start makes it."))
    elif stat.S_IMODE(path.stat().st_mode) & stat.S_IRWXO:
        findings.append(warn("folder", f"Other users may look into {path}.", f"chmod 700 {path}"))
    else:
        findings.append(
            ok("folder", f"{path} is ours to write{', and `perdure dev` runs on it' * _is_owned(settings)}.")
        )
    free = shutil.disk_usage(nearest).free
    if free < _LITTLE:
        findings.append(warn("folder", f"Its disk has {free // 1024**2} MiB left.", "Make room before it is full."))
    return findings


def _is_owned(settings: Settings) -> bool:
    try:
        return is_owned(settings.data_dir)
    except OSError:
        return False


async def ports(settings: Settings) -> Sequence[Finding]:
    """Whether the API can listen, or listens already."""
    host, port = settings.host, settings.port
    if _is_free(host, port):
        return [ok("ports", f"Port {port} on {host} is free.")]
    near = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    try:
        async with asyncio.timeout(_ANSWER):
            is_ours = await _is_api(near, port)
    except (OSError, TimeoutError):
        is_ours = False
    if is_ours:
        return [ok("ports", f"An API of Perdure answers on {near}:{port}.")]
    return [
        warn(
            "ports",
            f"Port {port} on {host} is taken, and what has it does not answer as an API of Perdure.",
            "Choose another one: PERDURE_PORT, or `perdure dev --port`.",
        )
    ]


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


async def _is_api(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"GET /eve/v1/health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = await reader.read(4_096)
        return answer.startswith(b"HTTP/1.1 200")
    finally:
        writer.close()
