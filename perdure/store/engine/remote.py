"""What sessions have to do with other servers: the callbacks that they deliver, and the calls that they wait for."""

from perdure.protocol import names
from perdure.protocol.deliveries import CHILD_RESULT, DeliveryBody, DeliveryRef
from perdure.protocol.wire import JsonObject
from perdure.store.deliveries import Accepted, NewDelivery
from perdure.store.lifecycle import DueCallback, NewRemoteCall, RemoteCall

from . import rows
from .database import Row, Transaction
from .deliveries import enqueue
from .rows import decode, encode, stamp_after


async def claim_callback(tx: Transaction, session_id: str, lease: float, now: str) -> DueCallback | None:
    """Take the callback for `lease` seconds, if it is due; then it is due again."""
    until = stamp_after(now, lease)
    found = await tx.row("claim_callback", session_id=session_id, until=until, now=now)
    if found is None:
        return None
    return DueCallback(session_id, decode(found["callback"]), found["tries"], found["ended_at"])


async def settle_callback(tx: Transaction, session_id: str, outcome: str) -> None:
    await tx.run("settle_callback", session_id=session_id, outcome=outcome)
    # A session that was deleted leaves nothing.
    await tx.run("drop_callback", session_id=session_id)


async def begin_remote_call(tx: Transaction, call: NewRemoteCall, now: str) -> RemoteCall:
    """Write the call, or find it as it was begun before."""
    await tx.run(
        "insert_remote_call",
        session_id=call.session_id,
        action=call.action,
        token_hash=call.token_hash,
        state=encode(call.state),
        now=now,
    )
    found = await find_remote_call(tx, call.session_id, call.action)
    assert found is not None
    return found


async def find_remote_call(tx: Transaction, session_id: str, action: str) -> RemoteCall | None:
    found = await tx.row("remote_call", session_id=session_id, action=action)
    return None if found is None else _remote_call(found)


async def find_by_token(tx: Transaction, token_hash: str) -> RemoteCall | None:
    found = await tx.row("remote_call_by_token", token_hash=token_hash)
    return None if found is None else _remote_call(found)


async def end_remote_call(
    tx: Transaction, call: RemoteCall, result: JsonObject, state: JsonObject, now: str
) -> Accepted | None:
    """Deliver the result to the session that waits for it. None: another one came before, or the session has ended."""
    session = await rows.find(tx, call.session_id)
    place = {"session_id": call.session_id, "action": call.action}
    if await tx.row("end_remote_call", **place, state=encode(state), now=now) is None:
        return None
    if session is None or session.ended:
        return None
    ref = DeliveryRef(
        id=names.delivery_of_call(call.session_id, call.action), kind=CHILD_RESULT, token_hash="", action=call.action
    )
    body = DeliveryBody(kind=CHILD_RESULT, result=result)
    delivery = NewDelivery(
        session_id=call.session_id,
        delivery_id=ref.id,
        body=body.model_dump(mode="json", exclude_none=True),
        owner=session.row.principal.owner,
        ref=ref.model_dump(mode="json"),
    )
    return await enqueue(tx, session, delivery, now, limited=False)


def _remote_call(row: Row) -> RemoteCall:
    return RemoteCall(
        row["session_id"], row["action"], decode(row["state"]), row["begun_at"], row["ended_at"] is not None
    )
