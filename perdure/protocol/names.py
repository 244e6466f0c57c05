"""Names that several processes must write in the same way."""

import hashlib
import re
from typing import Literal, cast

from .wire import JsonObject

#: With these begin the ids of runs, and of the sessions that callers and tools start; no others do.
RUN_ID = "run_"
SESSION_ID = "ses_"

SESSION_WORKFLOW = "Session"
RUN_WORKFLOW = "Run"
TURN_WORKFLOW = "Turn"

CALL_MODEL = "call_model"
CALL_TOOL = "call_tool"
RESUME_TURN = "resume_turn"
PARK_TURN = "park_turn"
RUN_PROGRAM = "run_program"
PARK_PROGRAMS = "park_programs"
#: The activities that only turns execute: in a workflow of their own, or inline in their driver.
STEPS = frozenset({CALL_MODEL, CALL_TOOL, RESUME_TURN, PARK_TURN, RUN_PROGRAM, PARK_PROGRAMS})
WITHDRAW_INPUTS = "withdraw_inputs"
REMIND = "remind"
CONCLUDE_TURN = "conclude_turn"
REFUSE_DELIVERY = "refuse_delivery"
ATTEND_SESSION = "attend_session"
CLOSE_SESSION = "close_session"
REBUILD_SESSION = "rebuild_session"
DISPATCH_CHILDREN = "dispatch_children"
STOP_CHILDREN = "stop_children"
COLLECT_CHILDREN = "collect_children"
SHOW_INPUTS = "show_inputs"
LOOK_AT_CHILDREN = "look_at_children"
CALL_BACK = "call_back"
RUN_BODY = "run_body"

DELIVER = "deliver"
CANCEL = "cancel"
REPAIR = "repair"
DESCRIBE = "describe"

#: The slots of slices. No author's state can have such a name.
SLICE_PREFIX = "perdure.slice/"
_SLICE = re.compile(r"perdure\.slice/[A-Za-z0-9_.-]{1,64}")
#: The slot of the plan of a session.
PLAN_SLOT = "perdure.plan"
#: The slot of the request of `Sessions.execute`.
REQUEST_SLOT = "perdure.request"

_POOL = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
#: Instead of the names of pools: all that the agents declare.
ALL_POOLS = "all"
POOL_NAMES = f"small letters, digits and '-', at most 63, and not {ALL_POOLS!r}"

SESSIONS_QUEUE = "sessions"
TURNS_QUEUE = "turns"
MODELS_QUEUE = "models"
TOOLS_QUEUE = "tools"
#: Of the workflows of runs, and of their functions.
RUNS_QUEUE = "runs"
BODIES_QUEUE = "bodies"


def is_slice(slot: str) -> bool:
    """Whether a slot is that of a slice."""
    return _SLICE.fullmatch(slot) is not None


def is_log(stored: JsonObject | None) -> bool:
    """Whether the stored value is that of a slice that failures and rollbacks leave as it is."""
    described = (stored or {}).get("slice")
    return isinstance(described, dict) and cast("JsonObject", described).get("policy") == "log"


def queue(prefix: str, kind: str) -> str:
    """The task queue of one kind of work: `perdure-turns`."""
    return f"{prefix}-{kind}"


def is_pool(name: object) -> bool:
    """Whether a pool of workers may have this name; it is part of the name of a task queue."""
    return isinstance(name, str) and name != ALL_POOLS and _POOL.fullmatch(name) is not None


def tools_queue(pool: str | None) -> str:
    """The kind of the queue of tool calls: of a pool, or of tools without one."""
    return f"{TOOLS_QUEUE}-{pool}" if pool else TOOLS_QUEUE


def sibling(task_queue: str, kind: str) -> str:
    """The queue of another kind with the same prefix: a workflow needs no configuration to find it."""
    return queue(task_queue.rpartition("-")[0], kind)


def turn_workflow(session_id: str, turn: int) -> str:
    return f"{session_id}/turn/{turn}"


def session_of(workflow_id: str) -> str:
    """The session of a driver or of a turn workflow."""
    return workflow_id.partition("/turn/")[0]


def turn_id(turn: int) -> str:
    return f"turn_{turn}"


# Keys of a step's records.
CUT = "cut"
REPLY = "reply"
MARK = "mark"
# Of compactions; in one step they sort in the order in which they are written.
BETWEEN_TURNS = "compaction/0"
BEFORE_STEP = "compaction/1"
AFTER_REFUSAL = "compaction/2"


def delivery_key(index: int) -> str:
    return f"delivery/{index}"


def usage_key(what: str) -> str:
    return f"usage/{what}"


def intent_key(call_id: str) -> str:
    return f"intent/{call_id}"


def outcome_key(call_id: str) -> str:
    return f"call/{call_id}"


def stage_key(call_id: str, number: int) -> str:
    """The key of the record of the calls with which a program waits for the n-th time."""
    return f"code/{call_id}/{number}"


def call_of_program(call_id: str, number: int) -> str:
    """The id of the n-th call, counted from 1, that a program makes."""
    return f"{call_id}:tool-{number}"


def action_of_child(name: str, call_id: str) -> str:
    """The key of an action that is the work of another session."""
    return f"subagent-call:{name}:{call_id}"


#: What Temporal's UI can search drivers by: the agent, the session at the top of the family, and the one that has
#: started this one or that this lane belongs to. All are keywords.
SEARCH_ATTRIBUTES = ("PerdureAgent", "PerdureRoot", "PerdureParent")

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def child_session(session_id: str, turn: int, step: int, call_id: str) -> str:
    """The id of the session that does this call: the same for every attempt to start it."""
    place = f"{session_id}/{turn}/{step}/{call_id}"
    digest = hashlib.sha256(b"perdure/child/" + place.encode()).digest()
    return SESSION_ID + as_ulid(digest)


def as_ulid(digest: bytes) -> str:
    """The first half of a digest in the alphabet of ids."""
    number = int.from_bytes(digest[:16], "big")
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def delivery_of_child(session_id: str) -> str:
    """The id of a child's task, and of the delivery that tells its parent that it has ended."""
    return f"dlv_{session_id.removeprefix('ses_')}"


def delivery_of_input(request_id: str, what: Literal["opened", "closed"]) -> str:
    """The id of the delivery that tells a root that a descendant waits for people, or does so no more."""
    return f"dlv_{request_id.removeprefix('inp_')}_{what}"


def delivery_of_call(session_id: str, action: str) -> str:
    """The id of the delivery that brings the result of a call that another server does: the same, however it comes."""
    digest = hashlib.sha256(b"perdure/remote/" + f"{session_id}/{action}".encode()).digest()
    return "dlv_" + as_ulid(digest)


def delivery_of_lane(session_id: str) -> str:
    """The id of the delivery that ends a lane with its session."""
    return f"dlv_{session_id.removeprefix('ses_')}_end"


def token_of_lane(session_id: str, lane: str) -> str:
    """What stands for the hash of the token of a lane, which has none: who may deliver to its session may use it."""
    return f"lane/{session_id}/{lane}"


# Scopes of the fence: each has one newest attempt.
MODEL_SCOPE = "model"
#: Of the whole function of a run: one attempt at a time writes for it.
BODY_SCOPE = "body"


def attempt_id(session_id: str, turn: int, step: int, scope: str, generation: int) -> str:
    """The id of an attempt: the same, however often its first commit is repeated. Ids of later ones are greater."""
    digest = hashlib.sha256(b"perdure/attempt/" + f"{session_id}/{turn}/{step}/{generation}/{scope}".encode()).digest()
    # A generation is a time in microseconds.
    began = (generation // 1_000 % 2**48).to_bytes(6, "big")
    return "att_" + as_ulid(began + digest)


def checkpoint_id(session_id: str, turn: int, step: int, key: str, millis: int) -> str:
    """The id of a checkpoint that the commit under this key takes: the same, however often it is repeated."""
    digest = hashlib.sha256(b"perdure/checkpoint/" + f"{session_id}/{turn}/{step}/{key}".encode()).digest()
    return "chk_" + as_ulid((millis % 2**48).to_bytes(6, "big") + digest)


def call_scope(call_id: str) -> str:
    return f"call/{call_id}"


# Keys of events: appending a key again is a no-op.
def session_key(what: str) -> str:
    return f"session/{what}"


def turn_key(turn: int, what: str) -> str:
    return f"t{turn}/{what}"


def step_key(turn: int, step: int, what: str) -> str:
    return f"t{turn}/s{step}/{what}"


#: Workflow task timeouts: how long a session waits for a worker that died during a workflow task. A task takes
#: milliseconds, unless the worker must replay the history first. A driver's history is long, and a worker that has just
#: started replays many.
DRIVER_DECISION_SECONDS = 5
TURN_DECISION_SECONDS = 2
