"""Whether the models that agents name can be asked at all."""

import pytest

from perdure import Agent
from perdure.errors import Misconfigured
from perdure.models.base import Models


def test_a_model_that_cannot_be_used_is_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)

    for model, problem in (("no-such-provider:x", "no-such-provider"), ("anthropic:x", "ANTHROPIC_API_KEY")):
        with pytest.raises(Misconfigured, match=problem) as refused:
            Models().check([Agent("fine"), Agent("clerk", model=model)])
        assert refused.value.message.startswith("Agent 'clerk': ")


def test_models_that_can_be_asked_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "key")

    Models().check([Agent("demo"), Agent("clerk", model="anthropic:x")])
