"""Who is let in, and what is theirs."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from api.auth import build_authenticators
from perdure.cli.operator import new_api_key
from perdure.errors import Misconfigured
from perdure.settings import Settings
from tests.api.served import URL, Api, serving
from tests.support.processes import PATIENCE


def keys(**holders: str) -> str:
    return ",".join(f"{name}={hashlib.sha256(key.encode()).hexdigest()}" for name, key in holders.items())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


ALICE, BOB = bearer("alice's key"), bearer("bob's key")


@pytest_asyncio.fixture
async def closed(tmp_path: Path) -> AsyncGenerator[Api]:
    """An API that others can reach: two services have keys, and no other caller gets in."""
    async with serving(tmp_path, host="0.0.0.0", api_keys=keys(alice="alice's key", bob="bob's key")) as served:
        yield served


UNAUTHORIZED = {"code": "unauthorized", "error": "Authorization is required for this route.", "ok": False}

GUARDED = [
    ("POST", URL),
    ("POST", f"{URL}/ses_x"),
    ("GET", f"{URL}/ses_x/stream"),
    ("GET", "/eve/v1/info"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/ses_x"),
    ("POST", f"/agents/clerk{URL}"),
]


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"x-api-key": "wrong"}, {"authorization": "Basic eDp5"}])
async def test_callers_without_credentials_get_401(
    closed: Api, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = await closed.http.request(method, path, headers=headers)

    assert (answer.status_code, answer.json()) == (401, UNAUTHORIZED)
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["cache-control"] == "no-store"


async def test_health_is_open(closed: Api) -> None:
    answer = await closed.http.get("/eve/v1/health")

    assert (answer.status_code, answer.json()) == (200, {"ok": True, "status": "ready", "workflowId": "Session"})


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/redoc"])
async def test_the_description_of_the_api_is_for_development(closed: Api, api: Api, path: str) -> None:
    assert (await closed.http.get(path)).status_code == 404
    assert (await api.http.get(path)).status_code == 200


@pytest.mark.parametrize("headers", [ALICE, {"x-api-key": "alice's key"}, {"authorization": "bearer  alice's key"}])
async def test_a_service_signs_in_with_its_key(closed: Api, headers: dict[str, str]) -> None:
    answer = await closed.http.post(URL, json={"message": "x"}, headers=headers)

    row = await closed.store.session(answer.json()["sessionId"])
    assert row is not None
    assert (row.principal.principal_id, row.principal.principal_type) == ("alice", "service")


BOTH_RIGHT = {"x-api-key": "alice's key", "authorization": "Bearer bob's key"}


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "alice's key", "authorization": "Bearer wrong"},
        {"x-api-key": "wrong", "authorization": "Bearer alice's key"},
        {"x-api-key": "alice's key", "authorization": "Basic eDp5"},
        [("authorization", "Bearer alice's key"), ("authorization", "Bearer wrong")],
        [("x-api-key", "alice's key"), ("x-api-key", "wrong")],
    ],
)
async def test_a_wrong_credential_beside_a_right_one_is_refused(closed: Api, headers: Any) -> None:
    answer = await closed.http.get("/eve/v1/info", headers=headers)

    assert (answer.status_code, answer.json()) == (401, UNAUTHORIZED)


async def test_of_two_right_credentials_the_api_key_counts(closed: Api) -> None:
    answer = await closed.http.post(URL, json={"message": "x"}, headers=BOTH_RIGHT)

    row = await closed.store.session(answer.json()["sessionId"])
    assert row is not None
    assert row.principal.principal_id == "alice"


async def test_a_session_is_for_its_creator_alone(closed: Api) -> None:
    created = (await closed.http.post(URL, json={"message": "x"}, headers=ALICE)).json()
    path = f"{URL}/{created['sessionId']}"
    more = {"continuationToken": created["continuationToken"], "message": "more"}

    hers = await closed.http.post(path, json=more, headers=ALICE)
    his = [
        await closed.http.post(path, json=more, headers=BOB),
        await closed.http.get(f"{path}/stream", headers=BOB),
        await closed.http.get(f"/v1/sessions/{created['sessionId']}", headers=BOB),
    ]
    lists = [(await closed.http.get("/v1/sessions", headers=who)).json()["sessions"] for who in (ALICE, BOB)]

    assert hers.status_code == 200
    for answer in his:
        assert (answer.status_code, answer.json()) == (404, {"error": "Session not found.", "ok": False})
    assert [len(listed) for listed in lists] == [1, 0]


async def test_a_key_has_the_attributes_of_its_entry(tmp_path: Path) -> None:
    key, entry = new_api_key("alice", ["role=support", "role=pay:write", "team=red"])
    async with serving(tmp_path, api_keys=f"{entry},{keys(bob='k')}") as api:
        answer = await api.http.post(URL, json={"message": "x"}, headers=bearer(key))
        row = await api.store.session(answer.json()["sessionId"])

    assert row is not None
    assert row.principal.attributes == {"role": ["support", "pay:write"], "team": ["red"]}


async def test_two_callers_may_use_one_idempotency_key(closed: Api) -> None:
    answers = [
        await closed.http.post(URL, json={"message": who["authorization"]}, headers={**who, "idempotency-key": "k"})
        for who in (ALICE, BOB)
    ]

    assert [answer.status_code for answer in answers] == [202, 202]


async def test_an_unauthorised_body_is_not_even_read(closed: Api) -> None:
    answer = await closed.http.post(URL, content=b"{", headers=bearer("wrong"))

    assert answer.status_code == 401


# --- development ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "app.localhost", "[::1]:8000", "LOCALHOST"])
async def test_a_developer_needs_no_key(api: Api, host: str) -> None:
    answer = await api.http.post(URL, json={"message": "x"}, headers={"host": host})

    assert answer.status_code == 202


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "127.evil.example"},
        {"host": ""},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"x-forwarded-for": "203.0.113.9"},
        {"forwarded": "for=203.0.113.9"},
        {"x-forwarded-proto": "https"},
        {"x-original-host": "perdure.example"},
        {"x-envoy-external-address": "203.0.113.9"},
        {"cf-connecting-ip": "203.0.113.9"},
        {"true-client-ip": "203.0.113.9"},
        {"x-cluster-client-ip": "203.0.113.9"},
        {"tailscale-user-login": "eve@example.com"},
        {"authorization": "Bearer something"},
        {"x-api-key": "something"},
    ],
)
async def test_what_does_not_come_from_this_machine_is_no_developer(api: Api, headers: dict[str, str]) -> None:
    answer = await api.http.post(URL, json={"message": "x"}, headers=headers)

    assert answer.status_code == 401
    assert api.temporal.started == []


async def test_a_page_served_from_this_machine_may_call(api: Api) -> None:
    answer = await api.http.post(URL, json={"message": "x"}, headers={"origin": "http://localhost:3000"})

    assert answer.status_code == 202


async def test_a_request_of_http_1_0_comes_from_a_proxy(api: Api) -> None:
    # As proxies ask that are given an address and nothing else: under our own name, and with no header of theirs.
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /eve/v1/info HTTP/1.0\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode())

    assert b" 401 " in await asyncio.wait_for(reader.readline(), PATIENCE)
    writer.close()


async def test_where_there_are_keys_everybody_needs_one(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=keys(alice="alice's key")) as api:
        answers = [await api.http.get("/eve/v1/info", headers=headers) for headers in ({}, ALICE)]
        description = await api.http.get("/openapi.json")

    assert [answer.status_code for answer in answers] == [401, 200]
    assert description.status_code == 404


async def test_a_wrong_key_is_refused_even_where_no_key_is_needed(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=keys(alice="alice's key"), trust_loopback=True) as api:
        wrong = await api.http.get("/eve/v1/info", headers=bearer("wrong"))
        right = await api.http.get("/eve/v1/info", headers=ALICE)
        none = await api.http.get("/eve/v1/info")

    assert [answer.status_code for answer in (wrong, right, none)] == [401, 200, 200]


# --- boot -------------------------------------------------------------------------------------------------------


def settings(**given: Any) -> Settings:
    return Settings.model_validate(given)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "api.example"])
def test_a_public_address_without_a_way_to_sign_in_is_refused_at_boot(host: str) -> None:
    with pytest.raises(Misconfigured, match="PERDURE_API_KEYS"):
        build_authenticators(settings(host=host))


def test_the_loopback_is_not_trusted_where_others_call() -> None:
    with pytest.raises(Misconfigured, match="PERDURE_TRUST_LOOPBACK"):
        build_authenticators(settings(host="0.0.0.0", api_keys=keys(alice="k"), trust_loopback=True))


@pytest.mark.parametrize(
    "text",
    ["alice", "alice=xyz", "alice=abcd", f"={'0' * 64}", f"a={'0' * 64}+role", f"a={'0' * 64}+=x", f"a={'0' * 64}+"],
)
def test_a_key_that_is_no_hash_is_refused_at_boot(text: str) -> None:
    with pytest.raises(Misconfigured, match="PERDURE_API_KEYS"):
        build_authenticators(settings(api_keys=text))


@pytest.mark.parametrize("missing", ["jwt_issuer", "jwt_audience", "jwt_jwks_url"])
def test_half_a_jwt_configuration_is_refused_at_boot(missing: str) -> None:
    given = {"jwt_issuer": "https://id.example", "jwt_audience": "perdure", "jwt_jwks_url": "https://id.example/jwks"}

    with pytest.raises(Misconfigured, match="belong together"):
        build_authenticators(settings(**(given | {missing: None})))
