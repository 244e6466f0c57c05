"""Deleting sessions, and all that a principal owns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from perdure.errors import Invalid, Unavailable
from perdure.protocol.deliveries import Principal
from perdure.settings import Settings
from perdure.store.lifecycle import Deletion
from perdure.store.open import checked_store

if TYPE_CHECKING:
    from perdure.runtime.deletions import Deletions


def delete(settings: Settings, session_id: str | None, principal: str | None, say: Callable[[str], None]) -> None:
    """Delete one session, or all that a principal owns; a line for each says what was deleted."""

    async def work() -> None:
        from perdure.runtime.connect import temporal_client
        from perdure.runtime.deletions import Deletions
        from perdure.runtime.drivers.client import DriverClient
        from perdure.runtime.streams.written import delete_streams

        async with checked_store(settings.database) as store:
            client = await temporal_client(settings, lazy=True)
            deletions = Deletions(store, DriverClient(client, settings.task_queue), client)
            begun: list[str] = [] if session_id is None else [session_id]
            if session_id is not None:
                await deletions.delete(session_id, None, _DELETION_SECONDS)
            else:
                owner = read_principal(settings, principal or "").owner
                async for each in deletions.owned(owner):
                    await deletions.delete(each, None, _DELETION_SECONDS)
                    begun.append(each)
                if not begun:
                    say(f"{principal} owns no session in this store.")
                if streams := await delete_streams(store.streams, owner):
                    say(f"{principal}  deleted: {streams} {'stream' if streams == 1 else 'streams'}")
            left = await _finish(deletions, begun, say)
            for each in left:
                say(f"{each}  is being deleted; the APIs continue, and so does this command when repeated.")
            if left:
                raise Unavailable(f"Not everything is deleted yet; {len(left)} of {len(begun)} sessions are left.")

    asyncio.run(work())


#: For how many seconds a command waits until the rows of a session are deleted, whose turn may need some to stop, and
#: then for the next session that Temporal has deleted.
_DELETION_SECONDS = 90.0
#: How many sessions are deleted at once, and the seconds between two looks at what Temporal has.
_AT_ONCE = 8
_LOOK = 0.5


async def _finish(deletions: Deletions, session_ids: Sequence[str], say: Callable[[str], None]) -> Sequence[str]:
    """Wait for Temporal, which takes half a minute however many sessions they are; what is left when it gives up."""
    left: list[str] = [*session_ids]
    until = monotonic() + _DELETION_SECONDS
    while left and monotonic() < until:
        finished: set[str] = set()
        for start in range(0, len(left), _AT_ONCE):
            some = left[start : start + _AT_ONCE]
            looked = await asyncio.gather(*(deletions.delete(each, None, 0.0, until_gone=True) for each in some))
            for each in looked:
                if each.finished_at is not None:
                    say(_deleted(each))
                    finished.add(each.session_id)
                    until = monotonic() + _DELETION_SECONDS
        left = [each for each in left if each not in finished]
        await asyncio.sleep(_LOOK if left else 0)
    return left


def read_principal(settings: Settings, principal: str) -> Principal:
    """The owner of sessions that is written as `jwt:ada` or `api-key:billing`."""
    authenticator, colon, name = principal.partition(":")
    if not (authenticator and colon and name):
        raise Invalid("A principal is written as AUTHENTICATOR:NAME, for example jwt:ada or api-key:billing.")
    issuer = settings.jwt_issuer if authenticator == "jwt" else None
    if authenticator == "jwt" and issuer is None:
        raise Invalid("PERDURE_JWT_ISSUER must be set to find the sessions of a user.")
    kind = {"jwt": "user", "api-key": "service"}.get(authenticator, authenticator)
    return Principal(principal_id=name, principal_type=kind, authenticator=authenticator, issuer=issuer, subject=name)


def _deleted(deletion: Deletion) -> str:
    counts = [(count, *_COUNTED.get(name, (name, name))) for name, count in sorted(deletion.counts.items()) if count]
    what = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts)
    return f"{deletion.session_id}  deleted: {what}"


#: What a deletion counts, one of it and several.
_COUNTED = {
    "deadLetters": ("failed turn", "failed turns"),
    "deliveries": ("delivery", "deliveries"),
    "events": ("event", "events"),
    "executions": ("workflow execution", "workflow executions"),
    "handedOver": ("record kept for its forks", "records kept for its forks"),
    "inputs": ("request for input", "requests for input"),
    "records": ("record", "records"),
    "sessions": ("session", "sessions"),
    "slotVersions": ("earlier value of a slot", "earlier values of slots"),
    "slotSteps": ("value of a slot between steps", "values of slots between steps"),
    "slots": ("slot", "slots"),
}
