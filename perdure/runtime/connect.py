"""Connecting to Temporal and to the store, as the settings say."""

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from temporalio.client import Client, GrpcCompression, Plugin
from temporalio.contrib.pydantic import pydantic_data_converter

from perdure.errors import Invalid
from perdure.settings import Settings


async def connect(settings: Settings, *, plugins: Sequence[Plugin] = (), lazy: bool = False) -> Client:
    """A Temporal client. With `lazy` it connects at its first call, so that an API can boot before its server."""
    return await Client.connect(
        settings.temporal_address,
        namespace=settings.temporal_namespace,
        api_key=settings.temporal_api_key.get_secret_value() if settings.temporal_api_key else None,
        tls=settings.temporal_tls or settings.temporal_api_key is not None,
        data_converter=pydantic_data_converter,
        # Payloads are small by design; packing them costs more than it saves.
        grpc_compression=GrpcCompression.NONE,
        plugins=plugins,
        lazy=lazy,
    )


def secret(settings: Settings) -> bytes:
    """What default continuation tokens are derived from; with the embedded store it lies beside the data."""
    if settings.secret is not None:
        return settings.secret.get_secret_value().encode()
    if not settings.database.startswith("sqlite:"):
        raise Invalid("PERDURE_SECRET must be set when the store is shared: every API process needs the same one.")
    return _kept(settings.data_dir / "secret")


def _kept(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(secrets.token_hex(32))
        # A link is made whole or not at all, so that two processes that start together agree on one secret.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path.read_bytes()
