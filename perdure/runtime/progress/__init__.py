"""How far a session has come, seen from outside: its plan, its state, its checkpoints, and the way back to one."""

from .checkpoints import CheckpointPage, Checkpoints, shown

__all__ = ["CheckpointPage", "Checkpoints", "shown"]
