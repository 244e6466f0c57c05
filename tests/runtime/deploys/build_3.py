"""The agents of a build whose states have another version, which older builds cannot read."""

from perdure.protocol.wire import JsonObject
from perdure.session import state
from perdure.session.state import Chain
from tests.runtime.deploys import build_1

agents = build_1.agents


def lifted(data: JsonObject) -> JsonObject:
    return {**data, "lifted": True}


state.SESSION = Chain("session state", [lifted])
state.SNAPSHOT = Chain("turn snapshot", [lifted])
state.SessionState.model_fields["version"].default = 2
state.SessionState.model_rebuild(force=True)
