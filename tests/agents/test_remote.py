"""The declaration of an agent on another server."""

from typing import Any

import pytest

from perdure import Agent, RemoteAgent
from perdure.errors import InvalidDeclaration

WRONG: list[dict[str, Any]] = [
    {"name": "No Name"},
    {"url": "ftp://a.example"},
    {"url": "a.example"},
    {"url": "https://user:password@a.example"},
    {"url": "https://a.example/?key=1"},
    {"path": "eve"},
    {"path": "/eve?x"},
    {"headers": "x"},
    {"headers": lambda one: {}},  # pyright: ignore[reportUnknownLambdaType]
    {"auth": 5},
    {"timeout": 0},
    {"timeout": True},
    {"output_schema": {"type": 5}},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_work_is_refused_where_it_is_declared(wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"name": "away", "url": "https://a.example", **wrong}

    with pytest.raises(InvalidDeclaration) as refused:
        RemoteAgent(**given)

    assert "password" not in str(refused.value)


def test_a_declaration_shows_no_secret() -> None:
    away = RemoteAgent("away", "https://a.example", headers={"x": "secret-1"}, auth="secret-2")

    assert "secret" not in repr(away)
    assert "secret" not in repr(Agent(name="boss", subagents=[away]))


async def test_headers_are_had_anew_for_each_request() -> None:
    tokens = iter(("one", "two"))

    async def auth() -> str:
        return next(tokens)

    away = RemoteAgent("away", "https://a.example/base/", headers=lambda: {"x-a": "b", "Host": "evil"}, auth=auth)

    assert away.sessions_url == "https://a.example/base/eve/v1/session"
    assert await away.request_headers() == {"x-a": "b", "authorization": "Bearer one"}
    assert await away.request_headers() == {"x-a": "b", "authorization": "Bearer two"}


def test_its_name_is_a_tool_like_any_other() -> None:
    away = RemoteAgent("away", "https://a.example")

    with pytest.raises(InvalidDeclaration, match="more than one tool named away"):
        Agent(name="boss", subagents=[away, Agent(name="away")])
    with pytest.raises(InvalidDeclaration, match="is no agent"):
        Agent(name="boss", subagents=["away"])  # pyright: ignore[reportArgumentType]
