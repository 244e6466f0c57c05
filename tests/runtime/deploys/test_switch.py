"""`perdure deploy status`, `promote` and `ramp`: new work is switched from one build to another."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.protocol import names
from perdure.runtime.deploys import builds as of_builds
from perdure.runtime.deploys.builds import KINDS, Builds, Routing
from perdure.session import state
from perdure.session.state import Chain
from tests.support import commands
from tests.support.fleet import Fleet, Operator, build_of
from tests.support.fleet import fleet as fleet
from tests.support.fleet import operator as operator
from tests.support.workflows import Bench, Outside
from tests.support.workflows import bench as bench


async def test_promote_switches_turns_and_sessions_and_a_repetition_changes_nothing(
    bench: Bench, fleet: Fleet, operator: Operator
) -> None:
    outside = Outside()
    async with fleet.build("v1", outside):
        promoted = await operator.says("promote", "v1")
        again = await operator.says("promote", "v1")
        session = await bench.start(outside)
        await session.deliver("dlv_1")
        await session.consumed("dlv_1")

        assert promoted == ["turns: build v1 is current", "sessions: build v1 is current"]
        assert again == ["turns: build v1 was current", "sessions: build v1 was current"]
        assert await build_of(bench.client, session.handle.id) == "v1"


async def test_promote_refuses_a_build_without_workers_and_switches_nothing(fleet: Fleet, operator: Operator) -> None:
    async with fleet.build("v1", Outside()):
        await operator.says("promote", "v1")
        refused = await operator.runs("promote", "v2", "--wait", "0")

    assert refused.returncode == 1
    assert re.fullmatch(r"perdure: No worker of build v2 polls test-\w+-turns, .* Nothing was .*\n", refused.stderr)
    assert [(await operator.builds.routing(kind)).current for kind in KINDS] == ["v1", "v1"]


async def test_status_shows_each_build_with_its_work(bench: Bench, fleet: Fleet, operator: Operator) -> None:
    outside = Outside()
    assert await operator.says("status") == [f"No worker of deployment {fleet.deployment} has polled yet."]
    async with fleet.build("v2", Outside()):
        async with fleet.build("v1", outside):
            await operator.says("promote", "v1")
            session = await bench.start(outside)
            await session.deliver("dlv_1")
            await session.consumed("dlv_1")
            await operator.says("promote", "v2")
            both = await operator.says("status")
        stuck = await operator.says("status")

    assert [line.split() for line in both[1:]] == [
        ["v1", "draining", "draining", "1", "1", "0"],
        ["v2", "current", "current", "1", "0", "0"],
    ]
    assert [line.split() for line in stuck[1:2]] == [["v1", "draining", "draining", "0", "1", "0"]]
    assert stuck[3:] == [
        "stuck: build v1 has 1 open sessions, 0 running turns and no worker: "
        "start one, or run `perdure deploy drain v1 --take-over`"
    ]


async def test_a_switch_that_temporal_never_calls_finished_is_finished_when_all_queues_know(
    fleet: Fleet, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing = Builds.routing

    async def never_settled(builds: Builds, kind: str) -> Routing:
        return replace(await routing(builds, kind), settled=False)

    async with fleet.build("v1", Outside()), fleet.build("v2", Outside()):
        await operator.says("promote", "v1")
        monkeypatch.setattr(Builds, "routing", never_settled)
        # Repeated where the machine is slow.
        promoted = await operator.says("promote", "v2", "--wait", "4")
        monkeypatch.setattr(Builds, "queues_know", do_not_know)
        unknown = await operator.runs("promote", "v2", "--wait", "0.2")

    assert promoted[-1].startswith("sessions: build v2 ")
    assert "Run the same command again" in unknown.stderr


async def do_not_know(builds: Builds, kind: str, routing: Routing) -> bool:
    del builds, kind, routing
    return False


async def test_a_ramp_is_changed_ended_and_superseded(fleet: Fleet, operator: Operator) -> None:
    async with fleet.build("v1", Outside()), fleet.build("v2", Outside()):
        early = await operator.runs("ramp", "v2", "--percent", "10")
        await operator.says("promote", "v1")
        refused = await operator.runs("ramp", "v1", "--percent", "10")
        ramped = await operator.says("ramp", "v2", "--percent", "10")
        shown = [await operator.builds.routing(kind) for kind in KINDS]
        await operator.says("ramp", "v2", "--percent", "0")
        ended = [await operator.builds.routing(kind) for kind in KINDS]
        await operator.says("ramp", "v2", "--percent", "50")
        # Back to the build that is current: no turn starts on the other one any more.
        await operator.says("promote", "v1")
        back = [await operator.builds.routing(kind) for kind in KINDS]

    assert early.stderr == "perdure: No build is current yet: run `perdure deploy promote v2`.\n"
    assert ramped[0] == "turns: 10 % of what starts goes to build v2"
    assert {(each.ramping, each.percent) for each in shown} == {("v2", 10.0)}
    assert {each.ramping for each in (*ended, *back)} == {""}
    assert refused.stderr == "perdure: Build v1 is current already: all new work starts on it.\n"


async def test_promote_warns_of_what_the_build_cannot_read_or_does_not_serve(
    fleet: Fleet, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet.build("v1", Outside()), fleet.build("v2", Outside()):
        await operator.says("promote", "v2")
        await operator.announce("v1", "kept")
        monkeypatch.setattr(state, "SESSION", Chain("session state", [dict]))
        await operator.announce("v2", "kept", "added")

        ramped = await operator.runs("ramp", "v1", "--percent", "10")
        said = await operator.says("promote", "v1")

    assert ramped.returncode == 1
    assert "do not read each other's state: one writes session state of version 2 (it reads 1)" in ramped.stderr
    assert said[0].startswith("warning: build v2 writes session state of version 2 (it reads 1). Sessions that have")
    assert said[1].startswith("warning: build v1 does not serve added. Sessions of these agents need attention")
    assert said[2:] == ["turns: build v1 is current", "sessions: build v1 is current"]


async def test_sessions_of_unversioned_workers_move_to_the_first_build(
    bench: Bench, fleet: Fleet, operator: Operator
) -> None:
    before, after = Outside(), Outside()
    async with bench.working(before):
        sessions = [await bench.start(before) for _ in range(2)]
        for number, session in enumerate(sessions):
            await session.deliver(f"dlv_{number}")
        await before.until(lambda: len(before.consumed) == 2)

    async with fleet.build("v1", after):
        await sessions[0].deliver("dlv_waits")
        await operator.says("promote", "v1")
        await sessions[1].deliver("dlv_comes")
        await after.until(lambda: set(after.consumed) == {"dlv_waits", "dlv_comes"})

        assert [await build_of(bench.client, session.handle.id) for session in sessions] == ["v1", "v1"]


def test_without_a_deployment_there_is_nothing_to_switch(bench: Bench) -> None:
    address = bench.client.service_client.config.target_host
    refused = commands.perdure("deploy", "status", environment={"PERDURE_TEMPORAL_ADDRESS": address})

    assert refused.returncode == 1
    assert refused.stderr.startswith("perdure: PERDURE_DEPLOYMENT names the deployment; it is not set.")


def test_the_queues_of_a_build_are_those_that_its_workers_poll() -> None:
    assert {queue for queues in of_builds.QUEUES.values() for queue, _ in queues} == {
        names.SESSIONS_QUEUE,
        names.TURNS_QUEUE,
        names.MODELS_QUEUE,
        names.TOOLS_QUEUE,
    }


def commands_of_the_page(heading: str) -> list[list[str]]:
    """The `perdure deploy` commands under a heading of the page, in order."""
    page = (Path(__file__).parents[3] / "docs" / "deploying.md").read_text()
    section = page.partition(f"#### {heading}")[2].partition("\n####")[0]
    return [line.split() for line in re.findall(r"^perdure deploy (.*)$", section, re.MULTILINE)]


async def test_the_commands_of_the_page_work_in_its_order(bench: Bench, fleet: Fleet, operator: Operator) -> None:
    outside = Outside()
    async with fleet.current("v1", outside), fleet.build("v2", outside), fleet.build("v3", outside):
        session = await bench.start(outside)
        await session.deliver("dlv_1")
        await session.consumed("dlv_1")
        builds: list[str] = []
        for heading in ("Rolling", "Rainbow", "Rollback"):
            for words in commands_of_the_page(heading):
                await operator.says(*words)
            builds.append(await build_of(bench.client, session.handle.id))
            await session.deliver(f"dlv_{heading}")
            await outside.until(lambda expected=f"dlv_{heading}": expected in outside.consumed)
        known = {kind: await operator.builds.routing(kind) for kind in KINDS}

    assert builds[0] == "v2"
    # A session that is parked moves with its next delivery, or with a drain.
    assert builds[1:] == ["v2", "v2"]
    assert {(each.current, each.ramping) for each in known.values()} == {("v2", "")}
