"""What sessions have accepted: looking a delivery up, waiting for its end, changing it while it waits."""

from .inbox import Delivery, DeliveryNotFound, Inbox

__all__ = ["Delivery", "DeliveryNotFound", "Inbox"]
