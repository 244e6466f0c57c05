"""Agents of sessions with very many turns."""

from perdure import Agent

child = Agent(name="child", model="openai-chat:scripted", instructions="Be brief.", turns="child")
inline = Agent(name="inline", model="openai-chat:scripted", instructions="Be brief.", turns="inline")
