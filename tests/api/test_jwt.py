"""Tokens of an identity provider, against one that publishes its keys on this machine."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from joserfc import jws
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from api.auth import Credentials, Loopback
from api.jwt import JwksKeys, Jwt
from perdure.agents import responders
from perdure.protocol.deliveries import LOCAL
from perdure.session.inputs import may_answer
from tests.api.served import URL, Api, serving
from tests.api.web import web

ISSUER, AUDIENCE = "https://id.example", "perdure"


def ec(kid: str) -> ECKey:
    return ECKey.generate_key("P-256", {"kid": kid})


@dataclass
class Provider:
    """An identity provider: its keys, and how often it was asked for them."""

    keys: list[Key] = field(default_factory=lambda: [ec("one")])
    asked: int = 0
    broken: bool = False
    url: str = ""
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.answers.set()

    async def jwks(self, _: Request) -> Response:
        self.asked += 1
        await self.answers.wait()
        if self.broken:
            return Response(status_code=500)
        return JSONResponse({"keys": [key.as_dict(private=False) for key in self.keys]})

    def token(self, key: Key | None = None, alg: str = "ES256", **claims: Any) -> str:
        key = key or self.keys[0]
        now = int(time.time())
        filled = {"iss": ISSUER, "aud": AUDIENCE, "sub": "user-1", "exp": now + 60, **claims}
        filled = {name: value for name, value in filled.items() if value is not None}
        # As ASCII: halves of characters are escaped, which some providers let pass.
        return jws.serialize_compact({"alg": alg, "kid": key.kid}, json.dumps(filled).encode(), key, algorithms=[alg])


@dataclass
class Guarded:
    api: Api
    provider: Provider

    async def get(self, token: str) -> httpx2.Response:
        return await self.api.http.get("/eve/v1/info", headers={"authorization": f"Bearer {token}"})


@pytest_asyncio.fixture
async def provider() -> AsyncGenerator[Provider]:
    provider = Provider()
    async with web(Router([Route("/jwks", provider.jwks)])) as url:
        provider.url = f"{url}/jwks"
        yield provider


@pytest_asyncio.fixture
async def guarded(provider: Provider, tmp_path: Path) -> AsyncGenerator[Guarded]:
    tokens = Jwt(JwksKeys(provider.url, pause=0), issuer=ISSUER, audience=AUDIENCE)
    async with serving(tmp_path, authenticators=[tokens, Loopback()]) as api:
        yield Guarded(api, provider)


async def test_a_user_signs_in_with_a_token(guarded: Guarded) -> None:
    headers = {"authorization": f"Bearer {guarded.provider.token(email='u@example.com')}"}

    created = await guarded.api.http.post(URL, json={"message": "x"}, headers=headers)

    row = await guarded.api.store.session(created.json()["sessionId"])
    assert row is not None
    assert (row.principal.principal_id, row.principal.principal_type) == ("user-1", "user")
    assert (row.principal.issuer, row.principal.subject) == (ISSUER, "user-1")
    assert row.principal.attributes == {"email": "u@example.com"}


@pytest.mark.parametrize(
    ("claims", "roles"),
    [
        ({"role": "support"}, ["support"]),
        ({"roles": ["support", "boss"]}, ["support", "boss"]),
        ({"scope": "openid support"}, ["openid", "support"]),
        ({"role": "boss", "roles": ["boss"], "scope": "pay"}, ["boss", "pay"]),
    ],
)
async def test_roles_and_scopes_count_as_roles(guarded: Guarded, claims: dict[str, Any], roles: list[str]) -> None:
    headers = {"authorization": f"Bearer {guarded.provider.token(**claims)}"}

    created = await guarded.api.http.post(URL, json={"message": "x"}, headers=headers)

    row = await guarded.api.store.session(created.json()["sessionId"])
    assert row is not None
    assert row.principal.attributes["role"] == roles
    assert may_answer(responders.role(roles[-1]), row.principal, LOCAL)


async def test_the_claims_that_hold_roles_can_be_named(provider: Provider) -> None:
    names = ("realm_access.roles", "https://example.com/roles")
    tokens = Jwt(JwksKeys(provider.url), issuer=ISSUER, audience=AUDIENCE, role_claims=names)
    claims: dict[str, Any] = {"realm_access": {"roles": ["a"]}, "https://example.com/roles": ["b"], "roles": ["c"]}

    token = provider.token(**claims)
    principal = await tokens(Credentials(Headers({"authorization": f"Bearer {token}"})))

    assert principal is not None
    assert principal.attributes["role"] == ["a", "b"]


@pytest.mark.parametrize("header", [b"[" * 6000, b"[]", b"5", b'{"alg":[]}', b'{"alg":"RS256","kid":{}}', b"\xff"])
async def test_a_token_that_cannot_be_read_is_refused(guarded: Guarded, header: bytes) -> None:
    token = ".".join((base64.urlsafe_b64encode(header).decode().rstrip("="), "e30", "AA"))

    assert (await guarded.get(token)).status_code == 401


@pytest.mark.parametrize(
    ("key", "alg"),
    [
        (RSAKey.generate_key(2048, {"kid": "r"}), "RS256"),
        (ec("e"), "ES256"),
        (OKPKey.generate_key("Ed25519", {"kid": "o"}), "EdDSA"),
        (OKPKey.generate_key("Ed25519", {"kid": "o"}), "Ed25519"),
    ],
)
async def test_each_accepted_algorithm_works(guarded: Guarded, key: Key, alg: str) -> None:
    guarded.provider.keys = [key]

    assert (await guarded.get(guarded.provider.token(alg=alg))).status_code == 200


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://other.example"},
        {"iss": None},
        {"aud": "other"},
        {"aud": None},
        {"exp": 1},
        {"exp": None},
        {"sub": None},
        {"sub": ""},
        pytest.param({"nbf": int(time.time()) + 3600}, id="nbf=in an hour"),
    ],
)
async def test_a_token_with_a_wrong_claim_is_refused(guarded: Guarded, claims: dict[str, Any]) -> None:
    answer = await guarded.get(guarded.provider.token(**claims))

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    assert answer.json() == {"code": "unauthorized", "error": "The bearer token is not valid.", "ok": False}


async def test_clocks_may_differ_by_half_a_minute(guarded: Guarded) -> None:
    now = int(time.time())

    late, too_late = [await guarded.get(guarded.provider.token(exp=now - ago)) for ago in (20, 40)]

    assert (late.status_code, too_late.status_code) == (200, 401)


async def test_a_token_signed_by_another_issuer_is_refused(guarded: Guarded) -> None:
    assert (await guarded.get(guarded.provider.token(ec("one")))).status_code == 401


async def test_a_symmetric_signature_is_refused(guarded: Guarded) -> None:
    forged = OctKey.import_key("0" * 64, {"kid": "one"})

    assert (await guarded.get(guarded.provider.token(forged, alg="HS256"))).status_code == 401


async def test_an_unsigned_token_is_refused(guarded: Guarded) -> None:
    # {"alg":"none","kid":"one"} . {"sub":"user-1"} .
    assert (await guarded.get("eyJhbGciOiJub25lIiwia2lkIjoib25lIn0.eyJzdWIiOiJ1c2VyLTEifQ.")).status_code == 401


@pytest.mark.parametrize("token", ["a.b.c", "..", "e30.e30.", "not a jwt"])
async def test_a_malformed_token_is_refused(guarded: Guarded, token: str) -> None:
    assert (await guarded.get(token)).status_code == 401


async def test_keys_are_fetched_once(guarded: Guarded) -> None:
    for _ in range(5):
        assert (await guarded.get(guarded.provider.token())).status_code == 200

    assert guarded.provider.asked == 1


async def test_a_new_key_is_found_when_a_token_names_it(guarded: Guarded) -> None:
    await guarded.get(guarded.provider.token())
    guarded.provider.keys = [ec("two")]

    assert (await guarded.get(guarded.provider.token())).status_code == 200
    assert guarded.provider.asked == 2


async def test_unknown_keys_do_not_make_us_ask_without_end(provider: Provider) -> None:
    now = 0.0
    keys = JwksKeys(provider.url, pause=10, clock=lambda: now)
    for kid in ("one", "unknown", "unknown", "other"):
        await keys.named(kid)
    asked_at_once = provider.asked

    now = 11.0
    await keys.named("unknown")

    assert (asked_at_once, provider.asked) == (1, 2)


async def test_known_keys_outlive_an_outage_of_the_provider(provider: Provider) -> None:
    now = 0.0
    keys = JwksKeys(provider.url, lifetime=100, pause=10, clock=lambda: now)
    await keys.named("one")
    provider.broken, now = True, 1000.0

    assert [key.kid for key in await keys.named("one")] == ["one"]


async def test_without_any_keys_the_caller_may_try_again(guarded: Guarded) -> None:
    guarded.provider.broken = True

    answer = await guarded.get(guarded.provider.token())

    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")


@pytest.mark.alone
async def test_a_provider_that_does_not_answer_delays_no_caller_whose_key_is_known(provider: Provider) -> None:
    now = 0.0
    keys = JwksKeys(provider.url, lifetime=10, clock=lambda: now)
    await keys.named("one")
    provider.answers.clear()
    now = 20.0

    began = time.monotonic()
    await asyncio.gather(*(keys.named("one") for _ in range(5)))
    first = time.monotonic() - began
    # The first second of it has passed: no request waits for this provider any more.
    began = time.monotonic()
    await keys.named("one")
    second = time.monotonic() - began
    provider.answers.set()

    assert first < 3
    assert second < 0.5


async def test_keys_that_come_late_are_used(provider: Provider) -> None:
    now = 0.0
    keys = JwksKeys(provider.url, lifetime=10, clock=lambda: now)
    await keys.named("one")
    provider.answers.clear()
    now = 20.0
    await keys.named("one")

    provider.keys.append(ec("two"))
    provider.answers.set()
    found = await keys.named("two")

    assert [key.kid for key in found] == ["one", "two"]
    assert provider.asked == 2


@pytest.mark.parametrize("subject", ["می\u200cخواهم", "山田\u3000花子", "ada\u00a0b"])
async def test_a_subject_with_more_than_letters_is_a_principal(guarded: Guarded, subject: str) -> None:
    token = guarded.provider.token(sub=subject)

    answer = await guarded.api.http.post(URL, json={"message": "hi"}, headers={"authorization": f"Bearer {token}"})

    assert answer.status_code == 202


@pytest.mark.parametrize("claims", [{"sub": "\ud800"}, {"sub": "a\0b"}])
async def test_a_subject_that_is_no_text_is_no_principal(guarded: Guarded, claims: dict[str, Any]) -> None:
    token = guarded.provider.token(**claims)

    answer = await guarded.api.http.post(URL, json={"message": "hi"}, headers={"authorization": f"Bearer {token}"})

    assert answer.status_code == 401
