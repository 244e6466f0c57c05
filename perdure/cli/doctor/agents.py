"""The probes of the agents and their models, in processes of their own: an author's module may hang, or exit."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn

from perdure.dev.program import Ran, run_to_end
from perdure.dev.supervisor import command
from perdure.settings import Settings

from .findings import Finding, fail, ok

_TAIL = 65_536
#: Seconds that are left for what comes after the calls.
_REST = 1.5
_REACH = "See whether its provider is reachable."


async def declarations(settings: Settings, deadline: float) -> Sequence[Finding]:
    """Whether the agents can be loaded, and would be served. The deadline is one of `time.monotonic`."""
    ran = await _run(command("worker", "--check"), settings, deadline)
    if ran.code == 0:
        return [ok("agents", f"{settings.agents} can be served.")]
    if ran.code is None:
        todo = "See what its module does when it is imported; `perdure worker --check` waits longer."
        return [fail("agents", f"{settings.agents} was not loaded in time.", todo)]
    reason = ran.refusal or f"The check exited with code {ran.code}."
    return [fail("agents", reason, "Mend it: a worker would not start.")]


async def call_models(settings: Settings, deadline: float) -> Sequence[Finding]:
    """Whether each model of the agents answers."""
    last = time.time() + deadline - time.monotonic() - _REST
    ran = await _run([sys.executable, "-m", __name__, str(last)], settings, deadline)
    if ran.code is None:
        return [fail("model", "No model answered in time.", _REACH)]
    if ran.code or not ran.lines:
        return [fail("model", "No model was called.", "See the line about the agents.")]
    return [Finding(**each) for each in json.loads(ran.lines[-1])]


async def _run(words: Sequence[str], settings: Settings, deadline: float) -> Ran:
    """Run one of our own programs with these agents."""
    environment = {
        **os.environ,
        "PERDURE_AGENTS": settings.agents,
        "PERDURE_DATA_DIR": str(settings.data_dir),
        # A doctor leaves nothing behind.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return await run_to_end(words, environment, deadline - time.monotonic(), tail=_TAIL)


async def _call(name: str, deadline: float) -> Finding:
    from pydantic_ai.messages import ModelRequest

    from perdure.errors import ModelFailed
    from perdure.models.base import Models, Prompt, Reply

    # What is imported above takes a while, too.
    seconds = max(_REST, round(deadline - time.time(), 1))

    async def answer() -> Reply | None:
        request = ModelRequest.user_text_prompt("Answer with the word ok.")
        async for item in Models(silence=seconds).model(name).stream(Prompt([request], settings={"max_tokens": 64})):
            if isinstance(item, Reply):
                return item
        return None

    try:
        async with asyncio.timeout(seconds):
            reply = await answer()
    except TimeoutError:
        return fail("model", f"{name} did not answer within {seconds:g} s.", _REACH)
    except ModelFailed as failed:
        return fail("model", f"{failed.message} {failed.reason or ''}".rstrip(), "See its key, its name and its quota.")
    used = "" if reply is None else f", and used {reply.usage.input_tokens + reply.usage.output_tokens} tokens"
    return ok("model", f"{name} answers{used}.")


async def _call_all(deadline: float) -> Sequence[Finding]:
    from perdure.agents.agent import DEMO
    from perdure.agents.registry import load_agents
    from perdure.settings import read_settings

    settings = read_settings()
    found = load_agents(settings.agents, settings.model)
    models = dict.fromkeys(agent.model or DEMO for agent in found)
    return await asyncio.gather(*(_call(name, deadline) for name in models))


async def _main(deadline: float) -> NoReturn:
    findings = await _call_all(deadline)
    sys.stdout.write(json.dumps([asdict(each) for each in findings]) + "\n")
    sys.stdout.flush()
    # Connections that do not answer are not closed in time, either.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1])))
