"""What `perdure dev` leaves in its data directory for other programs of this machine: where its parts listen."""

import hashlib
import os
from pathlib import Path

from perdure.settings import Settings

ADDRESS = "temporal.ready"
API = "url.ready"
LOCK = "dev.lock"


def beside_dev(settings: Settings) -> Settings:
    """The settings for what needs Temporal: that of the `perdure dev` which runs on this store, unless one is named.

    A store belongs to one Temporal: another one would start its sessions twice.
    """
    if "temporal_address" in settings.model_fields_set:
        return settings
    known = read_temporal_address(settings)
    if known is None:
        return settings
    # Also if the environment names a cloud: this server has one namespace, and needs no key.
    plain = {"temporal_namespace": "default", "temporal_tls": False, "temporal_api_key": None}
    return settings.model_copy(update={"temporal_address": known, **plain})


def read_temporal_address(settings: Settings) -> str | None:
    """Where the Temporal of the `perdure dev` listens that runs on this folder with this store, if one does."""
    if not is_owned(settings.data_dir):
        return None
    address, _, store = (read_flag(settings.data_dir / ADDRESS) or "").partition("\n")
    return address if address and store == _store_of(settings) else None


def write_temporal_address(settings: Settings, address: str) -> None:
    """Write down where the Temporal of this folder and this store listens."""
    (settings.data_dir / ADDRESS).write_text(f"{address}\n{_store_of(settings)}")


def read_api_url(data_dir: Path) -> str | None:
    """Where the API of the `perdure dev` listens that runs on this folder, if one does."""
    try:
        return read_flag(data_dir / API) if is_owned(data_dir) else None
    except OSError:
        # The folder of somebody else, or no folder.
        return None


def write_api_url(data_dir: Path, url: str) -> None:
    """Write down where the API of this folder listens."""
    (data_dir / API).write_text(url)


def _store_of(settings: Settings) -> str:
    """Which store it is, without the password that its address may hold."""
    url = settings.database_url.get_secret_value() if settings.database_url else ""
    return hashlib.sha256(url.encode()).hexdigest()


def is_owned(data_dir: Path) -> bool:
    """Whether another process owns the data directory."""
    try:
        descriptor = os.open(data_dir / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    # Not every system has it; where it is missing there is no `perdure dev` either, and so no lock.
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_flag(path: Path) -> str | None:
    """What a file of the data directory says, or None where there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
