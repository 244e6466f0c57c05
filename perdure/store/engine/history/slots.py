"""Writes of slots, kept so that a fork can have the state of an earlier place."""

from perdure.store.engine.database import Transaction, Value

#: The step of what is written before the first step of a turn.
BEFORE_STEPS = -1


async def write_slot(tx: Transaction, session_id: str, turn: int, step: int, slot: dict[str, Value]) -> None:
    """Write the slot, and for later forks what this turn and this step have left in it."""
    await tx.run("write_slot", session_id=session_id, **slot)
    await tx.run("write_slot_version", session_id=session_id, turn=turn, **slot)
    await tx.run("write_slot_step", session_id=session_id, turn=turn, step=step, **slot)
