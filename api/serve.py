"""The process that serves HTTP: builds the parts and takes them down again."""

import asyncio
import contextlib
import logging

from perdure.agents.registry import load_agents
from perdure.runtime.connect import connect, secret
from perdure.runtime.sessions import Sessions
from perdure.settings import Settings
from perdure.store.open import open_store
from perdure.telemetry import setup

from .app import create_app
from .auth.build import build_authenticators
from .connections import Terms, most_connections
from .feed import Feeds
from .server import listen, run

log = logging.getLogger("perdure.api")


async def serve(settings: Settings, stop: asyncio.Event, ready: asyncio.Event | None = None) -> None:
    """Serve until `stop` is set; `ready` is set when requests are answered."""
    async with contextlib.AsyncExitStack() as stack:
        # Before anything is opened: a process that may not or cannot serve leaves no trace.
        authenticators = build_authenticators(settings)
        sock = stack.enter_context(listen(settings.host, settings.port))
        agents = load_agents(settings.agents, settings.model)
        store = await open_store(settings.database, create=False)
        stack.push_async_callback(store.close)
        await store.check()
        tracing = setup.set_up("perdure-api")
        stack.callback(tracing.close)
        sessions = Sessions(
            store,
            await connect(settings, plugins=tracing.plugins, lazy=True),
            secret=secret(settings),
            task_queue=settings.task_queue,
            ui_url=settings.temporal_ui_url,
            ui_detail=settings.ui_detail == "on",
            agents=agents,
            inbox_limit=settings.max_inbox,
        )
        await stack.enter_async_context(sessions.sweeper.running())
        await stack.enter_async_context(sessions.reconciler.running())
        feeds = Feeds(store)
        terms = Terms(most_connections(settings.max_connections))
        app = create_app(
            sessions=sessions,
            store=store,
            agents=agents,
            settings=settings,
            authenticators=authenticators,
            feeds=feeds,
        )
        host, port = sock.getsockname()[:2]
        log.info("Serving %s on http://%s:%s", ", ".join(agents.names), host, port)
        await run(app, sock, stop, ready=ready, on_stop=feeds.close, terms=terms)
