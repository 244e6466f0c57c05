"""Who may see who works at what, and what they see."""

from typing import Any

import pytest

from api.auth import Operators
from perdure.errors import Forbidden
from perdure.protocol.deliveries import LOCAL, Principal
from perdure.protocol.events import Usage
from perdure.store.runs import NewRun
from perdure.store.values import Attempt, Commit, Fence, Hold, NewSession, SessionChange, SessionQuery
from tests.api.asking import known_as
from tests.api.served import Api

LONG_AGO = 1_000_000_000.0
KEY = Principal(principal_id="ops", principal_type="service", authenticator="api-key", subject="ops")
PERSON = Principal(principal_id="https://idp/ops", principal_type="user", authenticator="jwt", subject="ops")


async def begin(
    api: Api, session_id: str, generation: int, *, lease_until: float | None = None, scope: str = "model"
) -> Fence:
    attempt = Attempt(generation, generation * 1_000_000, worker="host:7:b1", lease_until=lease_until)
    fence = Fence(0, 0, scope, attempt, Hold.RAISE)
    await api.store.commit(Commit(session_id, fence=fence))
    return fence


async def listed(api: Api, session_id: str, query: str = "", **headers: str) -> Any:
    return (await api.http.get(f"/v1/sessions/{session_id}/attempts{query}", headers=headers)).json()


async def test_the_owner_of_a_session_sees_each_attempt_at_its_work(api: Api) -> None:
    session_id = (await api.create())["sessionId"]
    await begin(api, session_id, 1, lease_until=LONG_AGO)
    fence = await begin(api, session_id, 2)
    used = SessionChange(usage=Usage(input_tokens=3), cost=2_500)
    released = Fence(0, 0, "model", fence.attempt, Hold.RELEASE)
    await api.store.commit(Commit(session_id, fence=released, change=used))

    first, second = (await listed(api, session_id))["attempts"]

    assert (first["status"], first["error"]) == (
        "superseded",
        {"type": "LEASE_EXPIRED", "message": "lease expired; taken over by host:7:b1"},
    )
    assert {name: second[name] for name in ("sessionId", "turnId", "stepIndex", "scope", "number", "worker")} == {
        "sessionId": session_id,
        "turnId": "turn_0",
        "stepIndex": 0,
        "scope": "model",
        "number": 2,
        "worker": "host:7:b1",
    }
    assert (second["status"], second["usage"]["inputTokens"], second["costUsdMicros"]) == ("succeeded", 3, 2)
    assert first["attemptId"] < second["attemptId"]


async def test_attempts_come_in_pages(api: Api) -> None:
    session_id = (await api.create())["sessionId"]
    for generation in (1, 2, 3):
        await begin(api, session_id, generation)

    first = await listed(api, session_id, "?limit=2")
    second = await listed(api, session_id, f"?limit=2&cursor={first['nextCursor']}")

    assert [each["number"] for each in (*first["attempts"], *second["attempts"])] == [1, 2, 3]
    assert "nextCursor" not in second


async def test_the_attempts_of_one_turn_are_listed_by_its_name(api: Api) -> None:
    session_id = (await api.create())["sessionId"]
    await begin(api, session_id, 1)

    assert len((await listed(api, session_id, "?turn=turn_0"))["attempts"]) == 1
    assert (await listed(api, session_id, "?turn=1"))["attempts"] == []


@pytest.mark.parametrize("query", ["?turn=now", "?limit=0", "?cursor=none"])
async def test_what_is_no_page_of_attempts_is_refused(api: Api, query: str) -> None:
    session_id = (await api.create())["sessionId"]

    answer = await api.http.get(f"/v1/sessions/{session_id}/attempts{query}")

    assert answer.status_code == 400


async def test_nobody_else_sees_the_attempts_of_a_session(people: Api) -> None:
    session_id = (await people.create())["sessionId"]
    await begin(people, session_id, 1)

    for headers in (known_as("bob"), known_as("bob", role="operator")):
        answer = await people.http.get(f"/v1/sessions/{session_id}/attempts", headers=headers)
        assert answer.status_code == 404


async def started(api: Api, run_id: str) -> str:
    """A run of Ada whose function a worker has entered twice."""
    owner = (await api.store.sessions(SessionQuery())).sessions[0].principal
    run = NewSession(run_id, "nightly", "task", f"run/{run_id}", owner, run=NewRun("nightly", {}))
    await api.store.create_session(run)
    for generation in (1, 2):
        await begin(api, run_id, generation, scope="body")
    return run_id


async def test_the_owner_of_a_run_sees_each_attempt_at_its_function(people: Api) -> None:
    await people.create()
    run_id = await started(people, "run_1")

    first = (await people.http.get(f"/v1/runs/{run_id}/attempts?limit=1")).json()
    second = (await people.http.get(f"/v1/runs/{run_id}/attempts?cursor={first['nextCursor']}")).json()

    found = [*first["attempts"], *second["attempts"]]
    assert [(each["runId"], each["scope"], each["number"], each["status"]) for each in found] == [
        (run_id, "body", 1, "superseded"),
        (run_id, "body", 2, "running"),
    ]
    assert not {"sessionId", "turnId", "stepIndex"} & {name for each in found for name in each}
    assert "nextCursor" not in second


async def test_nobody_else_sees_the_attempts_of_a_run(people: Api) -> None:
    session_id = (await people.create())["sessionId"]
    run_id = await started(people, "run_1")

    for wanted, headers in ((run_id, known_as("bob")), (session_id, {}), ("run_none", {}), ("%00", {})):
        answer = await people.http.get(f"/v1/runs/{wanted}/attempts", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (404, "run_not_found")
    assert (await people.http.get(f"/v1/sessions/{run_id}/attempts")).status_code == 404


async def test_operators_see_what_all_workers_work_at(people: Api) -> None:
    mine, other = (await people.create())["sessionId"], (await people.create())["sessionId"]
    await begin(people, mine, 1)
    await begin(people, other, 2, lease_until=LONG_AGO)

    answer = (await people.http.get("/v1/diagnostics/leases", headers=known_as("eve", role="operator"))).json()

    assert answer["source"] == "temporal heartbeat"
    assert {each["sessionId"]: (each["worker"], each["overdue"]) for each in answer["leases"]} == {
        mine: ("host:7:b1", False),
        other: ("host:7:b1", True),
    }
    assert all(0 <= each["ageSeconds"] < 60 for each in answer["leases"])


async def test_callers_who_are_no_operators_see_no_leases(people: Api) -> None:
    for headers in (known_as("ada"), known_as("ada", role="finance"), known_as("operator")):
        answer = await people.http.get("/v1/diagnostics/leases", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


async def test_a_development_machine_has_no_operators(api: Api) -> None:
    assert (await api.http.get("/v1/diagnostics/leases")).status_code == 403


async def test_leases_are_shown_to_nobody_without_credentials(people: Api) -> None:
    answer = await people.http.get("/v1/diagnostics/leases", headers={"x-who": "", "authorization": "Bearer x"})

    assert answer.status_code in (401, 403)


@pytest.mark.parametrize(
    ("named", "principal"),
    [("ops", KEY), ("api-key:ops", KEY), (" jwt:ops , other", PERSON), ("local-dev:local-dev", LOCAL)],
)
def test_a_caller_who_is_named_is_an_operator(named: str, principal: Principal) -> None:
    Operators(named).check(principal)


@pytest.mark.parametrize(("named", "principal"), [("", KEY), (",", KEY), ("ops", PERSON), ("op", KEY), ("", LOCAL)])
def test_a_caller_who_is_not_named_is_none(named: str, principal: Principal) -> None:
    with pytest.raises(Forbidden):
        Operators(named).check(principal)


@pytest.mark.parametrize("role", ["operator", ["user", "operator"]])
def test_a_caller_with_the_role_is_an_operator(role: str | list[str]) -> None:
    Operators().check(KEY.model_copy(update={"attributes": {"role": role}}))


@pytest.mark.parametrize("role", ["operators", "", ["Operator"], "xoperator"])
def test_a_role_that_sounds_alike_makes_no_operator(role: str | list[str]) -> None:
    with pytest.raises(Forbidden):
        Operators().check(KEY.model_copy(update={"attributes": {"role": role}}))
