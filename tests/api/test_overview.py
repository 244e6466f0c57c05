"""What a deployment serves, and who sees how it is."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.asking import by_header, known_as
from tests.api.served import Api, serving


async def listed(api: Api, **params: Any) -> list[str]:
    return [each["title"] for each in (await api.http.get("/v1/sessions", params=params)).json()["sessions"]]


async def test_the_agents_are_listed_with_their_tools_the_default_one_first(api: Api) -> None:
    agents = (await api.http.get("/v1/agents")).json()["agents"]

    assert [each["name"] for each in agents][:2] == ["concierge", "clerk"]
    assert {name: agents[0][name] for name in ("model", "description", "turns", "subagents")} == {
        "model": "test:fast",
        "description": "Helps.",
        "turns": "child",
        "subagents": [],
    }
    (tool,) = agents[0]["tools"]
    assert (tool["name"], tool["effects"], tool["approval"]) == ("weather", "pure", False)
    assert list(tool["inputSchema"]["properties"]) == ["city"]


async def test_who_works_for_a_deployment_is_for_operators(tmp_path: Path) -> None:
    async with serving(tmp_path, authenticators=[by_header], api_keys="ops=" + "0" * 64) as api:
        hidden = (await api.http.get("/v1/health", headers=known_as("ada"))).json()
        shown = (await api.http.get("/v1/health", headers=known_as("bob", role="operator"))).json()

    assert "workers" not in hidden
    assert "address" not in hidden["temporal"]
    assert {queue["pollers"] for queue in hidden["queues"]} == {0}
    assert shown["workers"] == []
    assert shown["temporal"]["address"]


async def test_a_part_that_does_not_answer_hides_no_other_one(api: Api) -> None:
    # What stands in for Temporal here describes nothing.
    health = (await api.http.get("/v1/health")).json()

    assert health["store"]["ok"] is True
    assert (health["temporal"]["ok"], health["temporal"]["problem"]) == (False, "it cannot be reached")


async def test_sessions_are_found_by_a_part_of_their_title_id_agent_or_tag(api: Api) -> None:
    first = (await api.create("Buy an Orange boat"))["sessionId"]
    await api.create("Sell it")
    await api.http.patch(f"/v1/sessions/{first}", json={"tags": {"job": "Nightly"}})

    for text in ("orange", first[-8:].lower(), "job:night"):
        assert await listed(api, q=text) == ["Buy an Orange boat"]
    assert await listed(api, q="concierge") == ["Sell it", "Buy an Orange boat"]
    assert await listed(api, q="%") == []


async def test_a_search_goes_on_where_its_page_has_ended(api: Api) -> None:
    for number in range(5):
        await api.create(f"boat {number}")
        await api.create(f"car {number}")

    first = (await api.http.get("/v1/sessions", params={"q": "boat", "limit": 3})).json()
    rest = (await api.http.get("/v1/sessions", params={"q": "boat", "limit": 3, "cursor": first["nextCursor"]})).json()

    titles = [each["title"] for each in (*first["sessions"], *rest["sessions"])]
    assert titles == [f"boat {number}" for number in (4, 3, 2, 1, 0)]
    assert "nextCursor" not in rest


async def test_a_search_looks_at_so_many_sessions_at_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.store.engine.cursors._LOOKED_AT", 4)
    monkeypatch.setattr("perdure.store.engine.cursors._AT_ONCE", 2)
    await api.create("boat")
    for number in range(4):
        await api.create(f"car {number}")

    first = (await api.http.get("/v1/sessions", params={"q": "boat"})).json()
    rest = (await api.http.get("/v1/sessions", params={"q": "boat", "cursor": first["nextCursor"]})).json()

    assert first["sessions"] == []
    assert [each["title"] for each in rest["sessions"]] == ["boat"]


async def test_sessions_are_found_by_their_age(api: Api) -> None:
    for name in ("old", "middle", "new"):
        await api.create(name)
    at = {each["title"]: each["createdAt"] for each in (await api.http.get("/v1/sessions")).json()["sessions"]}

    assert await listed(api, createdBefore=at["middle"]) == ["old"]
    assert await listed(api, createdAfter=at["middle"]) == ["new", "middle"]
    assert await listed(api, createdAfter=at["middle"], createdBefore=at["new"]) == ["middle"]
    # The same moment in another time zone.
    assert await listed(api, createdAfter=at["new"].replace("Z", "+00:00"), limit=1) == ["new"]


@pytest.mark.parametrize(
    "params",
    [
        *(
            {"createdAfter": given}
            for given in ("yesterday", "2026-01-31T12:00:00", "9999-12-31T23:59:59-23:59", "1" * 9999)
        ),
        *({"q": given} for given in ("", "x" * 201)),
    ],
)
async def test_what_is_no_time_or_no_search_is_refused(api: Api, params: dict[str, str]) -> None:
    assert (await api.http.get("/v1/sessions", params=params)).status_code == 400
