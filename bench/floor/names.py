"""What the floor's client and its worker spell alike."""

SESSION = "FloorSession"
TURN = "FloorTurn"
ACT = "floor_act"
DELIVER = "deliver"

#: One queue for all: an activity can then be handed over with the decision that asks for it.
QUEUE = "floor"
