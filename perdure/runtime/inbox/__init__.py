"""What sessions have accepted: looking a delivery up, waiting for its end, changing it while it waits."""

from .dispatch import Dispatches
from .inbox import Delivery, DeliveryNotFound, Inbox
from .lanes import Lanes

__all__ = ["Delivery", "DeliveryNotFound", "Dispatches", "Inbox", "Lanes"]
