"""OpenAI's SDK without the work that grows with the conversation.

Before each call the SDK compares all messages with the types of all possible messages, to rename keys and to encode
files; the messages of these two APIs need neither. That takes a quarter of a millisecond for each turn of the session,
on the event loop that all sessions share. The SDK sends `extra_body` unchanged, so messages and tools go there.
"""

from typing import Any

from openai import AsyncOpenAI, Omit, omit
from openai.resources.chat.completions import AsyncCompletions
from openai.resources.responses import AsyncResponses
from pydantic_ai.models import Model


class LeanCompletions(AsyncCompletions):
    async def create(self, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        send: Any = super().create
        return await send(**_in_extra_body(options, "messages", "tools"), messages=())


class LeanResponses(AsyncResponses):
    async def create(self, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        send: Any = super().create
        return await send(**_in_extra_body(options, "input", "tools"))


def make_lean(model: Model) -> bool:
    """Switch off that work, and all retries, in the SDK's client; False when the model has no such client."""
    client: object = getattr(model, "client", None)
    if not isinstance(client, AsyncOpenAI):
        return False
    # Set on the client: as a setting of each request it would create a new client each time, without these changes.
    client.max_retries = 0
    # Both are cached properties: a value in the instance replaces them.
    vars(client.chat)["completions"] = LeanCompletions(client)
    vars(client)["responses"] = LeanResponses(client)
    return True


def _in_extra_body(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options, with `names` moved into `extra_body`; existing entries there win."""
    rest = {name: value for name, value in options.items() if name not in names}
    moved = {name: options[name] for name in names if not isinstance(options.get(name, omit), Omit)}
    return {**rest, "extra_body": {**moved, **(options.get("extra_body") or {})}}
