"""Switches new work from one build to another: promote, ramp, and so roll back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic

from temporalio.api.workflowservice.v1 import (
    SetWorkerDeploymentCurrentVersionRequest,
    SetWorkerDeploymentRampingVersionRequest,
)

from perdure.errors import Invalid, NoWorker, Unavailable
from perdure.protocol import names

from .builds import KINDS, QUEUES, Builds, Routing, called

Say = Callable[[str], None]

#: Seconds between two looks at the server.
_PAUSE = 0.1
#: As the server shows who switched.
_IDENTITY = "perdure deploy"


async def promote(builds: Builds, build: str, *, patience: float, say: Say) -> None:
    """Make the build the current one: of the turns first, then of the sessions. Idempotent; ends every ramp."""
    await _wait_for_workers(builds, build, patience)
    for warning in await warnings(builds, build):
        say(f"warning: {warning}")
    for kind in KINDS:
        routing = await builds.routing(kind)
        if routing.current != build:
            await _set_current(builds, kind, build)
        # A ramp of another build would go on after a rollback.
        if routing.ramping and routing.ramping != build:
            await _set_ramp(builds, kind, "", 0.0)
        await _wait_until_settled(builds, kind, patience, lambda found: found.current == build and not found.ramping)
        say(f"{kind}: build {build} {'was' if routing.current == build else 'is'} current")


async def ramp(builds: Builds, build: str, percent: float, *, patience: float, say: Say) -> None:
    """Start this part of all new turns and sessions on the build; 0 ends the ramp."""
    if not 0 <= percent <= 100:
        raise Invalid("--percent is between 0 and 100.")
    if percent:
        await _wait_for_workers(builds, build, patience)
        await _check_ramp(builds, build)
    expected = (build, percent) if percent else ("", 0.0)
    for kind in KINDS:
        routing = await builds.routing(kind)
        if percent and routing.current == build:
            raise Invalid(f"Build {build} is current already: all new work starts on it.")
        if not percent and routing.ramping not in ("", build):
            raise Invalid(f"Build {build} does not ramp; build {routing.ramping} does.")
        if (routing.ramping, routing.percent) != expected:
            await _set_ramp(builds, kind, *expected)
        await _wait_until_settled(builds, kind, patience, lambda found: found.ramping == expected[0])
        say(f"{kind}: {percent:g} % of what starts goes to build {build}")


async def warnings(builds: Builds, build: str) -> Sequence[str]:
    """What sessions lose or wait for when this build becomes the current one."""
    current = (await builds.routing(names.SESSIONS_QUEUE)).current
    if current in ("", build):
        return []
    before, after = await builds.facts(current), await builds.facts(build)
    said = [
        f"build {current} writes {what}. Sessions that have run on build {current} need attention from their next "
        "delivery on, and continue when a build is current that can read them."
        for what in before.newer_than(after)
    ]
    if after.is_known and (gone := sorted(set(before.agents) - set(after.agents))):
        said.append(
            f"build {build} does not serve {', '.join(gone)}. Sessions of these agents need attention from their next "
            "delivery on, and continue when a build is current that serves them."
        )
    return said


async def _check_ramp(builds: Builds, build: str) -> None:
    """With a ramp, the turns of one session run on both builds, so both must read what the other one writes."""
    current = (await builds.routing(names.TURNS_QUEUE)).current
    if not current:
        raise Invalid(f"No build is current yet: run `perdure deploy promote {build}`.")
    old, new = await builds.facts(current), await builds.facts(build)
    if newer := [*new.newer_than(old), *old.newer_than(new)]:
        raise Invalid(
            f"Builds {current} and {build} do not read each other's state: one writes {newer[0]}. With a ramp, turns "
            f"of one session run on both. Run `perdure deploy promote {build}`."
        )


async def _wait_for_workers(builds: Builds, build: str, patience: float) -> None:
    """Wait until workers of the build poll all queues, and the server knows these as queues of the build.

    If the server learns of a queue while it switches, it may report the switch as in progress for ever.
    """
    until = monotonic() + patience
    while missing := await _missing(builds, build):
        if monotonic() > until:
            raise NoWorker(
                f"No worker of build {build} polls {', '.join(missing)} (deployment {builds.deployment}). "
                f"Nothing was switched. Start its workers with PERDURE_BUILD_ID={build}."
            )
        await asyncio.sleep(_PAUSE)


async def _missing(builds: Builds, build: str) -> Sequence[str]:
    missing: list[str] = []
    for kind in KINDS:
        known = await builds.known_queues(kind, build)
        for queue, type in QUEUES[kind]:
            name = builds.queue(queue)
            if name not in known or not (await builds.polling(queue, type)).get(build):
                missing.append(name)
    return missing


async def _wait_until_settled(builds: Builds, kind: str, patience: float, holds: Callable[[Routing], bool]) -> None:
    until = monotonic() + patience
    while not ((routing := await builds.routing(kind)).settled and holds(routing)):
        if monotonic() > until - patience / 2 and holds(routing) and await builds.queues_know(kind, routing):
            # The server may report a switch as in progress for ever when it learns of a queue meanwhile.
            return
        if monotonic() > until:
            raise Unavailable(
                f"Temporal still switches the deployment {builds.name(kind)}: not all of its task queues have the new "
                "routing. Run the same command again; `perdure deploy status` shows the state."
            )
        await asyncio.sleep(_PAUSE)


async def _set_current(builds: Builds, kind: str, build: str) -> None:
    request = SetWorkerDeploymentCurrentVersionRequest(
        namespace=builds.client.namespace, deployment_name=builds.name(kind), build_id=build, identity=_IDENTITY
    )
    await called(builds.client.workflow_service.set_worker_deployment_current_version(request))


async def _set_ramp(builds: Builds, kind: str, build: str, percent: float) -> None:
    request = SetWorkerDeploymentRampingVersionRequest(
        namespace=builds.client.namespace,
        deployment_name=builds.name(kind),
        build_id=build,
        percentage=percent,
        identity=_IDENTITY,
    )
    await called(builds.client.workflow_service.set_worker_deployment_ramping_version(request))
