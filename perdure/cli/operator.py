"""The operator's commands on stores and sessions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast, get_args

from perdure.bounds import printable, quoted
from perdure.errors import (
    AgentNotFound,
    ForkRefused,
    Invalid,
    NoDriver,
    NoWorker,
    PerdureError,
    SessionNotFound,
    Unavailable,
)
from perdure.protocol import names
from perdure.protocol.wire import JsonObject
from perdure.session.state import OPERATOR_FAILED, Rebuild, Repair, read_turn_number
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.engine.cursors import SessionSearch, search_sessions
from perdure.store.follow import events_of
from perdure.store.lifecycle import DeadLetterPage, DeadLetterQuery, DeadLetterStatus, Restoration
from perdure.store.open import checked_store, open_store
from perdure.store.values import SessionQuery, SessionRow, ShownStatus

from .deletion import read_principal
from .follow import events_of_family

if TYPE_CHECKING:
    from perdure.runtime.deploys.unserved import Run
    from perdure.runtime.drivers.client import DriverClient

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_ATTRIBUTE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*=[A-Za-z0-9._:/@-]+")


def migrate(settings: Settings) -> None:
    """Create or upgrade the schema."""

    async def work() -> None:
        store = await open_store(settings.database)
        try:
            await store.migrate()
        finally:
            await store.close()

    asyncio.run(work())


def register_search_attributes(settings: Settings) -> str:
    """Have Temporal's UI search drivers by agent and family. The result is a sentence for the operator."""

    async def work() -> str:
        from temporalio.service import RPCError

        from perdure.runtime.connect import ABSENT, register_search_attributes, temporal_client

        *others, last = names.SEARCH_ATTRIBUTES
        named = f"{', '.join(others)} and {last}"
        try:
            await register_search_attributes(await temporal_client(settings))
        except ABSENT as error:
            status = error.status.name if isinstance(error, RPCError) else "UNAVAILABLE"
            return (
                f"The search attributes {named} could not be registered at {settings.temporal_address} ({status}); "
                "sessions run without them."
            )
        return f"Temporal knows the search attributes {named}."

    return asyncio.run(work())


def sessions(
    settings: Settings,
    limit: int,
    status: str | None = None,
    parent: str | None = None,
    *,
    tag: str | None = None,
    find: str | None = None,
) -> Sequence[str]:
    """The newest sessions, one line each: of this status, children of `parent`, with this tag, or this text in them."""
    wanted: ShownStatus | None = next((each for each in get_args(ShownStatus) if each == status), None)
    if status is not None and wanted is None:
        raise Invalid(f"A session's status is one of {', '.join(get_args(ShownStatus))}.")

    name, colon, text = (tag or "").partition(":")
    if tag is not None and not (name and colon):
        raise Invalid("A tag has a name and a text, like job:nightly.")
    query = SessionQuery(limit=limit, status=wanted, parent=parent, tag=(name, text) if tag else None)

    async def work() -> Sequence[SessionRow]:
        async with checked_store(settings.database) as store:
            found: list[SessionRow] = []
            cursor: str | None = None
            while True:
                # A page may be short: one search looks at so many sessions, and no more.
                asked = replace(query, limit=limit - len(found), cursor=cursor)
                page = await search_sessions(store, SessionSearch(asked, text=find))
                found += page.sessions
                cursor = page.next_cursor
                if cursor is None or len(found) >= limit:
                    return found

    return [
        printable(
            f"{row.session_id}  {row.shown_status:<15}  {row.updated_at}  {row.agent}  {row.title or ''}"
        ).rstrip()
        for row in asyncio.run(work())
    ]


def tail(settings: Settings, session_id: str, start: int, say: Callable[[str], None], *, follow: bool) -> None:
    """Print each event of the session from `start` on; with `follow`, until the session ends."""

    async def work() -> None:
        async with checked_store(settings.database) as store:
            async for event in events_of(store, session_id, start, follow=follow):
                say(printable(json.dumps(event.model_dump(mode="json", exclude_none=True), ensure_ascii=False)))

    asyncio.run(work())


def tail_family(settings: Settings, session_id: str, say: Callable[[str], None], *, follow: bool) -> None:
    """The same for the session and all that were started from it, each event with its agent and its session."""

    async def work() -> None:
        async with checked_store(settings.database) as store:
            async for told in events_of_family(store, session_id, follow=follow):
                whose = {"agent": told.session.agent, "sessionId": told.session.session_id}
                shown = {**whose, **told.event.model_dump(mode="json", exclude_none=True)}
                say(printable(json.dumps(shown, ensure_ascii=False)))

    asyncio.run(work())


def cancel(settings: Settings, session_id: str, turn_id: str | None) -> str:
    """Request that the session's turn stops. The result is a sentence for the operator."""

    async def work() -> str:
        from perdure.runtime.connect import temporal_client
        from perdure.runtime.drivers.client import DriverClient
        from perdure.runtime.signals import Signals, cancel_turn

        async with checked_store(settings.database) as store:
            row = await _known(store, session_id)
            driver = DriverClient(await temporal_client(settings, lazy=True), settings.task_queue)
            return _CANCELLED[(await cancel_turn(store, Signals(store, driver), row.session_id, turn_id)).status]

    return asyncio.run(work())


_CANCELLED = {
    "accepted": "Its turn will be stopped; `perdure tail` shows turn.cancelled once it is.",
    "no_active_turn": "There is nothing to stop: no such turn runs or waits for an answer.",
}


def dead_letters(settings: Settings, limit: int, status: DeadLetterStatus) -> Sequence[str]:
    """The newest failed turns, one line each."""

    async def work() -> DeadLetterPage:
        async with checked_store(settings.database) as store:
            return await store.dead_letters(DeadLetterQuery(status=status, limit=limit))

    return [
        printable(
            f"{letter.session_id}  {names.turn_id(letter.turn):<9}  {letter.failed_at}  {letter.agent}  "
            f"{letter.code}: {letter.message}"
        )
        for letter in asyncio.run(work()).dead_letters
    ]


def requeue(settings: Settings, session_id: str, turn_id: str) -> str:
    """Deliver the messages of a failed turn again. The result is a sentence for the operator."""

    async def work() -> str:
        from perdure.runtime.connect import temporal_client
        from perdure.runtime.dead_letters import DeadLetters
        from perdure.runtime.drivers.client import DriverClient
        from perdure.runtime.signals import Signals

        turn = _turn_number(turn_id)
        async with checked_store(settings.database) as store:
            driver = DriverClient(await temporal_client(settings, lazy=True), settings.task_queue)
            requeued = await DeadLetters(store, Signals(store, driver)).requeue(session_id, turn)
        if requeued.deduplicated:
            return "It was requeued before; nothing was done now."
        return "Its messages are delivered again; `perdure tail` shows the new turn."

    return asyncio.run(work())


def export(settings: Settings, session_id: str, write: Callable[[bytes], object]) -> None:
    """Write the session's export, line by line."""

    async def work() -> None:
        from perdure.runtime.forks import export_session

        async with checked_store(settings.database) as store:
            async for line in export_session(store, session_id):
                write(line)

    asyncio.run(work())


def import_(settings: Settings, file: Path, principal: str | None, *, again: bool) -> tuple[str, str]:
    """Create a session from an export; its id, and its continuation token."""
    from perdure.agents.registry import load_agents

    agents = load_agents(settings.agents, settings.model, settings.turns)

    async def work() -> tuple[str, str]:
        from perdure.runtime.connect import secret, temporal_client
        from perdure.runtime.drivers.client import DriverClient
        from perdure.runtime.forks import import_session
        from perdure.runtime.signals import Signals
        from perdure.session.state import derive_token

        if not file.is_file():
            raise Invalid(f"There is no file {file}.")
        owner = None if principal is None else read_principal(settings, principal)
        async with checked_store(settings.database) as store:
            key = secret(settings)
            driver = DriverClient(await temporal_client(settings, lazy=True), settings.task_queue)
            signals = Signals(store, driver, agents, ui_detail=settings.ui_detail == "on")
            row = await import_session(store, signals, key, file, principal=owner, again=again)
            return row.session_id, derive_token(key, row.session_id)

    return _run_with_agents(work)


def fork(
    settings: Settings, session_id: str, turn_id: str | None, step: int | None = None, checkpoint: str | None = None
) -> tuple[str, str]:
    """Fork the session at the end of this turn, or of this step, or where a checkpoint was taken.

    The result is the id of the fork, and its continuation token.
    """
    if (turn_id is None) == (checkpoint is None):
        raise Invalid("Name the place of the fork: --turn, or --checkpoint.")
    turn = None if turn_id is None else _turn_number(turn_id)
    from perdure.agents.registry import load_agents

    agents = load_agents(settings.agents, settings.model, settings.turns)

    async def work() -> tuple[str, str]:
        from perdure.runtime.open import open_sessions

        async with checked_store(settings.database) as store:
            parent = await _known(store, session_id)
            if parent.agent not in agents:
                raise AgentNotFound(f"No agent named {quoted(parent.agent)!r} is known here.")
            sessions = await open_sessions(settings, store, agents=agents)
            try:
                forked = await sessions.fork(session_id, turn, step=step, checkpoint=checkpoint)
            except ForkRefused as refused:
                raise _with_nearest(refused) from None
            return forked.session_id, forked.continuation_token

    return _run_with_agents(work)


def _with_nearest(refused: ForkRefused) -> PerdureError:
    """The refusal, with the options that name the place that is offered instead."""
    nearest = refused.details.get("nearest")
    if not isinstance(nearest, dict):
        return refused
    options = " ".join(f"--{name} {number}" for name, number in cast("JsonObject", nearest).items())
    return ForkRefused(f"{refused.message} It can be forked with {options}.", **refused.details)


def _run_with_agents(work: Callable[[], Coroutine[None, None, T]]) -> T:
    """Run a command that creates a session: its bounds are those that its agent declares, so that has to be known."""
    try:
        return asyncio.run(work())
    except AgentNotFound as missing:
        raise AgentNotFound(
            f"{missing.message} Its declaration bounds the new session: name it with --agents or in PERDURE_AGENTS."
        ) from None


def repair(settings: Settings, session_id: str, how: Repair, *, sure: bool = False) -> str:
    """Repair a session that cannot continue without help; `sure`: also when no worker would run it now."""

    async def work() -> str:
        from perdure.runtime.drivers.lost import end_if_deleted, start_lost_driver

        async with checked_store(settings.database) as store:
            row = await _known(store, session_id)
            if row.ended:
                return "The session has ended; there is nothing to repair."
            driver = await _driver(settings)
            # The first action of a new driver.
            rebuild = Rebuild(reason="OPERATOR", ends=OPERATOR_FAILED if how == "fail" else None)
            broken = await _broken_run(driver, session_id)
            if broken is not None and how == "retry":
                return f"No worker can replay the workflow of {session_id}: --rebuild starts it from the store."
            try:
                # A driver that cannot be replayed reads no signals.
                replaced = broken is not None and await driver.replace(session_id, broken, rebuild, of=row)
                if not replaced or how == "fail":
                    # Also the new one: an API that replaces it at the same moment does not know of this order.
                    await driver.repair(session_id, how)
            except NoDriver:
                if how == "retry":
                    return f"{session_id}: {await start_lost_driver(store, driver, row, unattended=sure)}."
                await driver.rebuild(session_id, rebuild, unattended=sure, of=row)
                await end_if_deleted(store, driver, session_id)
            if how == "retry" and row.attention is None:
                return "It needs no attention; whatever of its work waits for a retry is retried now."
            return _REPAIRED[how]

    return _run_with_hint(work)


def restore(settings: Settings, session_id: str, turn_id: str | None, *, sure: bool = False) -> str:
    """Continue a session as it was after a turn, or without its history; `sure` as above."""

    async def work() -> str:
        from perdure.runtime.drivers.lost import end_if_deleted

        kept = None if turn_id is None else _turn_number(turn_id)
        async with checked_store(settings.database) as store:
            row = await _known(store, session_id)
            driver = await _driver(settings)
            rebuild = Rebuild(reason="OPERATOR")
            await store.restore(Restoration(session_id, "OPERATOR", kept))
            broken = await _broken_run(driver, session_id)
            try:
                if broken is None or not await driver.replace(session_id, broken, rebuild, of=row):
                    await driver.repair(session_id, "retry")
            except NoDriver:
                # Whoever ended the workflow: the operator wants the session to continue.
                await driver.rebuild(session_id, rebuild, unattended=sure, of=row)
                await end_if_deleted(store, driver, session_id)
            return "It continues from there; `perdure tail` shows session.reset."

    return _run_with_hint(work)


async def _broken_run(driver: DriverClient, session_id: str) -> Run | None:
    """The run of the session's driver or turn that no worker can replay."""
    return (await driver.unreplayable() or {}).get(session_id)


def _run_with_hint(work: Callable[[], Coroutine[None, None, str]]) -> str:
    try:
        return asyncio.run(work())
    except NoWorker as none:
        hint = "Do its workers have another PERDURE_TASK_QUEUE? If they only do not run now, add --yes."
        raise NoWorker(f"{none.message} {hint}") from None


def _turn_number(turn_id: str) -> int:
    turn = read_turn_number({"turnId": turn_id if turn_id.startswith("turn_") else f"turn_{turn_id}"})
    if turn is None:
        raise Invalid(f"A turn is named by its number, 3 or turn_3 for one; not {quoted(turn_id)!r}.")
    return turn


_REPAIRED: dict[Repair, str] = {
    "retry": "The failed work is retried now.",
    "rebuild": "Its workflow continues from the store; `perdure tail` shows session.rebuilt.",
    "fail": "It will be ended; `perdure tail` shows session.failed, or run.failed of a run.",
}


async def _driver(settings: Settings) -> DriverClient:
    from perdure.runtime.connect import ABSENT, temporal_client
    from perdure.runtime.drivers.client import DriverClient

    try:
        return DriverClient(await temporal_client(settings), settings.task_queue)
    except ABSENT:
        where = settings.temporal_address
        raise Unavailable(f"Temporal does not answer at {where} (PERDURE_TEMPORAL_ADDRESS).") from None


def reconcile(settings: Settings, *, end_orphans: bool, sure: bool = False) -> Sequence[str]:
    """Compare the store and Temporal once; one line for each difference."""

    async def work() -> Sequence[str]:
        from perdure.runtime.reconciler import Reconciler

        async with checked_store(settings.database) as store:
            driver = await _driver(settings)
            reconciler = Reconciler(store, driver)
            found = await reconciler.reconcile()
            if end_orphans and found.driven < len(found.orphans) and not sure:
                raise Invalid(
                    f"{len(found.orphans)} of the running workflows belong to no session of this store, and "
                    f"{found.driven} to one: is it the right one? If it is, and has lost sessions, add --yes."
                )
            if end_orphans:
                await reconciler.end_orphans(found.orphans)
            unreplayable = "cannot be replayed by any worker; the APIs start it from the store after two minutes"
            unserved = "waits for a worker of build"
            orphaned = "ended" if end_orphans else "end it with --end-orphans"
            return [
                *(f"{each}  {found.mended.get(each, 'could not be repaired')}" for each in found.undriven),
                *(f"{each}  is a workflow without a session in this store; {orphaned}" for each in found.orphans),
                *(f"{each}  {unreplayable}" for each in sorted(await driver.unreplayable() or ())),
                *(f"{each}  {unserved} {build}" for each, build in sorted(driver.unserved.items())),
            ] or ["The store and Temporal agree."]

    return asyncio.run(work())


def new_api_key(name: str, attributes: Sequence[str] = ()) -> tuple[str, str]:
    """A new key and its entry for PERDURE_API_KEYS. An attribute is written NAME=VALUE."""
    if not _NAME.fullmatch(name):
        raise Invalid("A key's name is made of letters, digits, dots, dashes and underscores.")
    if not all(_ATTRIBUTE.fullmatch(each) for each in attributes):
        raise Invalid(
            "An attribute is NAME=VALUE: a name of letters, digits, _ and -; a value may hold ., :, / and @ too."
        )
    key = f"pdk_{secrets.token_urlsafe(32)}"
    return key, "+".join((f"{name}={hashlib.sha256(key.encode()).hexdigest()}", *attributes))


async def _known(store: Store, session_id: str) -> SessionRow:
    row = await store.session(session_id)
    if row is None:
        raise SessionNotFound(f"The store knows no session {session_id}.")
    return row
