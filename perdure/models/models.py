"""All the models that a deployment can name."""

from pydantic_ai.models import infer_model

from perdure.agents.agent import DEMO

from .base import Model
from .demo import DemoModel
from .failures import failure
from .provider import ProviderModel


class Models:
    """Models by name, each made once: its client keeps connections open."""

    def __init__(self, *, timeout: float = 120.0, demo_delay: float = 0.02) -> None:
        self._timeout = timeout
        self._models: dict[str, Model] = {DEMO: DemoModel(delay=demo_delay)}

    def model(self, name: str) -> Model:
        if name not in self._models:
            try:
                self._models[name] = ProviderModel(name, infer_model(name), timeout=self._timeout)
            except Exception as error:
                raise failure(name, error) from error
        return self._models[name]
