"""Executions: one request for one result, in a session of its own that a repetition of the call finds again."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from pydantic import BaseModel, TypeAdapter, ValidationError

from perdure.agents import output_schema
from perdure.agents.registry import bounds_of
from perdure.agents.signature import problems
from perdure.errors import ExecutionFailed, IdempotencyConflict, Invalid, SessionDeleted
from perdure.protocol.deliveries import LOCAL, DeliveryBody, Principal
from perdure.protocol.dispatch import plain_json
from perdure.protocol.wire import JsonObject
from perdure.runtime.deliveries import CallerRequest, reference, session_id, title_of
from perdure.runtime.signals import Signals
from perdure.store.base import Store
from perdure.store.deliveries import NewDelivery
from perdure.store.follow import looked_at_until
from perdure.store.values import NewSession, SessionRow

T = TypeVar("T")

_LONGEST_KEY = 255


class Executions:
    """Starts sessions for requests, and waits for their results."""

    def __init__(self, store: Store, signals: Signals) -> None:
        self._store = store
        self._signals = signals

    async def execute(
        self,
        agent: str,
        request: BaseModel | Mapping[str, Any],
        *,
        output: type[T],
        key: str,
        principal: Principal = LOCAL,
        timeout: float | None = None,  # noqa: ASYNC109 - what ends is the wait, and not the work
    ) -> T:
        """Have the agent do what the request asks, and return its result, which fits `output`.

        The request is a pydantic model or a plain JSON object. It is the first message of a task, and the agent's
        instructions see its fields as `$name`. The same agent, request and output under one `key` are the same
        session, for as long as it is kept: a repeated call waits for it, or returns what it has returned before.
        Another request under the key is an `IdempotencyConflict`, one whose session was deleted `SessionDeleted`.
        Each principal has its own keys.
        `ExecutionFailed` when the session has ended without a result. `TimeoutError` after `timeout` seconds: the
        session goes on then, as it does when the caller is cancelled or dies.
        """
        if not (0 < len(key) <= _LONGEST_KEY and key.isprintable()):
            raise Invalid(f"The key of an execution has 1 to {_LONGEST_KEY} printable characters.")
        expected = TypeAdapter(output)
        new, delivery = _session(agent, _fields(request), expected.json_schema(), key, principal)
        return _read(expected, *await self._ended(await self._begun(new, delivery), timeout))

    async def _begun(self, new: NewSession, delivery: NewDelivery) -> str:
        """The id of the session, which begins here unless there is one under this key."""
        try:
            accepted = await self._store.first(delivery)
            if accepted is None:
                # Only a new session needs its agent: the code of one that is there may be elsewhere.
                new = replace(new, bounds=bounds_of(self._signals.known_limits(new.agent)))
                accepted = await self._store.create_session(new, delivery)
        except SessionDeleted as deleted:
            if deleted.details.get("digest") not in (None, delivery.digest):
                raise IdempotencyConflict(meta={"submissionId": deleted.details["delivery_id"]}) from None
            raise
        assert accepted is not None
        first = accepted.delivery
        if accepted.fresh:
            await self._signals.start(new, reference(first))
        elif first.unread:
            # The caller that began it may have died before it started the workflow. Starting is idempotent.
            await self._signals.deliver(first, unsignalled=True)
        return first.session_id

    async def _ended(self, session_id: str, within: float | None) -> tuple[SessionRow, object]:
        """The session that has ended, and its output if it has completed."""

        async def look() -> SessionRow:
            row = await self._store.session(session_id)
            if row is None:
                raise SessionDeleted(session_id=session_id)
            return row

        row = await looked_at_until(self._store, session_id, look, lambda found: found.ended, within)
        if not row.ended:
            raise TimeoutError(
                f"The session {session_id} has not ended within {within:g} s. It goes on: repeat the call with its key."
            )
        if row.status == "failed" or row.records_expired:
            return row, None
        # Imported here because it imports pydantic-ai, which a process that only delivers rarely needs.
        from perdure.harness.tools.children import output_of

        return row, await output_of(self._store, row)


def _fields(request: BaseModel | Mapping[str, Any]) -> JsonObject:
    fields = request.model_dump(mode="json") if isinstance(request, BaseModel) else request
    if not isinstance(cast("object", fields), Mapping):
        raise Invalid("The request of an execution is a pydantic model, or a JSON object.")
    return cast("JsonObject", plain_json(dict(fields)))


def _session(
    agent: str, fields: JsonObject, schema: JsonObject, key: str, principal: Principal
) -> tuple[NewSession, NewDelivery]:
    if not agent or not agent.isprintable():
        raise Invalid("An execution names its agent.")
    if found := output_schema.problem(schema):
        raise Invalid(f"No result can be asked for in this form: {found}.")
    message = json.dumps(fields, ensure_ascii=False, indent=2)
    body = DeliveryBody(message=message, output_schema=schema, principal=principal)
    own = session_id()
    session = NewSession(
        session_id=own,
        agent=agent,
        mode="task",
        # No token has this hash: nobody else delivers to the session.
        token_hash=f"execution/{own}",
        principal=principal,
        title=title_of(body),
        request=fields,
    )
    delivery = CallerRequest(own, body, principal, (), key, session.token_hash).delivery()
    # Not of the message: fields in another order are the same request.
    about = json.dumps(["execute", agent, fields, schema], sort_keys=True)
    return session, replace(delivery, digest=hashlib.sha256(about.encode()).hexdigest())


def _read(expected: TypeAdapter[T], row: SessionRow, output: object) -> T:
    if row.status == "failed":
        error = row.error or {}
        message = str(error.get("message") or "The session has failed.")
        raise ExecutionFailed(message, str(error.get("code") or "SESSION_FAILED"), row.session_id)
    if row.records_expired:
        raise ExecutionFailed("The result of this session has expired.", "RESULT_EXPIRED", row.session_id)
    try:
        return expected.validate_json(json.dumps(output))
    except ValidationError as invalid:
        # The type may ask for more than its schema, or the session was ended without a result.
        why = f"The result does not fit: {problems(invalid)}"
        raise ExecutionFailed(why, "OUTPUT_SCHEMA_NOT_FULFILLED", row.session_id) from None
