"""What a worker says about a wrong declaration before it opens anything."""

from pathlib import Path
from typing import Any

import pytest
from pydantic_ai.toolsets import FunctionToolset

import worker as composition
from perdure import Agent
from perdure.errors import InvalidDeclaration, Misconfigured
from perdure.settings import Settings


def look() -> str:
    """Look."""
    return "seen"


twice = Agent("twice", tools=[look, FunctionToolset([look])])


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"deployment": "shop"}, "set both, or neither"),
        ({"build_id": "7"}, "set both, or neither"),
        ({"model": "no-such-provider:x"}, "Agent 'demo': .*no-such-provider.* A model is written `provider:model`"),
        ({"model": "gpt-5"}, "Did you mean '[a-z-]+:gpt-5'\\?$"),
        ({"model": "groq:x"}, "Agent 'demo': The model groq:x cannot be used. .*pip install"),
        ({"model": "anthropic:x"}, "Agent 'demo': .* cannot be used. Set ANTHROPIC_API_KEY, or let `demo` answer"),
    ],
)
async def test_a_worker_that_cannot_work_does_not_start(
    settings: Any, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)

    with pytest.raises(Misconfigured, match=advice):
        async with composition.serving(Settings(data_dir=tmp_path, **settings)):
            pass

    assert list(tmp_path.iterdir()) == []


async def test_a_worker_with_two_tools_of_one_name_does_not_start(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, agents=f"{__name__}:twice")

    with pytest.raises(InvalidDeclaration, match="Agent 'twice' has more than one tool named look"):
        async with composition.serving(settings):
            pass

    assert list(tmp_path.iterdir()) == []
