"""How far a session has come: its plan, its state, its checkpoints; and what its owner sets: tags, an earlier state."""

from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.bodies import BodyReader, Fields, read_tags
from api.controls import checkpoint_id
from api.requests import known_id, limit
from api.responses import reply
from api.routes.inspection import summary, waits_of
from perdure.bounds import quoted
from perdure.errors import CheckpointNotFound, Invalid
from perdure.protocol.stream_policy import StreamPolicy
from perdure.protocol.wire import JsonObject
from perdure.runtime.deliveries import checked_tags
from perdure.runtime.progress import shown
from perdure.runtime.sessions import Sessions
from perdure.store.values import SessionRow


class CheckpointRoutes:
    def __init__(self, gate: Gate, sessions: Sessions, bodies: BodyReader, policy: StreamPolicy) -> None:
        """`policy`: what readers of events do not see."""
        self._gate = gate
        self._sessions = sessions
        self._bodies = bodies
        self._policy = policy

    async def change(self, request: Request) -> Response:
        """Set tags of a session."""
        principal = await self._gate.admit(request)
        session_id = known_id(request.path_params["session_id"])
        # Whose session it is comes before what is asked of it.
        await self._sessions.get(session_id, principal)
        tags = await self._bodies.read(request, parse_change)
        return await self._shown(await self._sessions.tag(session_id, tags, principal=principal))

    async def plan(self, request: Request) -> Response:
        """The plan that the model has made."""
        principal = await self._gate.admit(request)
        plan = await self._sessions.plan(known_id(request.path_params["session_id"]), principal=principal)
        return reply({"plan": self._policy.plan(plan)})

    async def snapshot(self, request: Request) -> Response:
        """The state of a session now."""
        principal = await self._gate.admit(request)
        snapshot = await self._sessions.snapshot(known_id(request.path_params["session_id"]), principal=principal)
        return reply(self._policy.snapshot(snapshot))

    async def checkpoints(self, request: Request) -> Response:
        """One page of the checkpoints of a session, newest first."""
        principal = await self._gate.admit(request)
        params = request.query_params
        session_id, most = known_id(request.path_params["session_id"]), limit(params.get("limit"))
        page = await self._sessions.checkpoints(
            session_id, limit=most, cursor=params.get("cursor"), principal=principal
        )
        listed: JsonObject = {"checkpoints": [shown(each) for each in page.checkpoints]}
        if page.next_cursor is not None:
            listed["nextCursor"] = page.next_cursor
        return reply(listed)

    async def checkpoint(self, request: Request) -> Response:
        """One checkpoint with its snapshot."""
        principal = await self._gate.admit(request)
        session_id = known_id(request.path_params["session_id"])
        # Whose session it is comes first here, too.
        await self._sessions.get(session_id, principal)
        named = known_id(request.path_params["checkpoint_id"], CheckpointNotFound)
        found = await self._sessions.checkpoint(session_id, named, principal=principal)
        return reply({**shown(found), "snapshot": self._policy.snapshot(found.snapshot or {})})

    async def roll_back(self, request: Request) -> Response:
        """Set the state of a session back to a checkpoint."""
        principal = await self._gate.admit(request)
        session_id = known_id(request.path_params["session_id"])
        await self._sessions.get(session_id, principal)
        named, include_logs = await self._bodies.read(request, parse_rollback)
        row = await self._sessions.roll_back(session_id, named, include_logs=include_logs, principal=principal)
        return await self._shown(row)

    async def _shown(self, row: SessionRow) -> Response:
        return reply(summary(row, (await waits_of(self._sessions, row))[row.session_id]))


def parse_change(fields: Fields) -> dict[str, str | None]:
    """What is set for a session: its tags."""
    _check_known(fields, "tags")
    if fields.get("tags") is None:
        raise Invalid("Expected 'tags' to be an object of texts; null takes a tag away.")
    return checked_tags(read_tags(fields["tags"]))


def parse_rollback(fields: Fields) -> tuple[str, bool]:
    """The id of the checkpoint, and whether slices that keep a log are taken back, too."""
    _check_known(fields, "checkpointId", "includeLogs")
    include_logs = fields.get("includeLogs", False)
    if not isinstance(include_logs, bool):
        raise Invalid("Expected 'includeLogs' to be a boolean.")
    return checkpoint_id(fields.get("checkpointId"), "checkpointId"), include_logs


def _check_known(fields: Fields, *known: str) -> None:
    # A misspelled field must not be ignored: what is restored cannot be taken back.
    if unknown := fields.keys() - set(known):
        named = " and ".join(f"'{each}'" for each in known)
        raise Invalid(f"Expected no other fields than {named}, not {quoted(min(unknown))!r}.")
