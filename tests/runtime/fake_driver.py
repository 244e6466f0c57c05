"""The workflows of all sessions, in memory: they may be away, gone, or fail one by one, and remember what they read."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import cast

from temporalio.client import Client, WorkflowExecutionStatus

from perdure.errors import NoDriver, NoWorker, Unavailable
from perdure.protocol.wire import JsonObject
from perdure.runtime.deploys.unserved import Run
from perdure.runtime.drivers.client import DriverClient
from perdure.session.state import Rebuild, Repair, SessionState
from perdure.session.view import DriverView, read_view
from perdure.store.values import SessionRow

RUNNING = WorkflowExecutionStatus.RUNNING


@dataclass(frozen=True)
class Call:
    """One call to a workflow that was there."""

    session_id: str
    what: str
    detail: str = ""


class FakeDriver(DriverClient):
    def __init__(self, *running: str) -> None:
        super().__init__(cast("Client", None), "test")
        self.workflows: dict[str, WorkflowExecutionStatus] = dict.fromkeys(running, RUNNING)
        self.calls: list[Call] = []
        # All calls, also those that failed.
        self.tried: list[str] = []
        self.started: dict[str, SessionState] = {}
        self.summaries: dict[str, str | None] = {}
        self.rebuilt: dict[str, Rebuild] = {}
        self.away = False
        # Without workers no started workflow runs, and no driver can be described.
        self.no_workers = False
        # Until when what each cancel means was accepted.
        self.cancels_until: list[str | None] = []
        # What drivers hold.
        self.inboxes: dict[str, list[str]] = {}
        self.asked: list[str] = []
        # What else they say of themselves.
        self.said: dict[str, JsonObject] = {}
        self.failures: dict[str, Exception] = {}
        # The runs that no worker can replay.
        self.broken: dict[str, Run] | None = {}

    def signalled(self, session_id: str = "s") -> list[str]:
        """The signals and starts that one session's workflow got, in order."""
        return [f"{call.what} {call.detail}".strip() for call in self.calls if call.session_id == session_id]

    async def start(self, state: SessionState, *, summary: str | None = None, lane_of: str | None = None) -> None:
        self._reach(state.session_id)
        # A workflow that has ended is not started again.
        if state.session_id not in self.workflows:
            self.workflows[state.session_id] = RUNNING
            self.started[state.session_id] = state
            self.inboxes[state.session_id] = [ref.id for ref in state.inbox]
            self.summaries[state.session_id] = summary
            self.calls.append(Call(state.session_id, "start"))

    async def rebuild(
        self, session_id: str, rebuild: Rebuild, *, unattended: bool = False, of: SessionRow | None = None
    ) -> None:
        self._reach(session_id)
        if self.no_workers and not unattended:
            raise NoWorker
        if self.workflows.get(session_id) is not RUNNING:
            self.workflows[session_id] = RUNNING
            self.rebuilt[session_id] = rebuild
            self.calls.append(Call(session_id, "rebuild", rebuild.reason))

    async def unreplayable(self) -> Mapping[str, Run] | None:
        return None if self.broken is None else dict(self.broken)

    async def replace(self, session_id: str, run: Run, rebuild: Rebuild, *, of: SessionRow | None = None) -> bool:
        self._reach(session_id)
        assert self.broken is not None
        del self.broken[session_id], self.workflows[session_id]
        await self.rebuild(session_id, rebuild)
        return True

    async def deliver(self, session_id: str, ref: JsonObject) -> None:
        self._call(session_id, "deliver", ref["id"])
        self.inboxes.setdefault(session_id, []).append(ref["id"])

    async def describe(self, session_id: str) -> DriverView | None:
        self._reach(session_id)
        if self.workflows.get(session_id) is not RUNNING:
            raise NoDriver
        self.asked.append(session_id)
        inbox = [{"id": each} for each in self.inboxes.get(session_id, ())]
        return None if self.no_workers else read_view({"inbox": inbox, **self.said.get(session_id, {})})

    async def repair(self, session_id: str, how: Repair, reason: str = "OPERATOR") -> None:
        self._call(session_id, how, reason)

    async def cancel(self, session_id: str, turn_id: str, until: str | None = None) -> None:
        self._call(session_id, "cancel", turn_id)
        self.cancels_until.append(until)

    async def status(self, session_id: str) -> WorkflowExecutionStatus | None:
        self._reach(session_id)
        return self.workflows.get(session_id)

    async def running(self) -> AsyncIterator[str]:
        self._reach("")
        for session_id, status in sorted(self.workflows.items()):
            if status is RUNNING:
                yield session_id

    async def terminate(self, session_id: str, reason: str) -> None:
        self._call(session_id, "terminate", reason)
        self.workflows[session_id] = WorkflowExecutionStatus.TERMINATED

    async def delete(self, workflow_id: str, run_id: str = "") -> None:
        self._reach(workflow_id)
        self.workflows.pop(workflow_id, None)

    def _call(self, session_id: str, what: str, detail: str) -> None:
        self._reach(session_id)
        if self.workflows.get(session_id) is not RUNNING:
            raise NoDriver
        self.calls.append(Call(session_id, what, detail))

    def _reach(self, session_id: str) -> None:
        self.tried.append(session_id)
        if self.away:
            raise Unavailable
        if failure := self.failures.get(session_id):
            raise failure
