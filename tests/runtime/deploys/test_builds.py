"""Two builds with different code, each in a worker process of its own: deployed, drained and rolled back."""

import asyncio
import re
from subprocess import CompletedProcess

import pytest

from perdure.protocol import names
from perdure.protocol.wire import JsonObject
from perdure.runtime.deploys.builds import Builds
from tests.support import commands
from tests.support.fleet import build_of, said
from tests.support.plugin import StackFactory
from tests.support.processes import Process
from tests.support.stack import Stack
from tests.support.talk import Talk, text, types
from tests.support.waiting import until

DEPLOYMENT = "shop"


class Release:
    """A stack whose workers have versions, and its operator."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._environment = {**stack.environment, "PERDURE_DEPLOYMENT": DEPLOYMENT}

    def start(self, build: str, module: str) -> Process:
        agents = f"tests.runtime.deploys.{module}:agents"
        versioned = {"PERDURE_DEPLOYMENT": DEPLOYMENT, "PERDURE_BUILD_ID": build, "PERDURE_AGENTS": agents}
        return self.stack.start_worker(versioned)

    async def announced(self, *builds: str) -> None:
        """Wait until workers of these builds have told the server what they read and serve."""
        of = Builds(await self.stack.client(), DEPLOYMENT, self.stack.settings.task_queue)

        async def known() -> bool:
            return all([(await of.facts(build)).is_known for build in builds])

        await until(known, "the builds to say what they read")

    async def runs(self, *words: str) -> "CompletedProcess[str]":
        return await asyncio.to_thread(commands.perdure, "deploy", *words, environment=self._environment)

    async def says(self, *words: str) -> list[str]:
        return await said(self.runs, *words)

    async def build(self, workflow_id: str) -> str:
        return await build_of(await self.stack.client(), workflow_id)

    async def state(self, session_id: str) -> JsonObject:
        """What the driver keeps, once it has seen the end of the turn that readers have seen."""
        handle = (await self.stack.client()).get_workflow_handle(session_id)
        states: list[JsonObject] = []

        async def idle() -> bool:
            states.append(await handle.query(names.DESCRIBE))
            return states[-1]["idle"]

        await until(idle, "the driver to wait")
        return states[-1]

    async def result(self, workflow_id: str) -> JsonObject:
        return await (await self.stack.client()).get_workflow_handle(workflow_id).result()


#: Each test runs on one store; on the other one it is slow.
POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)
SLOW_POSTGRES = pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.slow])
SLOW_SQLITE = pytest.param("sqlite", marks=pytest.mark.slow)


@pytest.fixture
def release(request: pytest.FixtureRequest, make_stack: StackFactory, database: str) -> Release:
    url = request.getfixturevalue("postgres_url") if database == "postgres" else None
    agents = "tests.runtime.deploys.build_1:agents"
    # Its deployment has the same name in each test.
    return Release(make_stack(temporal=None, workers=0, provider=True, agents=agents, database_url=url))


def results(events: list[JsonObject]) -> list[str]:
    return [str(event["data"]["result"]) for event in events if event["type"] == "action.result"]


@pytest.mark.parametrize("database", ["sqlite", SLOW_POSTGRES])
async def test_a_build_with_another_tool_a_field_more_and_an_agent_less(release: Release) -> None:
    stack = release.stack
    first = release.start("v1", "build_1")
    await release.says("promote", "v1")
    async with stack.talk() as asking, stack.talk() as plain, Talk(f"{stack.url}/agents/dropped") as dropped:
        await asking.create('call pay {"amount": 3} then call transfer {"amount": 3} then say settled')
        asked = (await asking.until_boundary())[-3:]
        assert await plain.say("say one") == "one"
        assert await dropped.say("say one") == "one"

        # Rolling forward.
        release.start("v2", "build_2")
        await release.announced("v1", "v2")
        promoted = await release.says("promote", "v2")
        (request,) = next(event for event in asked if event["type"] == "input.requested")["data"]["requests"]
        await asking.send(inputResponses=[{"requestId": request["requestId"], "optionId": "approve"}])
        settled = await asking.until_boundary()
        assert [await release.build(f"{asking.session_id}/turn/1"), text(settled)] == ["v2", "settled"]
        drained = await release.says("drain", "v1")
        builds = [await release.build(each.session_id) for each in (asking, plain, dropped)]
        assert first.terminate() == 0
        assert await plain.say("say two") == "two"
        await dropped.send("say held")
        attention = await dropped.until("session.attention", dropped.cursor)
        grown = await release.state(plain.session_id)

        # Rolling back: what v2 wrote is read by v1, and what it does not know is kept.
        release.start("v1", "build_1")
        await release.says("promote", "v1")
        await release.says("drain", "v2")
        held = await dropped.until_boundary()
        assert await plain.say("say three") == "three"
        kept = await release.state(plain.session_id)
        last = await release.result(f"{plain.session_id}/turn/2")
        back = [await release.build(each.session_id) for each in (asking, plain, dropped)]

    assert promoted[0].startswith("warning: build v2 does not serve dropped.")
    assert "The tool 'pay' no longer exists." in results(settled)[0]
    assert "'transferred': 3" in results(settled)[1]
    assert drained[-1] == "Nothing is left on build v1: its workers may stop."
    assert builds == ["v2"] * 3
    assert attention[-1]["data"]["code"] == "AGENT_GONE"
    assert (text(held), "session.recovered" in types(held)) == ("held", True)
    assert (grown["mood"], kept["mood"]) == ("calm", "calm")
    assert last["snapshot"]["data"]["tone"] == "warm"
    assert back == ["v1"] * 3


@pytest.mark.parametrize("database", [SLOW_SQLITE, POSTGRES])
async def test_a_build_with_a_newer_state_and_the_way_back(release: Release) -> None:
    stack = release.stack
    release.start("v1", "build_1")
    await release.says("promote", "v1")
    async with stack.talk() as parked, stack.talk() as touched, stack.talk() as fresh:
        assert await parked.say("say one") == "one"
        assert await touched.say("say one") == "one"

        release.start("v3", "build_3")
        await release.announced("v1", "v3")
        ramped = await release.runs("ramp", "v3", "--percent", "50")
        await release.says("promote", "v3")
        await release.says("drain", "v1")
        assert await touched.say("say two") == "two"
        lifted = await release.state(parked.session_id)

        # Back to a build that cannot read what was written: nothing moves by itself, and nothing is lost.
        promoted = await release.says("promote", "v1")
        refused = await release.runs("drain", "v3")
        stays = await release.build(parked.session_id)
        await touched.send("say three")
        attention = await touched.until("session.attention", touched.cursor)
        assert await fresh.say("say new") == "new"

        # Forward again.
        await release.says("promote", "v3")
        drained = await release.says("drain", "v1")
        recovered = await touched.until_boundary()
        assert await parked.say("say two") == "two"
        assert await fresh.say("say two") == "two"

    assert "do not read each other's state: one writes session state of version 2 (it reads 1)" in ramped.stderr
    assert (lifted["version"], lifted["lifted"]) == (2, True)
    assert re.match(r"warning: build v3 writes session state of version 2 \(it reads 1\)\.", promoted[0])
    assert re.match(r"warning: build v3 writes turn snapshots of version 2 \(it reads 1\)\.", promoted[1])
    assert "No session of build v3 can move: it writes session state of version 2" in refused.stderr
    assert stays == "v3"
    assert attention[-1]["data"]["code"] == "UNREADABLE_STATE"
    assert drained[-1] == "Nothing is left on build v1: its workers may stop."
    assert (text(recovered), "session.recovered" in types(recovered)) == ("three", True)


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", POSTGRES])
async def test_a_message_to_a_build_without_workers_is_accepted_reported_and_read(release: Release) -> None:
    stack = release.stack
    worker = release.start("v1", "build_1")
    await release.says("promote", "v1")
    async with stack.talk() as talk:
        assert await talk.say("say one") == "one"
        release.start("v2", "build_2")
        await release.says("promote", "v2")
        assert worker.terminate() == 0

        # Each API looks every 15 to 30 seconds.
        await until(lambda: "1 sessions wait for a worker of build v1" in stack.apis[0].output, "the alarm", 60)
        content = {"continuationToken": talk.token, "message": "say late"}
        accepted = await talk.http.post(f"/eve/v1/session/{talk.session_id}", json=content)
        attention = await talk.until("session.attention", talk.cursor)
        shown = (await talk.http.get(f"/v1/sessions/{talk.session_id}")).json()
        await release.says("drain", "v1", "--take-over")
        late = await talk.until_boundary()
        after = (await talk.http.get(f"/v1/sessions/{talk.session_id}")).json()

    assert (accepted.status_code, accepted.headers["x-perdure-delayed"]) == (200, "true")
    assert attention[-1]["data"]["code"] == "BUILD_GONE"
    assert (shown["status"], after["status"]) == ("needs_attention", "waiting")
    assert (text(late), "session.recovered" in types(late)) == ("late", True)
