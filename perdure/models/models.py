"""All the models that a deployment can name."""

import re
from collections.abc import Iterable

from pydantic_ai.models import infer_model

from perdure.agents.agent import DEMO, Agent
from perdure.errors import Misconfigured, ModelFailed

from .base import Model
from .demo import DemoModel
from .failures import failure

_VARIABLE = re.compile(r"`([A-Z][A-Z0-9_]+)` environment variable")


class Models:
    """Models by name. Each is created once, because its client keeps connections open."""

    def __init__(self, *, silence: float = 120.0, demo_delay: float = 0.02) -> None:
        self._silence = silence
        self._models: dict[str, Model] = {DEMO: DemoModel(delay=demo_delay)}

    def check(self, agents: Iterable[Agent]) -> None:
        """Raise `Misconfigured` unless every agent has a usable model: a known provider, and its key."""
        for agent in agents:
            try:
                self.model(agent.model or DEMO)
            except ModelFailed as failed:
                raise Misconfigured(f"Agent {agent.name!r}: {failed.message} {_advice(failed)}".rstrip()) from None

    def model(self, name: str) -> Model:
        if name not in self._models:
            # Imported late: it imports the SDKs of providers, which takes a third of a second. The demo needs none.
            from .provider import ProviderModel

            try:
                self._models[name] = ProviderModel(name, infer_model(name), silence=self._silence)
            except Exception as error:
                raise failure(name, error) from error
        return self._models[name]


def _advice(failed: ModelFailed) -> str:
    """How to fix it. pydantic-ai's own advice includes Python code that does not apply here."""
    reason = failed.reason or ""
    missing = _VARIABLE.search(reason)
    return f"Set {missing[1]}, or let `{DEMO}` answer, which needs no key." if missing else reason
