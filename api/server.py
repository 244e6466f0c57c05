"""The API process: uvicorn with Perdure's limits. Parts are created in order, and closed in reverse order."""

import asyncio
import contextlib
import errno
import functools
import logging
import socket
from collections.abc import Awaitable, Callable, Generator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from perdure.agents.registry import load_agents, load_runs
from perdure.errors import Misconfigured
from perdure.runtime.connect import telemetry_choices
from perdure.runtime.open import open_sessions
from perdure.runtime.reports.health import BacklogGauges
from perdure.runtime.streams.written import StreamSweeper
from perdure.runtime.sweeper import Retention
from perdure.settings import Settings
from perdure.store.lifecycle import Keep
from perdure.store.open import checked_store
from perdure.telemetry import setup

from .app import create_app
from .auth import build_authenticators
from .connections import REST_BYTES, Connection, ConnectionLimits, Connections, most_connections
from .stream.broadcast import Broadcasts
from .stream.stalls import Stalls

#: The kernel's send buffer per connection (it doubles the value). Without it the buffer grows to megabytes.
_SEND_BUFFER = 262_144
#: Seconds for open requests to end; open streams end at once.
GRACE = 3


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: asyncio.Event | None) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """No signal handlers here: the handlers of the process set `stop`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None:
            self._ready.set()


def listen(host: str, port: int) -> socket.socket:
    """Bind the address, with a clear error when it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Misconfigured(f"Port {port} on {host} is taken by another process; set PERDURE_PORT.") from error
        raise Misconfigured(f"Cannot listen on {host} port {port}: {error.strerror or error}.") from error
    # Connections inherit it. Without it a small response waits 40 ms for the acknowledgement of its headers.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    return sock


async def run(
    app: ASGIApp,
    sock: socket.socket,
    stop: asyncio.Event,
    *,
    ready: asyncio.Event | None = None,
    on_stop: Callable[[], Awaitable[None]] | None = None,
    limits: ConnectionLimits | None = None,
) -> None:
    """Serve until `stop`, then end streams and requests within a few seconds."""
    connections = Connections(limits or ConnectionLimits(most_connections()))
    config = uvicorn.Config(
        app,
        # uvicorn calls it for each accepted connection, and it returns a protocol.
        http=cast("Any", functools.partial(Connection, connections)),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        # Development access depends on the peer's address, so headers must not replace it.
        proxy_headers=False,
        timeout_keep_alive=65,
        timeout_graceful_shutdown=GRACE,
    )
    server = _Server(config, ready)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        if on_stop is not None:
            await on_stop()
        await serving


log = logging.getLogger("perdure.api")


async def serve(settings: Settings, stop: asyncio.Event, ready: asyncio.Event | None = None) -> None:
    """Serve until `stop` is set; `ready` is set when requests are accepted."""
    async with contextlib.AsyncExitStack() as stack:
        # First, before anything is opened: a process that cannot serve must not create files or connections.
        authenticators = build_authenticators(settings)
        keep, policy = Keep(*settings.keep_seconds), settings.stream_policy
        sock = stack.enter_context(listen(settings.host, settings.port))
        agents = load_agents(settings.agents, settings.model, settings.turns)
        runs = load_runs(settings.runs, settings.agents)
        store = await stack.enter_async_context(checked_store(settings.database))
        telemetry = setup.set_up(
            "perdure-api",
            telemetry_choices(settings),
            scraped=settings.metrics == "on",
            listen=settings.metrics_listener,
        )
        stack.callback(telemetry.close)
        sessions = await open_sessions(settings, store, agents=agents, runs=runs, plugins=telemetry.plugins)
        await stack.enter_async_context(sessions.sweeper.running())
        await stack.enter_async_context(sessions.reconciler.running())
        await stack.enter_async_context(sessions.deletions.running())
        await stack.enter_async_context(sessions.callbacks.running())
        attempts = settings.keep_attempts_days * 86_400
        await stack.enter_async_context(Retention(store, keep, attempts).running())
        if telemetry.measures:
            await stack.enter_async_context(BacklogGauges(store).running())
        if settings.streams == "on":
            await stack.enter_async_context(StreamSweeper(store.streams).running())
        stalls = Stalls(store, sessions.liveness.last_sign, settings.heartbeat_timeout)
        broadcasts = Broadcasts(store, stalls=stalls, policy=policy)
        limits = ConnectionLimits(
            most_connections(settings.max_connections), rest_bytes=settings.max_body_bytes + REST_BYTES
        )
        app = create_app(
            sessions=sessions,
            store=store,
            agents=agents,
            settings=settings,
            authenticators=authenticators,
            broadcasts=broadcasts,
            scrape=telemetry.scrape if settings.metrics == "on" else None,
        )
        host, port = sock.getsockname()[:2]
        log.info("Serving %s on http://%s:%s", ", ".join(agents.names), host, port)
        await run(app, sock, stop, ready=ready, on_stop=broadcasts.close, limits=limits)
