"""What sessions have accepted: looking a delivery up, waiting for its end, changing it while it waits."""

from .dispatch import Dispatches
from .inbox import Delivery, DeliveryNotFound, Inbox
from .lanes import LaneChange, Lanes, ShownLane

__all__ = ["Delivery", "DeliveryNotFound", "Dispatches", "Inbox", "LaneChange", "Lanes", "ShownLane"]
