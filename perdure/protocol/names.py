"""Every name that more than one process must spell alike."""

SESSION_WORKFLOW = "Session"
TURN_WORKFLOW = "Turn"

CALL_MODEL = "call_model"
CALL_TOOL = "call_tool"
RESUME_TURN = "resume_turn"
PARK_TURN = "park_turn"
WITHDRAW_INPUTS = "withdraw_inputs"
REMIND = "remind"
CONCLUDE_TURN = "conclude_turn"
REFUSE_DELIVERY = "refuse_delivery"
ATTEND_SESSION = "attend_session"
CLOSE_SESSION = "close_session"
REBUILD_SESSION = "rebuild_session"

DELIVER = "deliver"
CANCEL = "cancel"
REPAIR = "repair"
DESCRIBE = "describe"

SESSIONS_QUEUE = "sessions"
TURNS_QUEUE = "turns"
MODELS_QUEUE = "models"
TOOLS_QUEUE = "tools"


def queue(prefix: str, kind: str) -> str:
    """The task queue of one kind of work: `perdure-turns`."""
    return f"{prefix}-{kind}"


def sibling(task_queue: str, kind: str) -> str:
    """The queue of another kind beside this one, so that a workflow needs no configuration to find it."""
    return queue(task_queue.rpartition("-")[0], kind)


def turn_workflow(session_id: str, turn: int) -> str:
    return f"{session_id}/turn/{turn}"


def turn_id(turn: int) -> str:
    return f"turn_{turn}"


# Slots of a step's records.
REPLY = "reply"
MARK = "mark"


def delivery_slot(index: int) -> str:
    return f"delivery/{index}"


def intent_slot(call_id: str) -> str:
    return f"intent/{call_id}"


def outcome_slot(call_id: str) -> str:
    return f"call/{call_id}"


# Scopes: what one attempt may write to.
MODEL_SCOPE = "model"


def call_scope(call_id: str) -> str:
    return f"call/{call_id}"


# Keys of events: appending a key again is a no-op.
def session_key(what: str) -> str:
    return f"session/{what}"


def turn_key(turn: int, what: str) -> str:
    return f"t{turn}/{what}"


def step_key(turn: int, step: int, what: str) -> str:
    return f"t{turn}/s{step}/{what}"


#: How long a worker may take over one decision before another one is asked: what a session waits for a worker that died
#: while it decided. A decision takes milliseconds, unless the history must be replayed for it. A driver's is long, and
#: a worker that has just started replays many.
DRIVER_DECISION_SECONDS = 5
TURN_DECISION_SECONDS = 2
