"""What a caller asks of a session, and the delivery that it becomes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from opentelemetry import propagate

from perdure.protocol.deliveries import DeliveryBody, DeliveryRef
from perdure.protocol.principals import Principal
from perdure.store.base import DeliveryRow, NewDelivery

from . import ids


@dataclass(frozen=True)
class Asked:
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

    def delivery(self, body: DeliveryBody | None = None) -> NewDelivery:
        """As it is written; `body` is what became of the request, and does not change which request it was."""
        return NewDelivery(
            session_id=self.session_id,
            delivery_id=ids.delivery_id(),
            body=(body or self.body).model_dump(mode="json", exclude_none=True),
            owner=self.principal.owner,
            idempotency_key=self.idempotency_key,
            digest=self._digest(),
        )

    def ref(self, row: DeliveryRow) -> DeliveryRef:
        """As Temporal hears of it."""
        return reference(row, self.token_hash, coalesce=self.coalesce)

    def _digest(self) -> str:
        content = self.body.model_dump(mode="json", exclude_none=True)
        # Whose request it is, the key's owner says; what else is known of them may change between two tries.
        body = {key: value for key, value in content.items() if key != "principal"}
        return hashlib.sha256(json.dumps({"about": self.about, "body": body}, sort_keys=True).encode()).hexdigest()


def reference(row: DeliveryRow, token_hash: str = "", *, coalesce: bool = False) -> DeliveryRef:
    """An accepted delivery, as Temporal hears of it."""
    kind: Literal["message", "answer"] = "answer" if (row.body or {}).get("kind") == "answer" else "message"
    return DeliveryRef(
        id=row.delivery_id, kind=kind, token_hash=token_hash, coalesce=coalesce, traceparent=_traceparent()
    )


def first_reference(delivery_id: str, token_hash: str) -> DeliveryRef:
    """The delivery that a session starts with; nobody was asked anything yet."""
    return DeliveryRef(id=delivery_id, token_hash=token_hash, traceparent=_traceparent())


def unheard(row: DeliveryRow) -> bool:
    """Whether a turn may still hear it."""
    return row.turn is None and row.refused is None


def _traceparent() -> str | None:
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent")
