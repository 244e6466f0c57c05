"""The harness: one method for each activity, composed once over a store, agents and models."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import TYPE_CHECKING

from perdure.agents.agent import Agent
from perdure.agents.context import Dispatch
from perdure.agents.registry import AgentRegistry
from perdure.agents.run import RunRegistry
from perdure.errors import NeedsAttention
from perdure.models.base import ModelSource
from perdure.protocol import names
from perdure.protocol.requests import (
    AttendSession,
    CloseSession,
    Concluded,
    Conclusion,
    Coordinates,
    ModelCall,
    ModelOutcome,
    NothingToRead,
    ParkTurn,
    ProgramOutcome,
    RebuildSession,
    Refusal,
    Reminder,
    Resumed,
    ResumeTurn,
    ToolCall,
    ToolOutcome,
    Withdrawal,
)
from perdure.session.state import SessionState
from perdure.settings import Settings
from perdure.store.attempts import AttemptKey
from perdure.store.base import Store, reported
from perdure.store.values import Attempt

from .model_call import ModelCaller
from .rebuild import SessionRebuilder
from .resume import TurnResumer
from .tools.approvals import Clock
from .tools.call import ToolCaller
from .turn import TurnEnder, TurnParker
from .turn_begin import FileFetcher, HistoryCache, ReadAhead

if TYPE_CHECKING:
    from .programs.program import ProgramRunner
    from .remote.callbacks import CallbackSender
    from .remote.calls import RemoteCalls
    from .runs.runner import RunRunner
    from .tools.children import Children


class Harness:
    """The work of the activities. Any worker may repeat any method at any time: the first recorded result counts."""

    def __init__(
        self,
        store: Store,
        agents: AgentRegistry,
        models: ModelSource,
        settings: Settings,
        *,
        histories: HistoryCache | None = None,
        clock: Clock = time.time,
        secret: bytes | None = None,
        runs: RunRegistry | None = None,
        dispatch: Dispatch | None = None,
        worker: str = "",
    ) -> None:
        """`secret`: the tokens are derived from it with which agents on other servers report their results.

        `worker`: who this process is, in the reports of attempts.
        """
        self.worker = worker
        self._secret = secret
        self._runs = runs or RunRegistry()
        self._dispatch = dispatch
        self._agents = agents
        histories = histories or HistoryCache(store)
        self._ahead = ReadAhead(histories, agents, models, settings)
        self._models = ModelCaller(store, agents, models, settings, histories, clock)
        self._tools = ToolCaller(store, agents, settings, clock, dispatch)
        self._resumer = TurnResumer(store, agents, FileFetcher(settings))
        self._parker = TurnParker(store)
        self._ender = TurnEnder(store, agents)
        self._rebuilder = SessionRebuilder(store)
        self._store = store
        self._settings = settings
        self._clock = clock

    # --- a turn ---------------------------------------------------------------------------------------------

    def warm(self, session_id: str) -> None:
        """Begin to read what a model call of this session will need soon."""
        self._ahead.begin(session_id)

    async def call_model(self, call: ModelCall, attempt: Attempt) -> ModelOutcome:
        """Call the model for a step, unless its reply is recorded already."""
        async with self._reported(call.at, names.MODEL_SCOPE, attempt):
            outcome = await self._models.run(call, attempt)
        agent = self._agents.get(call.agent)
        if agent is None or isinstance(outcome, NothingToRead):
            return outcome
        return outcome.model_copy(update={"turns": agent.turns})

    async def call_tool(
        self,
        call: ToolCall,
        attempt: Attempt,
        cancelled: threading.Event | None = None,
        stopping: Callable[[], bool] = bool,
    ) -> ToolOutcome:
        """Run a tool. `cancelled` is set when the call is cancelled; `stopping` says whether the worker shuts down."""
        async with self._reported(call.at, names.call_scope(call.call.call_id), attempt):
            return await self._tools.run(call, attempt, cancelled or threading.Event(), stopping)

    async def run_program(self, call: ToolCall, attempt: Attempt) -> ProgramOutcome:
        """Run a program of the model until it ends or waits for its calls."""
        return await self._programs.run(call, attempt)

    async def resume_turn(self, resumption: ResumeTurn, attempt: Attempt) -> Resumed:
        """Process the answers of people and the requests that have expired."""
        return await self._resumer.resume(resumption, attempt)

    async def park_turn(self, park: ParkTurn) -> None:
        """Park a turn that has open requests, after its other calls have ended."""
        await self._parker.park(park)

    async def conclude_turn(self, conclusion: Conclusion) -> Concluded:
        """End a turn that failed or was cancelled, unless it has ended already."""
        return await self._ender.conclude(conclusion)

    async def renew(self, session_id: str, key: AttemptKey, seconds: float) -> None:
        """Note in the report of an attempt that its lease expires in so many seconds."""
        await self._store.attempts.renew(session_id, key, seconds)

    def _reported(self, at: Coordinates, scope: str, attempt: Attempt) -> AbstractAsyncContextManager[None]:
        return reported(self._store, at.session_id, AttemptKey(at.turn, at.step, scope, attempt.generation))

    # --- a session beside its turns -------------------------------------------------------------------------

    async def withdraw_inputs(self, withdrawal: Withdrawal) -> None:
        """Cancel a parked turn and withdraw its open requests."""
        await self._ender.withdraw(withdrawal)

    async def remind(self, reminder: Reminder) -> None:
        """Emit an event for a request that is still open."""
        await self._parker.remind(reminder)

    async def refuse_delivery(self, refusal: Refusal) -> None:
        """Emit an event for a delivery that no turn will read."""
        await self._ender.refuse(refusal)

    async def attend_session(self, attend: AttendSession) -> None:
        """Set or clear the attention of a session that cannot continue by itself."""
        await self._ender.set_attention(attend.session_id, attend.attention, attend.turn)

    async def close_session(self, close: CloseSession) -> bool:
        """End a session on an operator's order or at its time-out; False if it is not idle."""
        return await self._ender.close(close)

    async def rebuild_session(self, order: RebuildSession, attempt: Attempt) -> SessionState | None:
        """Derive a driver's state from the store; None if the session has ended."""
        return await self._rebuilder.rebuild(order, attempt)

    # --- programs and children ------------------------------------------------------------------------------

    @cached_property
    def _programs(self) -> "ProgramRunner":
        from .programs.program import ProgramRunner

        return ProgramRunner(self._store, self._agents, self._settings, self._clock)

    @cached_property
    def children(self) -> "Children":
        """The sessions that turns hand work to. Most sessions have none."""
        from .tools.children import Children

        return Children(self._store, self._agents, self._settings, self._remote_calls())

    @cached_property
    def runs(self) -> "RunRunner":
        """The functions of runs."""
        from .runs.runner import RunRunner

        return RunRunner(self._store, self._runs, self._agents, self.children, self.report, self._clock, self._dispatch)

    def _remote_calls(self) -> "RemoteCalls | None":
        if not any(each for agent in self._agents for each in agent.subagents if not isinstance(each, Agent)):
            return None
        from .remote.calls import RemoteCalls

        return RemoteCalls(self._store, public_url=self._settings.public_url, secret=self._secret)

    @cached_property
    def callbacks(self) -> "CallbackSender":
        """The callbacks of sessions that have ended."""
        from .remote.callbacks import CallbackSender

        return CallbackSender(self._store)

    async def report(self, session_id: str, error: NeedsAttention) -> None:
        """Set the session's attention: no worker can serve it."""
        await self._ender.report(session_id, error)
