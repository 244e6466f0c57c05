"""The commands about what a session has accepted."""

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.bounds import printable

from .options import DataDir, as_table, settings_with

if TYPE_CHECKING:
    from perdure.protocol.wire import JsonObject
    from perdure.runtime.inbox import Delivery
    from perdure.settings import Settings
    from perdure.store.deliveries import DeliveryStatus


def deliveries(
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    limit: Annotated[int, typer.Option(help="How many, newest first.", min=1, max=1_000)] = 20,
    status: Annotated[str | None, typer.Option(help="Only `queued`, `running` or `settled` ones.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    data_dir: DataDir = None,
) -> None:
    """List what a session has accepted, and what became of it."""
    if status not in (None, "queued", "running", "settled"):
        raise typer.BadParameter("the status is queued, running or settled")
    known: Any = status
    shown = [each.shown() for each in asyncio.run(found(settings_with(data_dir=data_dir), session, limit, known))]
    for line in map(json.dumps, shown) if as_json else as_table(_HEAD, [_cells(each) for each in shown]):
        typer.echo(line)


def withdraw(
    delivery: Annotated[str, typer.Argument(help="The id of the delivery.")], data_dir: DataDir = None
) -> None:
    """Take back a message that no turn has read. Its sender is told by an event."""

    async def work() -> None:
        from perdure.runtime.inbox import Inbox
        from perdure.store.open import checked_store

        async with checked_store(settings_with(data_dir=data_dir).database) as store:
            await Inbox(store).withdraw(delivery, None)

    asyncio.run(work())
    typer.echo(f"{printable(delivery)} is withdrawn: no turn will read it.")


async def found(
    settings: "Settings", session_id: str, limit: int, status: "DeliveryStatus | None"
) -> "Sequence[Delivery]":
    """The newest deliveries of the session."""
    from perdure.errors import SessionNotFound
    from perdure.runtime.inbox import Inbox
    from perdure.store.deliveries import DeliveryQuery
    from perdure.store.open import checked_store

    async with checked_store(settings.database) as store:
        if await store.session(session_id) is None:
            raise SessionNotFound(f"The store knows no session {session_id}.")
        return (await Inbox(store).list(DeliveryQuery(session_id, status, limit)))[0]


_HEAD = ("delivery", "accepted", "kind", "state", "where", "why")


def _cells(shown: "JsonObject") -> tuple[str, ...]:
    cells = (
        shown["deliveryId"],
        shown["acceptedAt"],
        shown["kind"],
        shown.get("outcome") or shown["status"],
        # Its place in the queue, or the turn that has read it.
        f"#{shown['position']}" if "position" in shown else shown.get("turnId", ""),
        shown.get("error", {}).get("code", ""),
    )
    return tuple(map(str, cells))
