"""From the settings: connections to Temporal, its search attributes, the secret of tokens, and what telemetry emits."""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import ClassVar, TypeVar

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.errordetails.v1 import NamespaceNotFoundFailure
from temporalio.api.failure.v1 import Failure
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client, GrpcCompression, Plugin
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import DataConverter, DefaultFailureConverter, PayloadConverter
from temporalio.exceptions import ApplicationError, TemporalError
from temporalio.service import RPCError, RPCStatusCode

from perdure.errors import Invalid, PerdureError
from perdure.protocol.names import SEARCH_ATTRIBUTES
from perdure.settings import Settings
from perdure.telemetry.names import SETS
from perdure.telemetry.spans import Choices

#: Errors of a client while Temporal does not answer. A failed connection raises a plain RuntimeError.
ABSENT = (RPCError, RuntimeError, OSError)

#: Temporal's errors for an API key that may use a namespace or a task queue, but not describe it.
NOT_FOR_US = (RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNIMPLEMENTED)

_NAMESPACE_NOT_FOUND = re.compile(r"Namespace .+ is not found")

T = TypeVar("T")

#: How long a caller waits for Temporal before it counts as unreachable.
RPC_PATIENCE = timedelta(seconds=5)


class BareFailures(DefaultFailureConverter):
    """Sends failures to Temporal with the type of the error only: its text, or that of a cause, may contain content.

    The log has the text.
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


class SharedPayloads(PydanticPayloadConverter):
    """Pydantic's converter, once: the SDK makes one for each workflow, each of its tasks and each context.

    That took a twentieth of a worker's time. It has no state but its type adapters, which all may share.
    """

    _shared: ClassVar["SharedPayloads | None"] = None

    def __new__(cls) -> "SharedPayloads":
        if cls._shared is None:
            made = super().__new__(cls)
            PydanticPayloadConverter.__init__(made)
            cls._shared = made
        return cls._shared

    def __init__(self) -> None:
        """Its state was made with it."""


DATA_CONVERTER = DataConverter(payload_converter_class=SharedPayloads, failure_converter_class=BareFailures)


async def in_time(call: Awaitable[T], patience: timedelta = RPC_PATIENCE) -> T:
    """Await a call to Temporal; `TimeoutError` when it does not answer in time.

    A call's own `rpc_timeout` is not enough: it starts after the connection, and a lazy client connects with its first
    call. A server that accepts connections without answering would block that call for minutes.
    """
    try:
        async with asyncio.timeout(patience.total_seconds()):
            return await call
    except TimeoutError:
        raise TimeoutError(f"Temporal did not answer within {patience.total_seconds():g} s") from None


def identity(settings: Settings) -> str:
    """Who this process is, for Temporal and in the reports of attempts: host:pid:build."""
    return f"{socket.gethostname()}:{os.getpid()}:{settings.build_id or 'unversioned'}"


async def temporal_client(settings: Settings, *, plugins: Sequence[Plugin] = (), lazy: bool = False) -> Client:
    """A Temporal client. With `lazy` it connects with its first call, so that an API can start before Temporal."""
    connecting = Client.connect(
        settings.temporal_address,
        namespace=settings.temporal_namespace,
        api_key=settings.temporal_api_key.get_secret_value() if settings.temporal_api_key else None,
        tls=settings.temporal_tls or settings.temporal_api_key is not None,
        identity=identity(settings),
        data_converter=DATA_CONVERTER,
        # Payloads are small; compression costs more than it saves.
        grpc_compression=GrpcCompression.NONE,
        plugins=plugins,
        lazy=lazy,
    )
    return await in_time(connecting)


def serve_metrics(address: str) -> None:
    """Serve what Temporal's SDK measures, for Prometheus. Before the first client: all clients share a runtime."""
    from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig

    config = PrometheusConfig(bind_address=address, durations_as_seconds=True, unit_suffix=True)
    try:
        Runtime.set_default(Runtime(telemetry=TelemetryConfig(metrics=config)))
    except (RuntimeError, ValueError) as error:
        # Metrics do not keep a process from its work.
        log.error("Temporal's metrics are not served at %s: %s", address, error)


async def namespace_exists(client: Client) -> bool:
    """Whether the client's namespace exists; raises one of `ABSENT` when Temporal does not answer."""
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
    """Whether a call failed because its namespace does not exist. The status NOT_FOUND has other causes too."""
    if error.status != RPCStatusCode.NOT_FOUND:
        return False
    if details := error.grpc_status.details:
        return any(detail.Is(NamespaceNotFoundFailure.DESCRIPTOR) for detail in details)
    # A proxy may have dropped the details.
    return _NAMESPACE_NOT_FOUND.match(error.message) is not None


#: For how many seconds drivers are started without them when Temporal does not know them.
_UNKNOWN = 300.0

log = logging.getLogger("perdure.temporal")


async def register_search_attributes(client: Client) -> None:
    """Have Temporal know them; raises one of `ABSENT` when it cannot be asked, or does not allow it."""
    listing = client.operator_service.list_search_attributes(ListSearchAttributesRequest(namespace=client.namespace))
    known = (await in_time(listing)).custom_attributes
    keyword = IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD
    missing = {name: keyword for name in SEARCH_ATTRIBUTES if name not in known}
    if missing:
        adding = AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
        await in_time(client.operator_service.add_search_attributes(adding))


class SearchAttributes:
    """The search attributes of new drivers. A cluster that does not know one of them refuses a start that has it."""

    def __init__(self) -> None:
        self._unknown_until: dict[str, float] = {}

    def known(self, wanted: Mapping[str, str]) -> Mapping[str, str]:
        """Those of them that Temporal may know."""
        now = monotonic()
        return {name: value for name, value in wanted.items() if self._unknown_until.get(name, now) <= now}

    def unknown(self, refused: Mapping[str, str], error: RPCError) -> bool:
        """Whether the start was refused because of them; those that follow do without the unknown for some minutes."""
        if error.status != RPCStatusCode.INVALID_ARGUMENT or "search attribute" not in error.message.lower():
            return False
        if all(until <= monotonic() for until in self._unknown_until.values()):
            log.warning(
                "Temporal does not know our search attributes (`perdure migrate` registers them): %s", error.message
            )
        # It names the first one that it does not know. A cluster may know those of an older version.
        unknown = [each for each in refused if each in error.message] or list(refused)
        self._unknown_until |= dict.fromkeys(unknown, monotonic() + _UNKNOWN)
        return True


def search_attributes(agent: str, root: str, parent: str | None) -> Mapping[str, str]:
    """Those of a driver, by their names."""
    values = zip(SEARCH_ATTRIBUTES, (agent, root, parent), strict=True)
    return {name: value for name, value in values if value is not None}


def typed(attributes: Mapping[str, str]) -> TypedSearchAttributes | None:
    """The same as Temporal's client takes them."""
    pairs = [SearchAttributePair(SearchAttributeKey.for_keyword(name), value) for name, value in attributes.items()]
    return TypedSearchAttributes(pairs) if pairs else None


def telemetry_choices(settings: Settings) -> Choices:
    """What of a process is observed, and under which names."""
    hashed = settings.telemetry_users == "hash"
    return Choices(
        sets=SETS[settings.telemetry_names],
        content=settings.content_destinations,
        content_bytes=settings.telemetry_content_bytes,
        users=settings.telemetry_users,
        user_key=secret(settings) if hashed else b"",
    )


def secret(settings: Settings) -> bytes:
    """The secret for default continuation tokens. With SQLite it is a file beside the data."""
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
        # A hard link is atomic, so two processes that start together use the same secret.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path.read_bytes()
