"""What a caller asks of a session, the delivery that it becomes, and new ids."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from dataclasses import dataclass

from opentelemetry import propagate

from perdure.protocol.deliveries import DeliveryBody, DeliveryRef
from perdure.protocol.principals import Principal
from perdure.protocol.wire import JsonObject
from perdure.store.values import DeliveryRow, NewDelivery


@dataclass(frozen=True)
class CallerRequest:
    """One request of one caller, before it is known whether it is a message or an answer."""

    session_id: str
    body: DeliveryBody
    principal: Principal
    # With the body, what makes two requests under one key the same.
    about: tuple[str, ...]
    idempotency_key: str | None = None
    # An answer that comes without a token is heard by the right of its responder.
    token_hash: str = ""
    coalesce: bool = False
    # How many deliveries may wait in the session.
    limit: int | None = None

    def delivery(self, body: DeliveryBody | None = None) -> NewDelivery:
        """As it is written; `body` is what became of the request, and does not change which request it was."""
        content = body or self.body
        ref = DeliveryRef(
            id=delivery_id(),
            kind=content.kind,
            token_hash=self.token_hash,
            coalesce=self.coalesce,
            traceparent=_traceparent(),
        )
        return NewDelivery(
            session_id=self.session_id,
            delivery_id=ref.id,
            body=content.model_dump(mode="json", exclude_none=True),
            owner=self.principal.owner,
            idempotency_key=self.idempotency_key,
            # It is compared under a key only, and that of a large file takes a while.
            digest=None if self.idempotency_key is None else self._digest(),
            ref=ref.model_dump(mode="json"),
            limit=self.limit,
        )

    def _digest(self) -> str:
        content = self.body.model_dump(mode="json", exclude_none=True)
        # Whose request it is, the key's owner says; what else is known of them may change between two tries.
        body = {key: value for key, value in content.items() if key != "principal"}
        return hashlib.sha256(json.dumps({"about": self.about, "body": body}, sort_keys=True).encode()).hexdigest()


def reference(row: DeliveryRow, token_hash: str = "") -> JsonObject:
    """An accepted delivery, as Temporal is told of it; `token_hash` is the session's, for rows that do not hold it.

    As JSON: a newer build may have accepted it, and all that this one does not know is told as well.
    """
    # A build that did not keep the reference kept the kind.
    known = row.ref or {"id": row.delivery_id, "kind": row.kind, "tokenHash": token_hash}
    return {**known, "at": row.accepted_at}


def _traceparent() -> str | None:
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent")


_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def ulid() -> str:
    """48 bits of milliseconds and 80 random bits, in Crockford's base 32."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def session_id() -> str:
    return f"ses_{ulid()}"


def delivery_id() -> str:
    return f"dlv_{ulid()}"
