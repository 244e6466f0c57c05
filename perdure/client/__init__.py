"""The Python client: sessions over HTTP, without anything else of Perdure.

It needs httpx2 and the standard library, and knows nothing of agents, stores and Temporal: what it knows is the wire
(`docs/http.md`). Read `client.py` (the routes), `session.py` (a session and its turns), `events.py` (what a turn said),
`stream.py` and `transport.py` (connections that end, and requests that are tried again). `sync.py` is the same for
programs without an event loop.
"""

from .client import AsyncClient, EventPage
from .errors import ClientError
from .events import Draft, Event, Result
from .session import AsyncSession, AsyncTurn
from .sync import Client, Session, Turn

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "AsyncTurn",
    "Client",
    "ClientError",
    "Draft",
    "Event",
    "EventPage",
    "Result",
    "Session",
    "Turn",
]
