"""Runs: starting one, its record, the list, and cancelling one."""

from typing import Any, get_args

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.bodies import BodyReader
from api.durable.offsets import write_offset
from api.envelope import shown
from api.requests import WAIT, Handler, check_json, idempotency_key, known_id, own_url, waits_for_result
from api.responses import flags
from perdure.errors import Invalid, PerdureError, RunNotFound
from perdure.protocol.wire import JsonObject
from perdure.runtime.runs import Runs
from perdure.runtime.runs.runs import read_cursor, write_cursor
from perdure.store.runs import RunQuery, RunRecord, RunStatus

#: Runs of a page: at most, and without a limit of the caller.
_MOST = 1000
_FEW = 100

#: The place before the first event of a new run.
START = write_offset(0)


class RunFailed(PerdureError):
    """The run has failed."""

    status = 500


class RunRoutes:
    def __init__(self, gate: Gate, runs: Runs, bodies: BodyReader, read: Handler, *, wait: float = WAIT) -> None:
        """`read` serves the stream of a run, which exists and belongs to the caller."""
        self._gate = gate
        self._runs = runs
        self._bodies = bodies
        self._read = read
        self._wait = wait

    async def start(self, request: Request) -> Response:
        """Start a run, and wait for its result if the caller wants that."""
        principal = await self._gate.admit(request)
        name = request.path_params["name"]
        self._runs.check_name(name)
        waits = waits_for_result(request)
        key = idempotency_key(request)
        given = await self._input(request)
        started = await self._runs.start(name, given, principal=principal, idempotency_key=key)
        url = _url_of(request, started.run_id)
        receipt: JsonObject = {"runId": started.run_id, "streamUrl": url, "offset": START}
        noted = flags(deduplicated=started.deduplicated, delayed=started.delayed)
        if waits and (record := await self._runs.wait(started.run_id, self._wait)).ended:
            return shown(_waited(record, receipt), headers=noted)
        return shown(receipt, 202, {"location": url, "stream-next-offset": START, **noted})

    async def show(self, request: Request) -> Response:
        """The record of a run (`?meta`), or its stream."""
        principal = await self._gate.admit(request)
        run_id = known_id(request.path_params["run_id"], RunNotFound)
        record = await self._runs.get(run_id, principal)
        if "meta" in request.query_params and request.method == "GET":
            return shown(record_of(record, await self._runs.needs(run_id)))
        return await self._read(request)

    async def list(self, request: Request) -> Response:
        """One page of the caller's runs, newest first."""
        principal = await self._gate.admit(request)
        page = await self._runs.list(run_query(request.query_params, principal.owner))
        listed: JsonObject = {"runs": [pointer(record) for record in page.runs]}
        if page.next is not None:
            listed["nextCursor"] = write_cursor(page.next)
        return shown(listed)

    async def cancel(self, request: Request) -> Response:
        """Stop a run."""
        principal = await self._gate.admit(request)
        run_id = known_id(request.path_params["run_id"], RunNotFound)
        accepted = await self._runs.cancel(run_id, principal=principal)
        return shown({"runId": run_id, "status": "accepted" if accepted else "no_active_run"}, 202 if accepted else 200)

    async def _input(self, request: Request) -> Any:
        raw = await self._bodies.read_json(request)
        if raw is None:
            return {}
        check_json(request)
        return raw.value


def _url_of(request: Request, run_id: str) -> str:
    return f"{own_url(request).rpartition('/workflows/')[0]}/runs/{run_id}"


def _waited(record: RunRecord, receipt: JsonObject) -> JsonObject:
    if record.status == "completed":
        return {"result": record.result, **receipt}
    # What it has raised may be content: the record has it, for its owner.
    raise RunFailed(meta={"runId": record.run_id})


def run_query(params: QueryParams, owner: str) -> RunQuery:
    status: Any = params.get("status")
    if status is not None and status not in get_args(RunStatus):
        raise Invalid(f"Expected 'status' to be one of {', '.join(get_args(RunStatus))}.")
    name = params.get("workflowName")
    if name is not None and not name.isprintable():
        raise Invalid("Expected 'workflowName' to be a name.")
    return RunQuery(
        name=name,
        status=status,
        owner=owner,
        limit=_limit(params.get("limit")),
        after=read_cursor(params.get("cursor")),
    )


def _limit(given: str | None) -> int:
    """The limit; one that is none is the usual one."""
    if given is None or not (given.isascii() and given.isdecimal() and len(given) <= 9 and int(given) > 0):
        return _FEW
    return min(int(given), _MOST)


def pointer(record: RunRecord) -> JsonObject:
    """A run of a list."""
    fields: JsonObject = {
        "runId": record.run_id,
        "workflowName": record.name,
        "status": record.status,
        "startedAt": record.started_at,
    }
    if record.ended:
        fields |= {"endedAt": record.ended_at, "isError": record.status == "errored", "durationMs": record.duration_ms}
    elif record.waiting_for is not None:
        fields["waitingFor"] = record.waiting_for
    return {**fields, "attempts": record.attempts}


def record_of(record: RunRecord, needs: str | None = None) -> JsonObject:
    fields = {**pointer(record), "input": record.input, "payload": record.input}
    if record.status == "completed":
        fields["result"] = record.result
    elif record.status == "errored":
        fields["error"] = record.error
    if record.trace_carrier is not None:
        fields["traceCarrier"] = record.trace_carrier
    if needs is not None:
        fields["attention"] = needs
    return fields
