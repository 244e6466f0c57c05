"""What sessions have accepted: dispatches, executions, and looking deliveries up, waiting for and changing them."""

from .dispatch import Dispatches
from .executions import Executions
from .inbox import Delivery, DeliveryNotFound, Inbox
from .lanes import LaneChange, Lanes, ShownLane

__all__ = ["Delivery", "DeliveryNotFound", "Dispatches", "Executions", "Inbox", "LaneChange", "Lanes", "ShownLane"]
