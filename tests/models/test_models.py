"""Whether the models that agents name can be asked at all."""

import pytest

from perdure import Agent
from perdure.errors import Misconfigured
from perdure.models.base import Models, context_window


def test_a_model_that_cannot_be_used_is_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)

    for model, problem in (("no-such-provider:x", "no-such-provider"), ("anthropic:x", "ANTHROPIC_API_KEY")):
        with pytest.raises(Misconfigured, match=problem) as refused:
            Models().check([Agent("fine"), Agent("clerk", model=model)])
        assert refused.value.message.startswith("Agent 'clerk': ")


def test_models_that_can_be_asked_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "key")

    Models().check([Agent("demo"), Agent("clerk", model="anthropic:x")])


@pytest.mark.parametrize(
    ("name", "window"),
    [("anthropic:claude-opus-4-1", 200_000), ("openai-chat:gpt-4o", 128_000), ("openai-chat:unheard-of", None)],
)
def test_the_context_window_is_that_of_the_provider_librarys_data(
    monkeypatch: pytest.MonkeyPatch, name: str, window: int | None
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    monkeypatch.setenv("OPENAI_API_KEY", "k")

    assert context_window(Models(), name) == window


def test_of_a_model_that_cannot_be_opened_no_context_window_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    assert context_window(Models(), "openai-chat:gpt-4o") is None
    assert context_window(Models(), "demo") is None
