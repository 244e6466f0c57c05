"""The application: composes the routes from given parts."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from perdure.agents.registry import AgentRegistry
from perdure.errors import PerdureError
from perdure.runtime.sessions import Sessions
from perdure.settings import Settings
from perdure.store.base import Store

from .auth import Authenticator, Gate, is_development
from .bodies import BodyReader
from .durable.read import Reader, Timing
from .envelope import enveloped, not_allowed
from .requests import Handler, RequestLimits, Scopes, traced
from .responses import Shield, on_error, on_http_error
from .routes.events import EventRoutes
from .routes.flue import AgentRoutes, RunReader
from .routes.inputs import InputRoutes
from .routes.inspection import AboutRoutes, DeadLetterRoutes, InspectionRoutes
from .routes.runs import RunRoutes
from .routes.sessions import CallbackRoutes, SessionRoutes
from .routes.streams import CORS, MOST_APPENDED, PREFIX, StreamRoutes
from .stream.broadcast import Broadcasts

#: The largest report of another server, in bytes. Of larger results the stream there is read.
MOST_REPORTED = 4_194_304

#: Every agent under its name; the default agent without one.
PREFIXES = ("/eve/v1", "/agents/{agent}/eve/v1")

#: An instance of an agent, under a name that the caller chooses.
AGENT = "/agents/{agent}/{instance}"


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def create_app(
    *,
    sessions: Sessions,
    store: Store,
    agents: AgentRegistry,
    settings: Settings,
    authenticators: Sequence[Authenticator],
    broadcasts: Broadcasts | None = None,
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
    gate = Gate(authenticators)
    scopes = Scopes(agents, sessions)
    bodies, limits = BodyReader(settings.max_body_bytes), RequestLimits.of(settings)
    about = AboutRoutes(gate, scopes, development=development)
    sessions_in = SessionRoutes(gate, scopes, sessions, bodies, limits, settings)
    broadcasts = broadcasts or Broadcasts(store)
    events = EventRoutes(gate, scopes, sessions, store, broadcasts)
    reader = Reader(broadcasts, Timing(long_poll=settings.long_poll_seconds))

    def route(method: str, path: str, handler: Handler, bodies: BodyReader = bodies) -> None:
        app.add_api_route(path, traced(bodies, method, path, handler), methods=[method], response_model=None)

    for prefix in PREFIXES:
        route("GET", f"{prefix}/health", about.health)
        route("GET", f"{prefix}/info", about.info)
        route("POST", f"{prefix}/session", sessions_in.create)
        route("POST", f"{prefix}/session/{{session_id}}", sessions_in.deliver)
        route("POST", f"{prefix}/session/{{session_id}}/cancel", sessions_in.cancel)
        route("POST", f"{prefix}/session/{{session_id}}/compact", sessions_in.compact)
        route("POST", f"{prefix}/session/{{session_id}}/clear", sessions_in.clear)
        route("POST", f"{prefix}/session/{{session_id}}/reset", sessions_in.reset)
        route("GET", f"{prefix}/session/{{session_id}}/stream", events.ndjson)
    # Anybody may send one, so its room is not that of those who are known.
    reports = BodyReader(min(settings.max_body_bytes, MOST_REPORTED))
    callbacks = CallbackRoutes(sessions.callbacks, reports)
    route("POST", "/eve/v1/callback/{token}", callbacks.accept, reports)
    route("POST", "/eve/v1/callback/", callbacks.accept, reports)
    inspection = InspectionRoutes(gate, sessions)
    route("GET", "/v1/sessions", inspection.sessions)
    route("GET", "/v1/sessions/{session_id}", inspection.session)
    route("GET", "/v1/sessions/{session_id}/tree", inspection.tree)
    route("GET", "/v1/sessions/{session_id}/events", events.list)
    route("GET", "/v1/sessions/{session_id}/events/stream", events.sse)
    route("POST", "/v1/sessions/{session_id}/fork", sessions_in.fork)
    dead_letters = DeadLetterRoutes(gate, sessions.dead_letters)
    route("GET", "/v1/dead-letters", dead_letters.list)
    route("POST", "/v1/dead-letters/{session_id}/{turn_id}/requeue", dead_letters.requeue)
    route("DELETE", "/v1/sessions/{session_id}", sessions_in.delete)
    inputs = InputRoutes(gate, sessions.inputs, bodies, limits)
    route("GET", "/v1/inputs", inputs.list)
    route("GET", "/v1/inputs/{request_id}", inputs.show)
    route("POST", "/v1/inputs/{request_id}", inputs.answer)
    named = AgentRoutes(gate, agents, sessions.instances, store, reader, bodies, limits)
    route("POST", AGENT, enveloped(named.prompt))
    route("GET", AGENT, enveloped(named.read))
    route("HEAD", AGENT, enveloped(named.read))
    for method in ("PUT", "PATCH", "DELETE"):
        route(method, AGENT, enveloped(named.refuse))
    if settings.streams == "on":
        appends = BodyReader(min(settings.max_body_bytes, MOST_APPENDED))
        streams = StreamRoutes(gate, store.streams, reader, appends)
        path = f"{PREFIX}{{path:path}}"
        route("PUT", path, enveloped(streams.create, CORS), appends)
        route("POST", path, enveloped(streams.append, CORS), appends)
        route("DELETE", path, enveloped(streams.delete, CORS))
        route("GET", path, enveloped(streams.read, CORS))
        route("HEAD", path, enveloped(streams.read, CORS))
        route("OPTIONS", path, streams.preflight)
    runs = RunRoutes(gate, sessions.runs, bodies, RunReader(store, reader, store.run).read)
    for path, handlers in (
        ("/workflows/{name}", {"POST": runs.start}),
        ("/runs", {"GET": runs.list}),
        ("/runs/{run_id}", {"GET": runs.show, "HEAD": runs.show}),
        ("/runs/{run_id}/cancel", {"POST": runs.cancel}),
    ):
        for method in METHODS:
            route(method, path, enveloped(handlers[method]) if method in handlers else not_allowed(*handlers))
    return app
