"""Runs from outside: start one, wait for it, cancel it, look at it."""

from .runs import Runs, RunStarted

__all__ = ["RunStarted", "Runs"]
