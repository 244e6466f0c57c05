"""The application: composes the routes from given parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from perdure.agents.registry import AgentRegistry, pools_of
from perdure.errors import PerdureError
from perdure.runtime.sessions import Sessions
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.streams import Room

from .auth import Authenticator, Gate, Operators, is_development
from .bodies import BodyReader
from .console.pages import FILES, ROOT, ConsoleRoutes
from .durable.read import Reader, Timing
from .envelope import enveloped, not_allowed, not_found
from .requests import Handler, RequestLimits, Scopes, traced
from .responses import Shield, on_error, on_http_error
from .routes.checkpoints import CheckpointRoutes
from .routes.deliveries import DeliveryRoutes
from .routes.events import EventRoutes
from .routes.flue import AgentRoutes, RunReader
from .routes.inputs import InputRoutes
from .routes.inspection import AboutRoutes, AttemptRoutes, DeadLetterRoutes, InspectionRoutes
from .routes.overview import MetricsRoutes, OverviewRoutes
from .routes.runs import RunRoutes
from .routes.sessions import CallbackRoutes, SessionRoutes
from .routes.streams import HEADERS, MOST_APPENDED, PREFIX, StreamRoutes
from .routes.transcripts import TranscriptRoutes
from .stream.broadcast import Broadcasts

if TYPE_CHECKING:
    from perdure.telemetry.scrape import Scrape

#: The largest report of another server, in bytes. Of larger results the stream there is read.
MOST_REPORTED = 4_194_304

#: Every agent under its name; the default agent without one.
PREFIXES = ("/eve/v1", "/agents/{agent}/eve/v1")

#: The methods of a path that answers each of them, with its own refusal of those that it does not have.
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def create_app(
    *,
    sessions: Sessions,
    store: Store,
    agents: AgentRegistry,
    settings: Settings,
    authenticators: Sequence[Authenticator],
    broadcasts: Broadcasts | None = None,
    scrape: "Scrape | None" = None,
) -> FastAPI:
    """The HTTP API over these parts. The owner of `broadcasts` can end all open streams."""
    development = is_development(settings)
    app = FastAPI(
        title="Perdure",
        # perdure/telemetry/spans.py traces requests. FastAPI's telemetry would report each request a second time, and
        # log the messages of exceptions.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        # The description has no secrets, but only developers need it.
        openapi_url="/openapi.json" if development else None,
        redirect_slashes=False,
        middleware=[Middleware(Shield)],
        exception_handlers={PerdureError: on_error, HTTPException: on_http_error},
    )
    app.state.public_url = settings.public_url
    gate, scopes = Gate(authenticators), Scopes(agents, sessions)
    broadcasts = broadcasts or Broadcasts(store, policy=settings.stream_policy)
    parts = _Parts(
        gate=gate,
        scopes=scopes,
        sessions=sessions,
        store=store,
        agents=agents,
        settings=settings,
        bodies=BodyReader(settings.max_body_bytes),
        limits=RequestLimits.of(settings),
        events=EventRoutes(gate, scopes, sessions, store, broadcasts),
        transcripts=TranscriptRoutes(gate, sessions, store, broadcasts),
        reader=Reader(broadcasts, Timing(long_poll=settings.long_poll_seconds)),
    )
    table = _Table(app, parts.bodies)
    _add_sessions(table, parts, AboutRoutes(gate, scopes, development=development))
    _add_callbacks(table, parts)
    _add_inspection(table, parts)
    _add_agents_and_runs(table, parts)
    if settings.streams == "on":
        _add_streams(table, parts)
    if settings.console == "on":
        console = ConsoleRoutes()
        table.add("GET", ROOT, console.page)
        table.add("GET", FILES, console.file)
    if scrape is not None:
        table.add("GET", "/metrics", MetricsRoutes(gate, Operators(settings.operators), scrape).show)
    return app


@dataclass(frozen=True)
class _Parts:
    gate: Gate
    scopes: Scopes
    sessions: Sessions
    store: Store
    agents: AgentRegistry
    settings: Settings
    bodies: BodyReader
    limits: RequestLimits
    events: EventRoutes
    transcripts: TranscriptRoutes
    reader: Reader

    def smaller(self, most: int) -> BodyReader:
        """A reader with room of its own, for bodies of at most so many bytes."""
        return BodyReader(min(self.settings.max_body_bytes, most))


class _Table:
    """The routes of the application."""

    def __init__(self, app: FastAPI, bodies: BodyReader) -> None:
        self._app = app
        self._bodies = bodies

    def add(self, method: str, path: str, handler: Handler, bodies: BodyReader | None = None) -> None:
        handler = traced(bodies or self._bodies, method, path, handler)
        self._app.add_api_route(path, handler, methods=[method], response_model=None)

    def add_enveloped(self, path: str, handlers: Mapping[str, Handler]) -> None:
        """The handlers by method, with errors as clients of Flue expect them, of all other methods, too."""
        for method in METHODS:
            handler = handlers.get(method)
            self.add(method, path, not_allowed(*handlers) if handler is None else enveloped(handler))

    def add_nothing(self, *paths: str) -> None:
        """Paths that do not exist, with the error that clients of Flue expect."""
        for path in paths:
            for method in METHODS:
                self.add(method, path, not_found)


def _add_sessions(table: _Table, parts: _Parts, about: AboutRoutes) -> None:
    routes = SessionRoutes(parts.gate, parts.scopes, parts.sessions, parts.bodies, parts.limits, parts.settings)
    for prefix in PREFIXES:
        table.add("GET", f"{prefix}/health", about.health)
        table.add("GET", f"{prefix}/info", about.info)
        table.add("POST", f"{prefix}/session", routes.create)
        table.add("POST", f"{prefix}/session/{{session_id}}", routes.deliver)
        table.add("POST", f"{prefix}/session/{{session_id}}/cancel", routes.cancel)
        table.add("POST", f"{prefix}/session/{{session_id}}/compact", routes.compact)
        table.add("POST", f"{prefix}/session/{{session_id}}/clear", routes.clear)
        table.add("POST", f"{prefix}/session/{{session_id}}/reset", routes.reset)
        table.add("GET", f"{prefix}/session/{{session_id}}/stream", parts.events.ndjson)
    table.add("POST", "/v1/sessions/{session_id}/fork", routes.fork)
    table.add("DELETE", "/v1/sessions/{session_id}", routes.delete)


def _add_callbacks(table: _Table, parts: _Parts) -> None:
    # Anybody may send one, so its room is not that of those who are known.
    bodies = parts.smaller(MOST_REPORTED)
    routes = CallbackRoutes(parts.sessions.callbacks, bodies)
    table.add("POST", "/eve/v1/callback/{token}", routes.accept, bodies)
    table.add("POST", "/eve/v1/callback/", routes.accept, bodies)


def _add_inspection(table: _Table, parts: _Parts) -> None:
    sessions = InspectionRoutes(parts.gate, parts.sessions)
    table.add("GET", "/v1/sessions", sessions.sessions)
    table.add("GET", "/v1/sessions/{session_id}", sessions.session)
    table.add("GET", "/v1/sessions/{session_id}/why", sessions.why)
    table.add("GET", "/v1/sessions/{session_id}/tree", sessions.tree)
    checkpoints = CheckpointRoutes(parts.gate, parts.sessions, parts.bodies, parts.events.policy)
    table.add("PATCH", "/v1/sessions/{session_id}", checkpoints.change)
    table.add("GET", "/v1/sessions/{session_id}/plan", checkpoints.plan)
    table.add("GET", "/v1/sessions/{session_id}/snapshot", checkpoints.snapshot)
    table.add("GET", "/v1/sessions/{session_id}/checkpoints", checkpoints.checkpoints)
    table.add("GET", "/v1/sessions/{session_id}/checkpoints/{checkpoint_id}", checkpoints.checkpoint)
    table.add("POST", "/v1/sessions/{session_id}/rollback", checkpoints.roll_back)
    table.add("GET", "/v1/sessions/{session_id}/events", parts.events.list)
    table.add("GET", "/v1/sessions/{session_id}/events/stream", parts.events.sse)
    table.add("GET", "/v1/sessions/{session_id}/transcript", parts.transcripts.show)
    deliveries = DeliveryRoutes(parts.gate, parts.sessions, parts.bodies, parts.limits, parts.settings.max_inbox)
    table.add("GET", "/v1/sessions/{session_id}/deliveries", deliveries.list)
    table.add("GET", "/v1/sessions/{session_id}/lanes", deliveries.lanes)
    table.add("PUT", "/v1/sessions/{session_id}/lanes/{lane}", deliveries.configure_lane)
    table.add("POST", "/v1/dispatches", deliveries.dispatch)
    operators = Operators(parts.settings.operators)
    overview = OverviewRoutes(
        parts.gate,
        operators,
        parts.agents,
        parts.sessions.health(pools_of(parts.agents)),
        parts.settings,
    )
    table.add("GET", "/v1/agents", overview.agents)
    table.add("GET", "/v1/health", overview.health)
    attempts = AttemptRoutes(parts.gate, operators, parts.sessions, parts.store, parts.events.policy)
    table.add("GET", "/v1/sessions/{session_id}/attempts", attempts.list)
    table.add("GET", "/v1/runs/{run_id}/attempts", attempts.of_run)
    table.add("GET", "/v1/sessions/{session_id}/timeline", attempts.timeline)
    table.add("GET", "/v1/sessions/{session_id}/journal", attempts.journal)
    table.add("GET", "/v1/diagnostics/leases", attempts.leases)
    table.add("GET", "/v1/deliveries/{delivery_id}", deliveries.show)
    table.add("PATCH", "/v1/deliveries/{delivery_id}", deliveries.edit)
    table.add("DELETE", "/v1/deliveries/{delivery_id}", deliveries.withdraw)
    letters = DeadLetterRoutes(parts.gate, parts.sessions.dead_letters)
    table.add("GET", "/v1/dead-letters", letters.list)
    table.add("POST", "/v1/dead-letters/{session_id}/{turn_id}/requeue", letters.requeue)
    inputs = InputRoutes(parts.gate, parts.sessions.inputs, parts.bodies, parts.limits)
    table.add("GET", "/v1/inputs", inputs.list)
    table.add("GET", "/v1/inputs/{request_id}", inputs.show)
    table.add("POST", "/v1/inputs/{request_id}", inputs.answer)


def _add_agents_and_runs(table: _Table, parts: _Parts) -> None:
    prefix, instances, store = parts.settings.flue_prefix, parts.sessions.instances, parts.store
    named = AgentRoutes(parts.gate, parts.agents, instances, store, parts.reader, parts.bodies, parts.limits)
    # An instance of an agent has a name that the caller chooses.
    table.add_enveloped(
        f"{prefix}/agents/{{agent}}/{{instance}}", {"GET": named.read, "HEAD": named.read, "POST": named.prompt}
    )
    events = RunReader(store, parts.reader, store.run)
    runs = RunRoutes(parts.gate, parts.sessions.runs, parts.bodies, events.read)
    table.add_enveloped(f"{prefix}/workflows/{{name}}", {"POST": runs.start})
    table.add_enveloped(f"{prefix}/runs", {"GET": runs.list})
    table.add_enveloped(f"{prefix}/runs/{{run_id}}", {"GET": runs.show, "HEAD": runs.show})
    table.add_enveloped(f"{prefix}/runs/{{run_id}}/cancel", {"POST": runs.cancel})
    # What is deeper under an agent may be one of the routes of eve.
    table.add_nothing(f"{prefix}/agents", f"{prefix}/agents/{{agent}}")
    table.add_nothing(*(f"{prefix}{path}" for path in ("/workflows", "/workflows/{rest:path}", "/runs/{rest:path}")))


def _add_streams(table: _Table, parts: _Parts) -> None:
    bodies = parts.smaller(MOST_APPENDED)
    room = Room(parts.settings.max_streams, parts.settings.max_stream_bytes)
    routes = StreamRoutes(parts.gate, parts.store.streams, parts.reader, bodies, room)
    path = f"{PREFIX}{{path:path}}"
    table.add("PUT", path, enveloped(routes.create, HEADERS), bodies)
    table.add("POST", path, enveloped(routes.append, HEADERS), bodies)
    table.add("DELETE", path, enveloped(routes.delete, HEADERS))
    table.add("GET", path, enveloped(routes.read, HEADERS))
    table.add("HEAD", path, enveloped(routes.read, HEADERS))
    table.add("OPTIONS", path, routes.preflight)
    table.add("PATCH", path, not_allowed(*routes.METHODS, headers=HEADERS))
