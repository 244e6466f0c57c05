"""Connecting to Temporal and to the store, as the settings say."""

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from temporalio.api.errordetails.v1 import NamespaceNotFoundFailure
from temporalio.api.failure.v1 import Failure
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client, GrpcCompression, Plugin
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.converter import DefaultFailureConverter, PayloadConverter
from temporalio.exceptions import ApplicationError, TemporalError
from temporalio.service import RPCError, RPCStatusCode

from perdure.errors import Invalid, PerdureError
from perdure.settings import Settings

#: What a client raises while Temporal does not answer. One that cannot connect says so with a plain RuntimeError.
ABSENT = (RPCError, RuntimeError, OSError)

#: What Temporal answers to a key that may work with a namespace or a queue, and may not look at it.
NOT_FOR_US = (RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNIMPLEMENTED)

_NAMESPACE_NOT_FOUND = re.compile(r"Namespace .+ is not found")

T = TypeVar("T")

#: How long a caller waits for Temporal before it is taken for unreachable.
RPC_PATIENCE = timedelta(seconds=5)


class BareFailures(DefaultFailureConverter):
    """Failures as they leave for Temporal: what kind of error it is, and no text that may be content.

    An error's text can be anything that somebody said, and so can that of its causes. The log has it.
    """

    def to_failure(self, exception: BaseException, payload_converter: PayloadConverter, failure: Failure) -> None:
        bare = exception if isinstance(exception, TemporalError) else _bare(exception)
        super().to_failure(bare, payload_converter, failure)
        failure.stack_trace = ""


def _bare(exception: BaseException) -> ApplicationError:
    kind = type(exception).__name__
    message = exception.bare()[0] if isinstance(exception, PerdureError) else kind
    error = ApplicationError(message, type=kind)
    error.__cause__, error.__suppress_context__ = exception.__cause__, True
    return error


DATA_CONVERTER = replace(pydantic_data_converter, failure_converter_class=BareFailures)


async def in_time(call: Awaitable[T], patience: timedelta = RPC_PATIENCE) -> T:
    """What Temporal answers, or `TimeoutError`.

    A call's own `rpc_timeout` does not do that: it starts when the client is connected, and a lazy client connects at
    its first call. A server that accepts connections and says nothing would hold that call for minutes.
    """
    try:
        async with asyncio.timeout(patience.total_seconds()):
            return await call
    except TimeoutError:
        raise TimeoutError(f"Temporal did not answer within {patience.total_seconds():g} s") from None


async def connect(settings: Settings, *, plugins: Sequence[Plugin] = (), lazy: bool = False) -> Client:
    """A Temporal client. With `lazy` it connects at its first call, so that an API can boot before its server."""
    connecting = Client.connect(
        settings.temporal_address,
        namespace=settings.temporal_namespace,
        api_key=settings.temporal_api_key.get_secret_value() if settings.temporal_api_key else None,
        tls=settings.temporal_tls or settings.temporal_api_key is not None,
        data_converter=DATA_CONVERTER,
        # Payloads are small by design; packing them costs more than it saves.
        grpc_compression=GrpcCompression.NONE,
        plugins=plugins,
        lazy=lazy,
    )
    return await in_time(connecting)


async def namespace_exists(client: Client) -> bool:
    """Whether Temporal knows the client's namespace; one of `ABSENT` when it does not say."""
    request = DescribeNamespaceRequest(namespace=client.namespace)
    try:
        await client.workflow_service.describe_namespace(request, timeout=timedelta(seconds=2))
    except RPCError as error:
        if namespace_missing(error):
            return False
        if error.status not in NOT_FOR_US:
            raise
    return True


def namespace_missing(error: RPCError) -> bool:
    """Whether a call failed because its namespace does not exist. For any other thing the status is NOT_FOUND too."""
    if error.status != RPCStatusCode.NOT_FOUND:
        return False
    if details := error.grpc_status.details:
        return any(detail.Is(NamespaceNotFoundFailure.DESCRIPTOR) for detail in details)
    # A proxy may drop the details.
    return _NAMESPACE_NOT_FOUND.match(error.message) is not None


def secret(settings: Settings) -> bytes:
    """What default continuation tokens are derived from; with the embedded store it lies beside the data."""
    if settings.secret is not None:
        return settings.secret.get_secret_value().encode()
    if not settings.database.startswith("sqlite:"):
        raise Invalid("PERDURE_SECRET must be set when the store is shared: every API process needs the same one.")
    return _kept(settings.data_dir / "secret")


def _kept(path: Path) -> bytes:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(secrets.token_hex(32))
        # A link is made whole or not at all, so that two processes that start together agree on one secret.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path.read_bytes()
