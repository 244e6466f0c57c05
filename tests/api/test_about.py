"""What runs here, and what the sessions do."""

import base64
import json
from typing import Any

import pytest
from httpx2 import Response

from api.views import describe
from perdure import Agent, Progress, Prompt, RemoteAgent, Section, SessionView
from perdure.protocol.events import Usage
from perdure.store.values import Commit, Consumption, SessionChange
from tests.api.served import Api


async def info(api: Api, prefix: str = "") -> dict[str, Any]:
    answer = await api.http.get(f"{prefix}/eve/v1/info")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    return answer.json()


async def test_info_describes_the_default_agent(api: Api) -> None:
    described = await info(api)

    assert (described["kind"], described["version"], described["mode"]) == ("eve-agent-info", 1, "development")
    assert described["agent"] == {
        "agentRoot": "agents/concierge",
        "appRoot": ".",
        "description": "Helps.",
        "model": {"id": "test:fast"},
        "name": "concierge",
    }
    assert described["instructions"]["static"]["markdown"] == "Be kind."


async def test_info_describes_the_agent_of_the_prefix(api: Api) -> None:
    assert (await info(api, "/agents/clerk"))["agent"]["name"] == "clerk"


async def test_info_lists_the_tools_with_their_schemas(api: Api) -> None:
    (tool,) = (await info(api))["tools"]["authored"]

    assert tool["name"] == "weather"
    assert tool["description"] == "Say how the weather is."
    assert tool["inputSchema"]["properties"]["city"]["type"] == "string"
    assert tool["requiresApproval"] is False


def kindness(_: SessionView) -> str:
    return "Be kind."


@pytest.mark.parametrize("instructions", [kindness, Prompt(Section("Objective", "Be kind."), Progress())])
def test_instructions_that_are_rendered_later_are_dynamic(instructions: Any) -> None:
    described = describe(Agent(name="boss", instructions=instructions), development=True)["instructions"]

    assert described["static"] is None
    assert [each["slug"] for each in described["dynamic"]] == ["instructions"]
    json.dumps(described)


def test_info_lists_the_agents_to_which_this_one_hands_work() -> None:
    helper = Agent(name="helper", description="Helps.", instructions="Help.", tools=[sum_up])
    boss = Agent(name="boss", subagents=[helper, RemoteAgent("away", "https://a.example")])

    described = describe(boss, development=True)["subagents"]

    assert described["total"] == 1
    assert described["local"] == [
        {
            "logicalPath": "agents/boss/subagents/helper",
            "sourceKind": "module",
            "name": "helper",
            "description": "Helps.",
            "entryPath": "agents/helper",
            "nodeId": "subagents/helper",
            "rootPath": "agents/helper",
            "summary": {
                "channels": 0,
                "connections": 0,
                "hooks": 0,
                "schedules": 0,
                "skills": 0,
                "tools": 1,
                "instructions": True,
            },
        }
    ]


def sum_up(text: str) -> str:
    """Sum a text up."""
    return text


async def sessions(api: Api, **params: Any) -> Response:
    return await api.http.get("/v1/sessions", params=params)


async def test_sessions_are_listed_newest_first_in_pages(api: Api) -> None:
    created = [(await api.create(f"number {number}"))["sessionId"] for number in range(5)]

    first = (await sessions(api, limit=3)).json()
    second = (await sessions(api, limit=3, cursor=first["nextCursor"])).json()

    assert [row["sessionId"] for row in (*first["sessions"], *second["sessions"])] == created[::-1]
    assert "nextCursor" not in second


async def test_sessions_are_filtered(api: Api) -> None:
    clerk = await api.create(prefix="/agents/clerk", mode="task")
    await api.create()

    for params in ({"agent": "clerk"}, {"mode": "task"}, {"status": "starting", "agent": "clerk"}):
        assert [row["sessionId"] for row in (await sessions(api, **params)).json()["sessions"]] == [clerk["sessionId"]]
    assert (await sessions(api, status="failed")).json() == {"sessions": []}


@pytest.mark.parametrize(
    ("params", "error"),
    [
        *(({"limit": limit}, "Expected 'limit' to be an integer from 1 to 200.") for limit in ("0", "201", "x", "1.5")),
        (
            {"status": "done"},
            "Expected 'status' to be one of starting, running, waiting, completed, failed, needs_attention.",
        ),
        ({"mode": "chat"}, "Expected 'mode' to be one of conversation, task."),
        ({"agent": "a\x00b"}, "Expected 'agent' to be a name."),
        ({"cursor": "nonsense"}, "The cursor is not one that this server gave out."),
        *(
            (
                {"cursor": base64.urlsafe_b64encode(b"[" * depth).decode()},
                "The cursor is not one that this server gave out.",
            )
            for depth in (600, 20_000)
        ),
    ],
)
async def test_a_list_that_makes_no_sense_is_refused(api: Api, params: dict[str, str], error: str) -> None:
    answer = await sessions(api, **params)

    assert (answer.status_code, answer.json()) == (400, {"error": error, "ok": False})


async def test_a_session_shows_what_it_did_and_what_it_waits_for(api: Api) -> None:
    created = await api.create("Plan my\n\nholiday")
    change = SessionChange(status="waiting", turns=1, steps=2, tool_calls=3, usage=Usage(input_tokens=10))
    consuming = Commit(created["sessionId"], change=change, consume=Consumption(0, [created["deliveryId"]]))
    await api.store.commit(consuming)

    shown = (await api.http.get(f"/v1/sessions/{created['sessionId']}")).json()

    assert shown == {
        "sessionId": created["sessionId"],
        "agent": "concierge",
        "mode": "conversation",
        "status": "waiting",
        "waitingFor": "The next message.",
        "waitingCode": "message",
        "createdAt": shown["createdAt"],
        "updatedAt": shown["updatedAt"],
        "title": "Plan my holiday",
        "counts": {"turns": 1, "steps": 2, "toolCalls": 3, "events": 0},
        "usage": {"inputTokens": 10, "outputTokens": 0, "cacheReadTokens": 0, "cacheWriteTokens": 0},
        "openInputs": [],
        "temporal": {
            "workflowId": created["sessionId"],
            "runId": "run-1",
            "status": None,
            "uiUrl": f"http://127.0.0.1:8233/namespaces/default/workflows/{created['sessionId']}",
        },
    }


async def test_a_failed_session_shows_why(api: Api) -> None:
    created = await api.create()
    error = {"code": "MODEL_CALL_FAILED", "message": "The model is gone."}
    await api.store.commit(Commit(created["sessionId"], change=SessionChange(status="failed", error=error)))

    shown = (await api.http.get(f"/v1/sessions/{created['sessionId']}")).json()

    assert (shown["status"], shown["error"], shown["waitingFor"]) == ("failed", error, None)


@pytest.mark.parametrize("session_id", ["ses_unknown", "%00", "%ff", "%F0%9F%8C%8D", "a%0ab"])
async def test_an_unknown_session_is_404(api: Api, session_id: str) -> None:
    answer = await api.http.get(f"/v1/sessions/{session_id}")

    assert (answer.status_code, answer.json()) == (404, {"error": "Session not found.", "ok": False})
