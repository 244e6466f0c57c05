"""OpenAI's SDK without the work that grows with the conversation.

Before each call the SDK walks all messages against the types of all messages there are, to rename keys and to encode
files; the messages of these two APIs have neither. It takes a quarter of a millisecond for each turn of the session,
on the event loop that all sessions share. What is given as `extra_body` it sends as it is.
"""

from typing import Any

from openai import AsyncOpenAI, Omit, omit
from openai.resources.chat.completions import AsyncCompletions
from openai.resources.responses import AsyncResponses
from pydantic_ai.models import Model


class LeanCompletions(AsyncCompletions):
    async def create(self, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        send: Any = super().create
        return await send(**_aside(options, "messages", "tools"), messages=())


class LeanResponses(AsyncResponses):
    async def create(self, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        send: Any = super().create
        return await send(**_aside(options, "input", "tools"))


def made_lean(model: Model) -> bool:
    """Take that work, and all retries, from the SDK's client; False when the model has another one."""
    client: object = getattr(model, "client", None)
    if not isinstance(client, AsyncOpenAI):
        return False
    # Said once: as a setting of each request it would cost a new client, without what follows, each time.
    client.max_retries = 0
    # Both are cached properties: what stands in the instance is what is used.
    vars(client.chat)["completions"] = LeanCompletions(client)
    vars(client)["responses"] = LeanResponses(client)
    return True


def _aside(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options with some of them in `extra_body`; what was there already has the last word."""
    rest = {name: value for name, value in options.items() if name not in names}
    aside = {name: options[name] for name in names if not isinstance(options.get(name, omit), Omit)}
    return {**rest, "extra_body": {**aside, **(options.get("extra_body") or {})}}
