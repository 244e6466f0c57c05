"""Callers of sessions while everything around them fails, who write down each response."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import httpx2
import psycopg

from tests.support.chaos.evidence import Cancel, Deletion, Fork, Json, Post, Try
from tests.support.chaos.scripts import Script, call, calls, drip, question, say
from tests.support.chaos.world import World, unique

_SESSION = "/eve/v1/session"

#: How long one request may last before the caller tries again, so that the first try and the next one meet.
_PATIENCE = (1.0, 3.0)
#: How long a caller tries at all.
_PERSISTENCE = 40.0
#: How often a caller takes 503 for the last word.
_RESIGNS = 0.3

#: How many deliveries may wait, of sessions that wait for no answer, before callers hold back: people wait for
#: answers, and what comes after hours in a queue shows nothing new.
_BACKLOG = 200

_TOOLS = ("charge", "charge_in_thread", "put", "look")
_MOST_FOLLOWED = 10

Mode: TypeAlias = Literal["conversation", "task"]


@dataclass(frozen=True)
class Known:
    """A session that a caller may deliver to."""

    session_id: str
    token: str
    mode: Mode


@dataclass
class Observed:
    """All that callers have done, and the responses."""

    posts: list[Post] = field(default_factory=list[Post])
    cancels: list[Cancel] = field(default_factory=list[Cancel])
    forks: list[Fork] = field(default_factory=list[Fork])
    deletions: list[Deletion] = field(default_factory=list[Deletion])
    #: What readers were given while it happened, by reader: each began at index 0 and came again when it was cut off.
    followed: list[tuple[str, list[Json]]] = field(default_factory=list[tuple[str, list[Json]]])


class Callers:
    """A crowd with one book."""

    def __init__(self, world: World, chance: random.Random, seconds: float) -> None:
        self._world = world
        self._chance = chance
        self._end = time.monotonic() + seconds
        self._clients: dict[str, httpx2.AsyncClient] = {}
        self._followers: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self.observed = Observed()

    async def run(self, number: int) -> None:
        """All of them, until the time has passed; each ends what it has begun."""
        watching = asyncio.create_task(self._watch_the_backlog())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(number):
                    group.create_task(SoakCaller(self, random.Random(self._chance.random())).live())
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def room(self) -> None:
        """Wait while too much waits already."""
        await self._room.wait()

    async def _watch_the_backlog(self) -> None:
        while True:
            # The database may be dead just now; then the number is unknown, and all continue.
            with contextlib.suppress(OSError, psycopg.Error):
                moving = await asyncio.to_thread(self._world.moving)
                (self._room.set if self.ended or len(moving.due) < _BACKLOG else self._room.clear)()
            await asyncio.sleep(1)

    @property
    def ended(self) -> bool:
        return time.monotonic() > self._end

    def follow(self, session_id: str) -> None:
        """Read the session from now on, if not too many are read already."""
        if len(self._followers) < _MOST_FOLLOWED:
            task = asyncio.create_task(self._follow(session_id))
            self._followers.add(task)
            task.add_done_callback(self._followers.discard)

    async def close(self) -> None:
        for follower in list(self._followers):
            follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()

    async def ask(
        self, path: str, body: Json | None, key: str | None, patience: float, method: str = "POST"
    ) -> tuple[Try, httpx2.Response]:
        """One request to any API that lives; what became of it."""
        began = time.time()
        headers = {"idempotency-key": key} if key else {}
        response = httpx2.Response(0)
        try:
            async with asyncio.timeout(patience):
                response = await self.any_api().request(method, path, json=body, headers=headers)
        except TimeoutError:
            return Try(began, time.time(), None, "timeout"), response
        except httpx2.ConnectError:
            return Try(began, time.time(), None, "refused"), response
        except httpx2.HTTPError:
            return Try(began, time.time(), None, "broken"), response
        receipt = _json(response)
        return (
            Try(
                began,
                time.time(),
                response.status_code,
                code=str(receipt.get("code", "")),
                session_id=str(receipt.get("sessionId", "")),
                delivery_id=receipt.get("deliveryId"),
                delayed=response.headers.get("x-perdure-delayed") == "true",
                outcomes=tuple(
                    (each["requestId"], each["status"], each.get("optionId")) for each in _outcomes(receipt)
                ),
            ),
            response,
        )

    def any_api(self) -> httpx2.AsyncClient:
        url = self._chance.choice(self._world.living_apis)
        if url not in self._clients:
            self._clients[url] = httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False)
        return self._clients[url]

    async def _follow(self, session_id: str) -> None:
        read: list[Json] = []
        self.observed.followed.append((session_id, read))
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if await self._read(session_id, read):
                    return
            await asyncio.sleep(0.2)

    async def _read(self, session_id: str, read: list[Json]) -> bool:
        """Read on; whether the session has ended."""
        path = f"{_SESSION}/{session_id}/stream"
        async with self.any_api().stream("GET", path, params={"startIndex": len(read)}) as response:
            if response.status_code == 404:
                # It was deleted.
                return True
            if response.status_code != 200:
                return False
            async for line in response.aiter_lines():
                if not line.strip():
                    continue
                read.append(json.loads(line))
        return True


class SoakCaller:
    """One of them: does at random what one can do with sessions."""

    def __init__(self, callers: Callers, chance: random.Random) -> None:
        self._callers = callers
        self._chance = chance
        self._sessions: list[Known] = []

    async def live(self) -> None:
        while not self._callers.ended:
            await self._callers.room()
            await self._some_act()()
            await asyncio.sleep(self._chance.expovariate(2.5))

    def _some_act(self) -> Callable[[], Awaitable[None]]:
        acts: dict[Callable[[], Awaitable[None]], float] = {
            self._begin: 3,
            self._begin_task: 2,
            self._deliver_one: 3,
            self._deliver_at_once: 1.5,
            self._deliver_and_stop: 2,
            self._stop: 1.5,
            self._answer: 5,
            self._control: 1,
            self._fork: 1.5,
            self._delete: 0.5,
        }
        if not self._sessions:
            return self._begin
        return self._chance.choices(list(acts), list(acts.values()))[0]

    # --- acts -----------------------------------------------------------------------------------------------

    async def _begin(self, mode: Mode = "conversation") -> None:
        script = self._script(asks=mode == "conversation")
        post = self._post("create", "", script)
        await self._persist(post, _SESSION, {"message": script.message, "mode": mode}, mode)

    async def _begin_task(self) -> None:
        await self._begin("task")

    async def _deliver_one(self) -> None:
        await self._deliver(self._chance.choice(self._sessions))

    async def _deliver_at_once(self) -> None:
        """Several messages for one session, which consumes one at a time."""
        session = self._chance.choice(self._sessions)
        await asyncio.gather(*(self._deliver(session) for _ in range(self._chance.randint(2, 4))))

    async def _deliver_and_stop(self) -> None:
        """A cancel that comes before the turn, at its begin, while it runs, or when it has parked."""
        session = self._chance.choice(self._sessions)
        delivering = asyncio.create_task(self._deliver(session))
        await asyncio.sleep(self._chance.choice([0, 0.05, 0.2, 0.5, 1.0]))
        await self._cancel(session)
        await delivering

    async def _stop(self) -> None:
        await self._cancel(self._chance.choice(self._sessions))

    async def _answer(self) -> None:
        """Answer what its sessions ask, all of it or a part."""
        for session in list(self._sessions):
            asked = await self._asked(session)
            if asked:
                some = self._chance.sample(asked, self._chance.randint(1, len(asked)))
                responses = [{"requestId": each["requestId"], "optionId": self._option(each)} for each in some]
                body = {"continuationToken": session.token, "inputResponses": responses}
                await self._persist(self._post("answer", session.session_id), f"{_SESSION}/{session.session_id}", body)

    async def _control(self) -> None:
        """Have the model's history summarised, or dropped."""
        session = self._chance.choice(self._sessions)
        kind: Literal["compact", "clear"] = self._chance.choice(["compact", "clear"])
        await self._persist(self._post(kind, session.session_id), f"{_SESSION}/{session.session_id}/{kind}", {})

    async def _fork(self) -> None:
        """Go on from one of the last turns of a session, or from the middle of that turn."""
        parent = self._chance.choice(self._sessions)
        shown: Json = {}
        with contextlib.suppress(TimeoutError, httpx2.HTTPError):
            async with asyncio.timeout(3):
                shown = _json(await self._callers.any_api().get(f"/v1/sessions/{parent.session_id}"))
        last = shown.get("counts", {}).get("turns", 0) - 1
        place: Json = {"turn": max(0, last - self._chance.randrange(3))}
        if self._chance.random() < 0.5:
            place = {**place, "step": self._chance.randrange(2)}
        offered = await self._fork_at(parent, place, offered=False)
        if offered is not None:
            await self._fork_at(parent, offered, offered=True)

    async def _fork_at(self, parent: Known, place: Json, *, offered: bool) -> Json | None:
        """Fork the session there; the place that is offered instead, if one is."""
        fork = Fork(parent.session_id, place, unique("key"), offered)
        self._callers.observed.forks.append(fork)
        response = await self._repeat(fork.tries, f"/v1/sessions/{parent.session_id}/fork", place, fork.key)
        if response.is_success:
            body = response.json()
            self._meet(Known(body["sessionId"], body["continuationToken"], parent.mode))
        return _json(response).get("nearest") if response.status_code == 409 else None

    async def _delete(self) -> None:
        """Delete a session, whatever it does."""
        session = self._sessions.pop(self._chance.randrange(len(self._sessions)))
        deletion = Deletion(session.session_id)
        self._callers.observed.deletions.append(deletion)
        await self._repeat(deletion.tries, f"/v1/sessions/{session.session_id}", None, key=None, method="DELETE")

    # --- requests -------------------------------------------------------------------------------------------

    async def _deliver(self, session: Known) -> None:
        script = self._script(asks=session.mode == "conversation")
        body = {"continuationToken": session.token, "message": script.message}
        post = self._post("message", session.session_id, script)
        await self._persist(post, f"{_SESSION}/{session.session_id}", body)

    def _post(
        self,
        kind: Literal["create", "message", "answer", "compact", "clear"],
        session_id: str,
        script: Script | None = None,
    ) -> Post:
        message, answer = (script.message, script.answer) if script else ("", "")
        post = Post(kind, unique("key"), session_id, message, answer)
        self._callers.observed.posts.append(post)
        return post

    async def _persist(self, post: Post, path: str, body: Json, mode: Mode = "conversation") -> None:
        response = await self._repeat(post.tries, path, body, post.key)
        if response.is_success and post.kind == "create":
            receipt = response.json()
            self._meet(Known(receipt["sessionId"], receipt["continuationToken"], mode))

    async def _repeat(
        self, tries: list[Try], path: str, body: Json | None, key: str | None, method: str = "POST"
    ) -> httpx2.Response:
        """Send it until it is answered, or until this caller has had enough of it; the last response."""
        give_up = time.monotonic() + _PERSISTENCE
        while True:
            tried, response = await self._callers.ask(path, body, key, self._chance.uniform(*_PATIENCE), method)
            tries.append(tried)
            resigned = tried.status == 503 and self._chance.random() < _RESIGNS
            if tried.status not in (None, 503) or resigned or time.monotonic() > give_up:
                return response
            if tried.problem != "timeout":
                await asyncio.sleep(self._chance.uniform(0.1, 0.7))

    def _meet(self, session: Known) -> None:
        self._sessions.append(session)
        del self._sessions[:-6]
        if self._chance.random() < 1 / 3:
            self._callers.follow(session.session_id)

    async def _cancel(self, session: Known) -> None:
        tried, response = await self._callers.ask(
            f"{_SESSION}/{session.session_id}/cancel", None, None, self._chance.uniform(*_PATIENCE)
        )
        status = _json(response).get("status") if tried.status == 200 else None
        self._callers.observed.cancels.append(Cancel(session.session_id, tried, status))

    async def _asked(self, session: Known) -> list[Json]:
        params = {"status": "open", "sessionId": session.session_id}
        with contextlib.suppress(TimeoutError, httpx2.HTTPError):
            async with asyncio.timeout(3):
                response = await self._callers.any_api().get("/v1/inputs", params=params)
                return _json(response).get("inputs", [])
        return []

    def _option(self, request: Json) -> str:
        if request["kind"] == "question":
            return self._chance.choice(request["options"])["id"]
        return "approve" if self._chance.random() < 0.75 else "deny"

    def _script(self, *, asks: bool) -> Script:
        chance = self._chance
        kinds: list[Callable[[], Script]] = [
            say,
            lambda: drip(words=chance.randrange(2, 40)),
            lambda: call(chance.choice(_TOOLS)),
            lambda: calls(*chance.choices(_TOOLS, k=2)),
        ]
        waiting: list[Callable[[], Script]] = [
            lambda: call("pay"),
            lambda: calls("pay", "charge"),
            lambda: calls("pay", "pay"),
            question,
        ]
        return chance.choice(waiting if asks and chance.random() < 1 / 3 else kinds)()


@contextlib.asynccontextmanager
async def crowd(world: World, chance: random.Random, seconds: float) -> AsyncGenerator[Callers]:
    callers = Callers(world, chance, seconds)
    try:
        yield callers
    finally:
        await callers.close()


def _json(response: httpx2.Response) -> Json:
    """The body, if it is one of ours: all of them are objects."""
    try:
        return response.json()
    except ValueError:
        return {}


def _outcomes(receipt: Json) -> list[Json]:
    return receipt.get("inputs", [])
