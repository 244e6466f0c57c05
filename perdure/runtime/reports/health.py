"""How a deployment is: its store, Temporal, who polls which task queue, and which workers there are.

Each part is asked on its own and within seconds, so that one that is away does not hide the others. An answer is
shared for a few seconds: many consoles cost no more than one. For metrics, each API also counts what runs and waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.metadata import version
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.workflowservice.v1 import GetSystemInfoRequest
from temporalio.client import Client

from perdure.errors import PerdureError
from perdure.protocol import names
from perdure.protocol.wire import JsonObject
from perdure.runtime.connect import RPC_PATIENCE
from perdure.runtime.sweeper import repeating
from perdure.store.base import Store
from perdure.store.engine.rows import stamp_of, utc_now
from perdure.telemetry import gauges

if TYPE_CHECKING:
    from temporalio.api.workflowservice.v1 import DescribeTaskQueueResponse

log = logging.getLogger("perdure.health")

T = TypeVar("T")

#: For how many seconds an answer is given again.
_FRESH = 2.0
#: How many seconds a part may take.
_PATIENCE = 4.0
#: Up to which number sessions, requests and deliveries are counted for metrics.
_MOST_COUNTED = 10_000
#: Workers and pollers that are listed.
_MOST = 200

_WORKFLOWS = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
_ACTIVITIES = TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
_QUEUES = (
    (names.SESSIONS_QUEUE, _WORKFLOWS),
    (names.TURNS_QUEUE, _WORKFLOWS),
    (names.MODELS_QUEUE, _ACTIVITIES),
    (names.TOOLS_QUEUE, _ACTIVITIES),
)


@dataclass(frozen=True)
class _Part:
    """What one part has said: how long it took, or why it did not."""

    ok: bool
    milliseconds: float
    problem: str | None = None

    @property
    def shown(self) -> JsonObject:
        said: JsonObject = {"ok": self.ok, "latencyMs": round(self.milliseconds, 1)}
        return said if self.problem is None else {**said, "problem": self.problem}


class Health:
    """Asks the parts of a deployment how they are."""

    def __init__(
        self, store: Store, client: Client, *, task_queue: str, pools: Sequence[str] = (), runs: bool = False
    ) -> None:
        """`pools`: those that the agents' tools need; `runs`: whether runs are served, which have queues too."""
        self._store = store
        self._client = client
        self._prefix = task_queue
        own = [(names.RUNS_QUEUE, _WORKFLOWS), (names.BODIES_QUEUE, _ACTIVITIES)] if runs else []
        self._queues = [*_QUEUES, *own, *((names.tools_queue(pool), _ACTIVITIES) for pool in pools)]
        self._asked: asyncio.Future[JsonObject] | None = None
        self._until = 0.0

    async def look(self) -> JsonObject:
        """What is known now, or was some moments ago. Callers that come together share one look."""
        if self._asked is None or (self._asked.done() and monotonic() > self._until):
            self._asked = asyncio.ensure_future(self._look())
        # Shielded: one caller that leaves does not take the answer from the others.
        return await asyncio.shield(self._asked)

    async def _look(self) -> JsonObject:
        try:
            return await self._found()
        finally:
            self._until = monotonic() + _FRESH

    async def _found(self) -> JsonObject:
        (store, _), (temporal, info), queues = await asyncio.gather(
            _asked("store", lambda: self._store.session(names.SESSION_ID)),
            _asked("temporal", self._server_version),
            asyncio.gather(*(self._queue(kind, type) for kind, type in self._queues)),
        )
        workers: dict[str, JsonObject] = {}
        for queue in queues:
            for poller in queue["pollers"]:
                known = workers.setdefault(poller["identity"], {**poller, "queues": []})
                known["queues"].append(queue["name"])
                known["lastSeenAt"] = max(known["lastSeenAt"], poller["lastSeenAt"])
        found: JsonObject = {
            "version": version("perdure"),
            "now": utc_now(),
            "store": store.shown,
            "temporal": {**temporal.shown, "namespace": self._client.namespace},
            "queues": queues,
            "workers": [workers[name] for name in sorted(workers)[:_MOST]],
        }
        if info is not None:
            found["temporal"]["serverVersion"] = info
        return found

    async def _server_version(self) -> str:
        service = self._client.workflow_service
        return (await service.get_system_info(GetSystemInfoRequest(), timeout=RPC_PATIENCE)).server_version

    async def _queue(self, kind: str, type: TaskQueueType.ValueType) -> JsonObject:
        from perdure.runtime.deploys.builds import described_queue, pollers_of

        name = names.queue(self._prefix, kind)
        part, described = await _asked(name, lambda: described_queue(self._client, name, type, stats=True))
        seen: Mapping[str, float] = {} if described is None else pollers_of(described)
        shown: JsonObject = {
            "name": name,
            "kind": "workflows" if type == _WORKFLOWS else "activities",
            "pollers": [
                {"identity": identity, "lastSeenAt": stamp_of(seen[identity])} for identity in sorted(seen)[:_MOST]
            ],
        }
        if described is not None:
            shown["backlog"] = _backlog(described)
        if part.problem is not None:
            shown["problem"] = part.problem
        return shown


class BacklogGauges:
    """Measures how much runs and waits in the store, for metrics. Every API measures the same."""

    def __init__(self, store: Store, *, every: float = 10.0) -> None:
        self._store = store
        self._every = every

    def running(self) -> AbstractAsyncContextManager[None]:
        """Measure repeatedly while this context is open."""
        return repeating(
            self.measure,
            (self._every * 0.5, self._every * 1.5),
            away="what runs and waits cannot be measured now",
            failed="what runs and waits could not be measured",
        )

    async def measure(self) -> bool:
        now = await self._store.attempts.backlog(_MOST_COUNTED)
        gauges.backlog(now.sessions, now.in_need, now.open_inputs, now.deliveries)
        return False


def _backlog(described: DescribeTaskQueueResponse) -> int:
    """How many tasks wait for a worker, as far as the server knows."""
    return described.stats.approximate_backlog_count


async def _asked(what: str, ask: Callable[[], Awaitable[T]]) -> tuple[_Part, T | None]:
    """What a part answers, if it does. The text of an error may name hosts and users: the log has it."""
    begun = monotonic()
    try:
        async with asyncio.timeout(_PATIENCE):
            answer = await ask()
    except TimeoutError:
        return _Part(False, (monotonic() - begun) * 1e3, "it does not answer in time"), None
    except PerdureError as error:
        log.warning("%s does not answer: %s", what, error.message)
        return _Part(False, (monotonic() - begun) * 1e3, error.code), None
    except Exception:
        log.warning("%s does not answer", what, exc_info=True)
        return _Part(False, (monotonic() - begun) * 1e3, "it cannot be reached"), None
    return _Part(True, (monotonic() - begun) * 1e3), answer
