"""A caller's request, the checks of its arguments, the delivery that is made of it, and new ids."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, cast

from opentelemetry import propagate
from pydantic import ValidationError

from perdure.agents.agent import LONGEST_TIME
from perdure.agents.signature import problems
from perdure.bounds import shortened, whole
from perdure.errors import Invalid
from perdure.protocol import names
from perdure.protocol.deliveries import (
    MAIN,
    DeliveryBody,
    DeliveryRef,
    FilePart,
    Message,
    Overflow,
    Principal,
    QueueMode,
    TextPart,
    summary,
)
from perdure.protocol.inputs import InputRequest
from perdure.protocol.wire import JsonObject
from perdure.store.deliveries import DeliveryRow, NewDelivery
from perdure.store.values import MOST_TAGS

if TYPE_CHECKING:
    from perdure.agents.agent import Agent
    from perdure.agents.registry import AgentRegistry


@dataclass(frozen=True)
class CallerRequest:
    """One request of a caller. It becomes a message or an answer."""

    session_id: str
    body: DeliveryBody
    principal: Principal
    # With the body, it identifies the request: under one key, requests that are equal in both are the same.
    about: tuple[str, ...]
    idempotency_key: str | None = None
    # Empty for an answer without a token: its responder was authorised instead.
    token_hash: str = ""
    # What the message does while the session is busy. None: the default.
    mode: QueueMode | None = None
    # How many deliveries may wait in the session.
    limit: int | None = None
    overflow: Overflow = "reject"
    # The lane that the session is.
    lane: str = MAIN

    def delivery(self, body: DeliveryBody | None = None) -> NewDelivery:
        """The delivery to write. `body` replaces the content; the digest is that of the request in any case."""
        content = body or self.body
        mode = (self.mode or "followup") if content.kind == "message" else None
        ref = DeliveryRef(
            id=delivery_id(),
            kind=content.kind,
            token_hash=self.token_hash,
            coalesce=self.mode == "collect",
            mode=mode,
            traceparent=_traceparent(),
        )
        return NewDelivery(
            session_id=self.session_id,
            delivery_id=ref.id,
            body=content.model_dump(mode="json", exclude_none=True),
            owner=self.principal.owner,
            idempotency_key=self.idempotency_key,
            # The digest is only compared under a key, and hashing a large file takes time.
            digest=None if self.idempotency_key is None else self._digest(),
            ref=ref.model_dump(mode="json"),
            limit=self.limit,
            mode=mode,
            overflow=self.overflow if mode is not None else "reject",
            lane=self.lane,
        )

    def _digest(self) -> str:
        content = self.body.model_dump(mode="json", exclude_none=True)
        # The key has its owner. Other facts about the principal may change between two tries.
        body = {key: value for key, value in content.items() if key != "principal"}
        return hashlib.sha256(json.dumps({"about": self.about, "body": body}, sort_keys=True).encode()).hexdigest()


def reference(row: DeliveryRow, token_hash: str = "") -> JsonObject:
    """The signal's payload for an accepted delivery; `token_hash` is the session's, for old rows without a reference.

    It stays JSON, so that fields of a newer build are passed on unchanged.
    """
    # Rows of older builds have a kind and no reference.
    known = row.ref or {"id": row.delivery_id, "kind": row.kind, "tokenHash": token_hash}
    # It may have been moved since, or have another mode now.
    mode = {} if row.mode is None else {"mode": row.mode, "coalesce": row.mode == "collect"}
    changed = {} if not row.edits else {"order": row.moved_to, "edits": row.edits}
    # What was accepted before it is settled, unless it was changed to that later.
    supersedes = {"supersedes": known.get("supersedes") or row.accepted_at} if row.mode == "interrupt" else {}
    return {**known, **mode, **changed, **supersedes, "at": row.accepted_at}


def _traceparent() -> str | None:
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent")


def checked_bounds(deadline: datetime | None, idle_seconds: float | None) -> float | None:
    """The deadline in seconds since the epoch."""
    if idle_seconds is not None and not 0 < idle_seconds <= LONGEST_TIME:
        raise Invalid("A session's idle time-out is a number of seconds above 0.")
    if deadline is None:
        return None
    if deadline.tzinfo is None:
        raise Invalid("A session's deadline needs a time zone: `2027-01-31T12:00:00Z`, for example.")
    ends_at = deadline.timestamp()
    if ends_at > time.time() + LONGEST_TIME:
        raise Invalid(f"A session's deadline is at most {LONGEST_TIME} seconds away.")
    return ends_at


#: Tags: what a name consists of, and the characters of a text.
_TAG = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LONGEST_TAG = 256


def checked_tags(tags: Mapping[str, str | None]) -> dict[str, str | None]:
    """The tags to set, and as None those to take away, with text that UTF-8 can encode."""
    if len(tags) > MOST_TAGS:
        raise Invalid(f"A session has at most {MOST_TAGS} tags.")
    for name, text in tags.items():
        if not (isinstance(cast("object", name), str) and _TAG.fullmatch(name)):
            raise Invalid("A tag's name has 1 to 64 letters, digits, '.', '_' and '-'.")
        if text is not None and not (isinstance(cast("object", text), str) and len(text) <= _LONGEST_TAG):
            raise Invalid(f"A tag is a text of at most {_LONGEST_TAG} characters.")
    return {name: None if text is None else whole(text) for name, text in tags.items()}


def new_tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    """The tags of a new session."""
    return {name: text for name, text in checked_tags(tags or {}).items() if text is not None}


def with_extras(about: tuple[str, ...], **extras: JsonObject | None) -> tuple[str, ...]:
    """What distinguishes a request, with what it has beyond the usual arguments."""
    for name, extra in extras.items():
        about = (*about, name, json.dumps(extra, sort_keys=True)) if extra else about
    return about


def message_body(message: Message | None, principal: Principal) -> DeliveryBody:
    """The body of a plain message, with text that UTF-8 can encode."""
    if not message:
        raise Invalid("A delivery needs a message.")
    try:
        body = DeliveryBody(message=message, principal=principal)
    except ValidationError:
        raise Invalid("A message is text, or a sequence of text and file parts.") from None
    content = body.message
    parts = whole(content) if isinstance(content, str) else tuple(_whole(part) for part in content or ())
    return body.model_copy(update={"message": parts})


def _whole(part: TextPart | FilePart) -> TextPart | FilePart:
    return part.model_copy(update={name: whole(value) for name, value in part if isinstance(value, str)})


def title_of(body: DeliveryBody) -> str | None:
    """The first words of the message, for lists and for the Temporal UI."""
    if body.message is None:
        return None
    return shortened(" ".join(summary(body.message)[:400].split()), 80)


_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def ulid() -> str:
    """48 bits of milliseconds and 80 random bits, in Crockford's base 32."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def session_id() -> str:
    return f"{names.SESSION_ID}{ulid()}"


def delivery_id() -> str:
    return f"dlv_{ulid()}"


async def read_edit(agents: AgentRegistry | None, request: InputRequest, arguments: JsonObject) -> JsonObject:
    """The arguments as the tool will get them; `Invalid` with the reason when it does not accept them."""
    agent = agents.get(request.agent) if agents else None
    if agent is None:
        raise Invalid(f"The arguments of {request.tool} cannot be checked here, so they cannot be changed here.")
    own = next((tool for tool in agent.own_tools if tool.name == request.tool), None)
    if own is None:
        return await _read_foreign(agent, request.tool, arguments)
    try:
        return own.signature.read(arguments).json
    except ValidationError as invalid:
        raise Invalid(f"Invalid arguments for {request.tool}: {problems(invalid)}") from None


async def _read_foreign(agent: Agent, tool: str, arguments: JsonObject) -> JsonObject:
    # Imported here because it imports pydantic-ai, which a process that only accepts answers rarely needs.
    from perdure.harness.tools.toolbox import InvalidArguments, open_toolbox

    usable = (await open_toolbox(agent)).get(tool)
    if usable is None:
        raise Invalid(f"There is no tool {tool} any more, so its arguments cannot be changed.")
    try:
        return usable.read(arguments).json
    except InvalidArguments as invalid:
        raise Invalid(str(invalid)) from None
