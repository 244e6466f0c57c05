"""Signals to the workflows that drive sessions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from perdure.errors import NoActiveSession, Unavailable
from perdure.protocol import names
from perdure.protocol.deliveries import DeliveryRef

#: How long a caller waits for Temporal before the answer is 503.
RPC_PATIENCE = timedelta(seconds=5)
#: A lazy client that finds no server at its first call says so with a plain RuntimeError.
AWAY = (RPCError, RuntimeError)


class Driver:
    """The drivers of all sessions. One that is gone is `NoActiveSession`; without Temporal, all are `Unavailable`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def deliver(self, session_id: str, ref: DeliveryRef) -> None:
        await self._signal(session_id, names.DELIVER, ref.model_dump(mode="json"))

    async def cancel(self, session_id: str, turn_id: str) -> None:
        await self._signal(session_id, names.CANCEL, {"turnId": turn_id})

    async def _signal(self, session_id: str, name: str, payload: dict[str, Any]) -> None:
        try:
            await self._client.get_workflow_handle(session_id).signal(name, payload, rpc_timeout=RPC_PATIENCE)
        except AWAY as error:
            if isinstance(error, RPCError) and error.status == RPCStatusCode.NOT_FOUND:
                raise NoActiveSession from error
            raise Unavailable("The session could not be reached; try again.") from error
