"""What the floor's client and its worker spell alike."""

SESSION = "FloorSession"
TURN = "FloorTurn"
ACT = "floor_act"
DELIVER = "deliver"

#: Prefix of the floor's task queues.
PREFIX = "floor"
