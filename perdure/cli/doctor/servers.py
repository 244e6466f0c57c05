"""The probes of Temporal and of the store. They only ask."""

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from perdure.bounds import public
from perdure.errors import Misconfigured, PerdureError, SchemaOutdated, SchemaUnknown
from perdure.protocol import names
from perdure.runtime.local import beside_dev
from perdure.settings import Settings
from perdure.store.open import NoStore, open_store

from .findings import Finding, fail, ok, warn

if TYPE_CHECKING:
    from temporalio.client import Client

_RPC = timedelta(seconds=3)
#: Days below which finished turns disappear from Temporal's UI surprisingly soon.
_DAYS = 7
#: Temporal lists pollers for five minutes; one that has asked within this time is there.
_POLL_SECONDS = 75.0
#: Seconds by which clocks may differ.
_SKEW = 5.0
_NAMED = 4
_WORKFLOW_KINDS = (names.SESSIONS_QUEUE, names.TURNS_QUEUE, names.RUNS_QUEUE)
_ACTIVITY_KINDS = (names.MODELS_QUEUE, names.TOOLS_QUEUE, names.BODIES_QUEUE)


async def temporal(settings: Settings) -> Sequence[Finding]:
    """Whether Temporal answers, how it is set up, and who works for whom."""
    from temporalio.service import RPCError

    from perdure.runtime.connect import ABSENT, namespace_missing, temporal_client

    known = beside_dev(settings)
    address = known.temporal_address
    try:
        client = await temporal_client(known)
        described = await _described_namespace(client)
    except ABSENT as error:
        if isinstance(error, RPCError) and namespace_missing(error):
            missing = f"Temporal at {address} has no namespace {known.temporal_namespace!r}."
            return [fail("temporal", missing, "Create it, or set PERDURE_TEMPORAL_NAMESPACE.")]
        if known is settings and "temporal_address" not in settings.model_fields_set:
            none = f"No Temporal listens at {address}, and PERDURE_TEMPORAL_ADDRESS is not set."
            return [warn("temporal", none, "`perdure dev` starts one; for another one, set the address.")]
        return [
            fail(
                "temporal",
                f"Temporal at {address} does not answer: {public(str(error))}",
                "Start it, or mend the address.",
            )
        ]
    parts = await asyncio.gather(
        _attributes(client), _versioning(client, known), _pollers(client, known), return_exceptions=True
    )
    found = [ok("temporal", f"Temporal {described[0]} answers at {address}, namespace {client.namespace}.")]
    if described[1] is not None:
        kept = f"Finished turns are kept for {described[1]:g} days."
        todo = f"temporal operator namespace update -n {client.namespace} --retention 90d"
        found.append(ok("retention", kept) if described[1] >= _DAYS else warn("retention", kept, todo))
    for probe, part in zip(("search", "versions", "workers"), parts, strict=True):
        if isinstance(part, BaseException):
            found.append(_not_told(probe, part))
        else:
            found += part
    return found


async def _described_namespace(client: "Client") -> tuple[str, float | None]:
    """The version of the server, and for how many days it keeps finished turns; None if we may not know."""
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, GetSystemInfoRequest
    from temporalio.service import RPCError

    from perdure.runtime.connect import NOT_FOR_US

    service = client.workflow_service
    version = (await service.get_system_info(GetSystemInfoRequest(), timeout=_RPC)).server_version
    try:
        request = DescribeNamespaceRequest(namespace=client.namespace)
        answer = await service.describe_namespace(request, timeout=_RPC)
    except RPCError as error:
        if error.status not in NOT_FOR_US:
            raise
        return version, None
    return version, answer.config.workflow_execution_retention_ttl.ToTimedelta() / timedelta(days=1)


def _not_told(probe: str, error: BaseException) -> Finding:
    return warn(probe, f"Temporal does not say it ({public(str(error))}).", "See what this key or this server allows.")


async def _attributes(client: "Client") -> Sequence[Finding]:
    from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest

    request = ListSearchAttributesRequest(namespace=client.namespace)
    known = (await client.operator_service.list_search_attributes(request, timeout=_RPC)).custom_attributes
    missing = [name for name in names.SEARCH_ATTRIBUTES if name not in known]
    if missing:
        return [warn("search", f"Temporal does not know {', '.join(missing)}.", "`perdure migrate` registers them.")]
    return [ok("search", f"Temporal knows {', '.join(names.SEARCH_ATTRIBUTES)}.")]


async def _versioning(client: "Client", settings: Settings) -> Sequence[Finding]:
    from perdure.runtime.deploys import builds

    queue = names.queue(settings.task_queue, names.SESSIONS_QUEUE)
    current = await builds.current_version(client, queue)
    shown = "no build" if current is None else f"build {current[1]} of {current[0]}"
    if settings.deployment is None and current is not None:
        lost = f"New sessions start on {shown}, and workers without a build get no work."
        return [warn("builds", lost, "Set PERDURE_DEPLOYMENT and PERDURE_BUILD_ID for workers.")]
    if settings.deployment is not None and current is None:
        return [warn("builds", "No build is the current one.", "`perdure deploy promote BUILD`")]
    return [ok("builds", f"New sessions start on {shown}.")]


async def _pollers(client: "Client", settings: Settings) -> Sequence[Finding]:
    """Who waits for work, by queue; and whether Temporal's clock is ours."""
    pools = [names.tools_queue(pool) for pool in settings.only_pools]
    kinds = [*((kind, True) for kind in _WORKFLOW_KINDS), *((kind, False) for kind in (*_ACTIVITY_KINDS, *pools))]
    listed = await asyncio.gather(*(_polling(client, settings, kind, workflows) for kind, workflows in kinds))
    now = time.time()
    by_workers: dict[tuple[str, ...], list[str]] = {}
    for (kind, _), pollers in zip(kinds, listed, strict=True):
        there = tuple(sorted(identity for identity, seen in pollers.items() if seen > now - _POLL_SECONDS))
        by_workers.setdefault(there, []).append(kind)
    found: list[Finding] = []
    for workers, queues in by_workers.items():
        served = ", ".join(names.queue(settings.task_queue, kind) for kind in queues)
        if not workers:
            found.append(warn("workers", f"Nobody works for {served}.", "Start `perdure worker`, or `perdure dev`."))
            continue
        more = f" and {len(workers) - _NAMED} more" if len(workers) > _NAMED else ""
        found.append(ok("workers", f"{', '.join(workers[:_NAMED])}{more}: {served}"))
    latest = max((seen for pollers in listed for seen in pollers.values()), default=None)
    if latest is not None:
        found.append(_clock("Temporal", latest - now if latest > now else 0.0))
    return found


async def _polling(client: "Client", settings: Settings, kind: str, workflows: bool) -> dict[str, float]:
    """Those who have asked for work of this kind, and when."""
    from temporalio.api.enums.v1 import TaskQueueType
    from temporalio.api.taskqueue.v1 import TaskQueue
    from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

    types = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    request = DescribeTaskQueueRequest(
        namespace=client.namespace,
        task_queue=TaskQueue(name=names.queue(settings.task_queue, kind)),
        task_queue_type=types[0] if workflows else types[1],
    )
    described = await client.workflow_service.describe_task_queue(request, timeout=_RPC)
    return {each.identity: each.last_access_time.ToNanoseconds() / 1e9 for each in described.pollers}


def _clock(whose: str, ahead: float) -> Finding:
    if abs(ahead) > _SKEW:
        direction = "ahead of" if ahead > 0 else "behind"
        skew = f"The clock of {whose} is {abs(ahead):.0f} s {direction} ours."
        return warn("clock", skew, "Have all machines set their clocks by NTP: leases and expiries compare them.")
    return ok("clock", f"The clock of {whose} and ours agree.")


async def store(settings: Settings) -> Sequence[Finding]:
    """Whether the store answers, and whether its schema is the one of this code. It is never changed."""
    try:
        opened = await open_store(settings.database, create=False)
    except NoStore:
        where = _place(settings)
        todo = "`perdure dev` makes it at its start; for separate processes, `perdure migrate`."
        return [warn("store", f"{where} is not there yet.", todo)]
    except Misconfigured as error:
        return [fail("store", error.message, "Mend PERDURE_DATABASE_URL.")]
    where = _place(settings)
    try:
        version = await opened.check()
    except SchemaOutdated as error:
        return [fail("store", error.message, "`perdure migrate`; `perdure dev` does it at its start.")]
    except SchemaUnknown as error:
        return [fail("store", error.message, "Use a newer version of Perdure, or another database.")]
    except PerdureError as error:
        return [fail("store", f"{where} does not answer: {error.message}", "Start it, or mend PERDURE_DATABASE_URL.")]
    finally:
        await opened.close()
    return [ok("store", f"{where} answers; its schema has version {version}."), *await _store_clock(settings)]


async def _store_clock(settings: Settings) -> Sequence[Finding]:
    if settings.database.startswith("sqlite"):
        # A file of this machine.
        return []
    import psycopg

    connection = await psycopg.AsyncConnection.connect(settings.database, autocommit=True, connect_timeout=3)
    async with connection:
        before = time.time()
        answer = await (await connection.execute("SELECT extract(epoch FROM clock_timestamp())")).fetchone()
        ours = (before + time.time()) / 2
    return [_clock("the store", float(answer[0]) - ours)] if answer else []


def _place(settings: Settings) -> str:
    """Where the store is, without what its address says about a user."""
    if settings.database.startswith("sqlite:///"):
        return f"The store {settings.database.removeprefix('sqlite:///').partition('?')[0]}"
    from perdure.store.postgres.database import address

    # As libpq reads it: a password may have `#`, and there may be several hosts.
    parts = address(settings.database)
    ports = f", port {parts['port']}" if "port" in parts else ""
    return f"The store {parts.get('dbname', '')} at {parts.get('host', 'this machine')}{ports}"
