"""Agents with limits of time."""

from perdure import Agent, Limits

hasty = Agent("hasty", model="anthropic:claude-scripted", limits=Limits(turn_seconds=3))
