"""What a run of a driver reads, and how it moves to another build."""

from collections.abc import Mapping
from typing import Any, cast

from temporalio import workflow

from perdure.protocol.deliveries import DeliveryRef
from perdure.protocol.wire import JsonObject
from perdure.session.state import KINDS, REFERENCE_VERSIONS, is_unknown, version_patch

#: Kinds of outcomes of model calls. Each that is added has a patch, as kinds of deliveries have.
OUTCOMES: Mapping[str, str | None] = {
    "calls": None,
    "delegated": "children",
    "programs": "code-mode",
    "parked": None,
    "finished": None,
    "unheard": None,
}


def reads_outcome(outcome: Any) -> bool:
    """Whether this run reads an outcome of this kind. A newer build may have recorded it, or may replay this run."""
    kind = cast("dict[str, Any]", outcome).get("kind") if isinstance(outcome, dict) else None
    if kind is None:
        return True
    patch = OUTCOMES.get(kind)
    return kind in OUTCOMES and (patch is None or workflow.patched(patch))


def reads(delivery: DeliveryRef) -> bool:
    """Whether this run reads this delivery. A run that began before its kind or version existed replays as it ran."""
    if is_unknown(delivery):
        return False
    patches = (KINDS[delivery.kind], REFERENCE_VERSIONS[delivery.version])
    return all(patch is None or workflow.patched(patch) for patch in patches)


def reads_version(version: int) -> bool:
    """Whether this run reads a state of this version. A run that began on an older build replays as it ran."""
    return workflow.patched(version_patch(version))


def is_suggested() -> bool:
    info = workflow.info()
    return info.is_continue_as_new_suggested() or info.is_target_worker_deployment_version_changed()


def continue_as_new(data: JsonObject) -> None:
    if workflow.info().is_target_worker_deployment_version_changed():
        # A driver that continues as new while parked moves to the current build.
        behavior = workflow.ContinueAsNewVersioningBehavior.AUTO_UPGRADE
        workflow.continue_as_new(data, initial_versioning_behavior=behavior)
    workflow.continue_as_new(data)
