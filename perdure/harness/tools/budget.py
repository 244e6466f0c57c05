"""Budgets of tokens and costs: whether the next model call fits into them, and what happens if it does not.

Runs only for children, and for agents and deployments with a budget. The budgets of a turn and of a session are
compared with what is recorded of them and of their descendants. That of a principal is shared by sessions in many
processes, so each call first reserves what it may use.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, repeat
from typing import Any, cast

from pydantic_ai.messages import ModelResponse

from perdure.agents.agent import Agent
from perdure.agents.registry import AgentRegistry
from perdure.errors import BudgetReached
from perdure.harness.events import EventFactory
from perdure.harness.journal import TurnJournal, read_journal
from perdure.harness.reply import RequestedCalls, Settlement, UsableReply, settle_failure, settle_reply
from perdure.harness.tools.limits import token_limit_reached
from perdure.protocol.deliveries import Mode
from perdure.protocol.events import Usage
from perdure.protocol.inputs import InputRequest, Option, digest
from perdure.protocol.names import MODEL_SCOPE
from perdure.protocol.requests import Coordinates, Failure
from perdure.settings import Settings
from perdure.store.base import Store, write_at_last
from perdure.store.engine.cursors import all_inputs
from perdure.store.inputs import InputQuery
from perdure.store.values import DOLLAR, Attempt, Commit, Committed, Fence, Hold, Reservation, SessionRow, Spending

from .approvals import EXTEND, EXTEND_BUDGET, request_id
from .prices import Cost, cost_of, has_costs
from .records import Ask, RequestedCall

log = logging.getLogger("perdure.budget")

#: Tokens of a reply that are reserved if the agent's settings have no `max_tokens`.
_REPLY_TOKENS = 1_000

#: For how many seconds a call waits for what other calls have reserved, and its pauses.
_PATIENCE = 60.0
_PAUSES = (0.1, 0.2, 0.5, 1.0)

#: The code of a child's failure when a session above it has nothing left.
PARENT_BUDGET = "PARENT_BUDGET_REACHED"

_OPTIONS = (Option(id=EXTEND, label="Extend"), Option(id="stop", label="Stop", style="danger"))


@dataclass(frozen=True)
class _Limit:
    """One budget, and what has been used of it: tokens, or billionths of a dollar."""

    scope: str
    unit: str
    limit: int
    used: int
    #: What the next model call needs, as it is estimated.
    needed: int

    @property
    def name(self) -> str:
        return f"{self.scope}_{self.unit}"

    def shown(self, number: int) -> float:
        return number if self.unit == "tokens" else number / DOLLAR

    def words(self, number: int) -> str:
        return f"{number} tokens" if self.unit == "tokens" else f"${number / DOLLAR:.4f}"

    def failure(self, who: str | None = None) -> Failure:
        sentence = f"{who or f'The {self.scope}'} has used {self.words(self.used)} of its budget of "
        return Failure(
            code=f"{self.scope.upper()}_BUDGET_REACHED",
            message=f"{sentence}{self.words(self.limit)}, and the next model call, which needs about "
            f"{self.words(self.needed)}, does not fit.",
            details={
                "budget": self.name,
                "used": self.shown(self.used),
                "limit": self.shown(self.limit),
                "needed": self.shown(self.needed),
            },
        )


@dataclass(frozen=True)
class _Spender:
    """A session, and what it and its descendants have used of its budgets."""

    agent: Agent
    row: SessionRow
    #: The number of its turn, and what that has used itself.
    turn: int
    used_in_turn: Usage
    cost: Cost | None

    def amount(self, unit: str, usage: Usage) -> int:
        if unit == "tokens":
            return usage.input_tokens + usage.output_tokens
        return self.cost(usage) if self.cost else 0

    def budgets(self, needed: Mapping[str, int]) -> Iterator[_Limit]:
        """The budgets that there are, those of the turn first."""
        limits, below = self.agent.limits, self.row.below
        tokens, cost = self.amount("tokens", below.usage), below.cost
        # Before its first commit, nothing was used in the turn.
        begun = self.row.turns > self.turn
        before = (below.tokens_before, below.cost_before) if begun else (tokens, cost)
        for scope, unit, limit, own, descendants in (
            ("turn", "tokens", limits.turn_tokens, self.used_in_turn, tokens - before[0]),
            ("turn", "cost", _billionths(limits.turn_cost), self.used_in_turn, cost - before[1]),
            ("session", "tokens", limits.session_tokens, self.row.usage, tokens),
            ("session", "cost", _billionths(limits.session_cost), self.row.usage, cost),
        ):
            if limit is not None:
                yield _Limit(scope, unit, limit, self.amount(unit, own) + descendants, needed[unit])


def _billionths(dollars: float | None) -> int | None:
    return None if dollars is None else round(dollars * DOLLAR)


@dataclass(frozen=True)
class Budget:
    """The budgets of one attempt at a model call."""

    store: Store
    agents: AgentRegistry
    agent: Agent
    row: SessionRow
    at: Coordinates
    attempt: Attempt
    settings: Settings
    #: What the call is expected to use.
    wanted: Usage
    #: None: no budget is one of costs, or the price is not known.
    cost: Cost | None
    #: The account of the principal in this period; None if principals have no budget.
    account: str | None

    @classmethod
    def of(
        cls, store: Store, agents: AgentRegistry, agent: Agent, row: SessionRow, at: Coordinates, attempt: Attempt,
        settings: Settings, tokens: int, now: float,
    ) -> "Budget":  # fmt: skip
        reply = agent.settings.get("max_tokens") or _REPLY_TOKENS
        shared = settings.principal_tokens is not None or settings.principal_cost is not None
        return cls(
            store=store,
            agents=agents,
            agent=agent,
            row=row,
            at=at,
            attempt=attempt,
            settings=settings,
            wanted=Usage(input_tokens=tokens, output_tokens=reply),
            # What a child spends is counted above it, also if nobody there has a budget of costs.
            cost=cost_of(agent, settings) if row.parent is not None or has_costs(agent, settings) else None,
            account=_account(row.principal.owner, settings, now) if shared else None,
        )

    # --- of the turn and of the session, and of the sessions above ---

    async def stopped(
        self, factory: EventFactory, mode: Mode, turn: TurnJournal, *, can_ask: bool
    ) -> Settlement | None:
        """How the step ends if the call does not fit into the budgets of its turn and its session, or those above."""
        reached = await self._reached(self._itself(turn))
        if reached is None:
            failure = await self._failure_above()
            return settle_failure(factory, mode, failure, Usage()) if failure else None
        log.info("%s: the budget %s is reached", self.at.session_id, reached.name)
        if can_ask and mode == "conversation" and self.agent.limits.extended_by is not None:
            asked = UsableReply(ModelResponse(parts=[]), "other", Usage(), self._question(reached), turn.principal)
            return settle_reply(factory, mode, asked)
        return settle_failure(factory, mode, reached.failure(), Usage())

    async def failure(self, turn: TurnJournal) -> Failure | None:
        """Why the call does not fit into the budgets of its turn and its session, or those above, if it does not."""
        reached = await self._reached(self._itself(turn))
        return reached.failure() if reached else await self._failure_above()

    def _itself(self, turn: TurnJournal) -> _Spender:
        return _Spender(self.agent, self.row, self.at.turn, turn.usage, self.cost)

    async def _failure_above(self) -> Failure | None:
        """Why the call does not fit into what is left above. Nobody is asked: the parent's own next call asks.

        Several calls at once may see the same rest, so a budget can be exceeded by all that run at that moment.
        """
        async for row in self._above():
            agent = self.agents.get(row.agent)
            if agent is None:
                # Its limits are not known here.
                continue
            failure = token_limit_reached(agent.limits, row.spent, "The session that waits for this work")
            if failure is None:
                reached = await self._reached(await self._spender(agent, row))
                failure = reached.failure(f"The {reached.scope} that waits for this work") if reached else None
            if failure is not None:
                log.info("%s: %s has no budget left", self.at.session_id, row.session_id)
                details = {**(failure.details or {}), "sessionId": row.session_id}
                return failure.model_copy(update={"code": PARENT_BUDGET, "details": details})
        return None

    async def _above(self) -> AsyncGenerator[SessionRow]:
        """The sessions above, from the parent up to the root."""
        row, session_id = self.row, self.row.parent_id
        while session_id is not None:
            found = await self.store.session(session_id)
            if found is not None:
                row, session_id = found, found.parent_id
                yield found
            else:
                # It was deleted alone.
                session_id = row.root_id if session_id != row.root_id else None

    async def _spender(self, agent: Agent, row: SessionRow) -> _Spender:
        """A session above, in the turn that waits."""
        limits, turn = agent.limits, max(0, row.turns - 1)
        used = Usage()
        if limits.turn_tokens is not None or limits.turn_cost is not None:
            used = (await read_journal(self.store, row.session_id, turn)).usage
        cost = cost_of(agent, self.settings) if has_costs(agent, self.settings) else None
        return _Spender(agent, row, turn, used, cost)

    async def _reached(self, spender: _Spender) -> _Limit | None:
        needed = {unit: self._amount(unit, self.wanted) for unit in ("tokens", "cost")}
        for limit in spender.budgets(needed):
            if limit.used + limit.needed <= limit.limit:
                continue
            # Each turn has a whole budget, so its extension is the turn that the answer begins.
            extensions = await self._extensions(spender.row, limit.name) if limit.scope == "session" else 0
            extended = replace(limit, limit=limit.limit * (1 + extensions))
            if limit.used + limit.needed > extended.limit:
                return extended
        return None

    def _amount(self, unit: str, usage: Usage) -> int:
        if unit == "tokens":
            return usage.input_tokens + usage.output_tokens
        return self.cost(usage) if self.cost else 0

    async def _extensions(self, row: SessionRow, name: str) -> int:
        """How often people have extended this budget of the session."""
        query = InputQuery(session_id=row.session_id, kind="question", status="answered")
        asked = [each for each in await all_inputs(self.store, query) if each.request.tool == EXTEND_BUDGET]
        return sum(
            each.request.input.get("budget") == name and each.answer is not None and each.answer.option_id == EXTEND
            for each in asked
        )

    def _question(self, reached: _Limit) -> RequestedCalls:
        """A question to people, in the form of a call that the model has not made."""
        at, responders = self.at, self.agent.limits.extended_by
        assert responders is not None
        call_id = f"budget_{at.turn}_{at.step}"
        failure = reached.failure()
        shown: dict[str, Any] = {"code": failure.code, **(failure.details or {})}
        request = InputRequest(
            request_id=request_id(at, call_id),
            session_id=at.session_id,
            agent=self.agent.name,
            turn=at.turn,
            step=at.step,
            call_id=call_id,
            tool=EXTEND_BUDGET,
            kind="question",
            prompt=f"{failure.message} Extend the budget by {reached.words(self._extension(reached))}?",
            input=shown,
            digest=digest(shown),
            display="select",
            options=_OPTIONS,
            responders=responders,
        )
        call = RequestedCall(call_id=call_id, tool=EXTEND_BUDGET, input=shown, ask=Ask(request=request))
        return RequestedCalls((call,))

    def _extension(self, reached: _Limit) -> int:
        limits = self.agent.limits
        tokens, dollars = (
            (limits.turn_tokens, limits.turn_cost)
            if reached.scope == "turn"
            else (limits.session_tokens, limits.session_cost)
        )
        return (tokens or 0) if reached.unit == "tokens" else round((dollars or 0) * DOLLAR)

    # --- of the principal ---

    @property
    def billed(self) -> Store:
        """The store, with costs, reservations and spendings added to the commits of this attempt."""
        is_billed = self.account is not None or self.row.parent is not None
        return cast("Store", _BilledStore(self)) if is_billed else self.store

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None]:
        """Release the reservation if the attempt fails. That of a dead worker ends with its fence."""
        try:
            yield
        except (Exception, asyncio.CancelledError):
            if self.account is not None:
                fence = Fence(self.at.turn, self.at.step, MODEL_SCOPE, self.attempt, Hold.KEEP)
                release = Commit(self.at.session_id, fence=fence, reserve=Reservation(self.account, 0, 0))
                # If this fails, the next attempt replaces the reservation, or the end of the turn deletes it.
                await write_at_last(self.store.commit(release), log, "a reservation was not released")
            raise

    async def commit(self, commit: Commit) -> Committed:
        change, fence = commit.change, commit.fence
        used = change.usage if change else None
        if change is not None and used is not None and used != Usage():
            cost = self._amount("cost", used)
            spent = Spending(self.account, self._amount("tokens", used), cost) if self.account else None
            commit = replace(commit, change=replace(change, cost=cost), spends=spent)
        raises = fence is not None and fence.hold is Hold.RAISE and fence.scope == MODEL_SCOPE
        if self.account is not None and raises and commit.close_turn is None:
            return await self._reserved(replace(commit, reserve=self._reservation(self.account)))
        return await self.store.commit(commit)

    def _reservation(self, account: str) -> Reservation:
        cost = self.settings.principal_cost
        return Reservation(
            account,
            self._amount("tokens", self.wanted),
            self._amount("cost", self.wanted),
            self.settings.principal_tokens,
            None if cost is None else round(cost * DOLLAR),
        )

    async def _reserved(self, commit: Commit) -> Committed:
        """Commit once the reservation fits. What other calls have reserved may become free again."""
        until = time.monotonic() + _PATIENCE
        pauses = chain(_PAUSES, repeat(_PAUSES[-1]))
        while True:
            try:
                return await self.store.commit(commit)
            except BudgetReached as reached:
                known = reached.details
                if known["used"] + known["wanted"] > known["limit"] or time.monotonic() > until:
                    raise
            await asyncio.sleep(next(pauses))


def principal_failure(reached: BudgetReached) -> Failure:
    """The failure of a turn whose principal has spent its budget."""
    known = reached.details
    return _Limit("principal", known["unit"], known["limit"], known["used"], known["wanted"]).failure()


class _BilledStore:
    """A store whose commits say what their usage costs."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def __getattr__(self, name: str) -> Any:
        return getattr(self._budget.store, name)

    async def commit(self, commit: Commit) -> Committed:
        return await self._budget.commit(commit)


def _account(owner: str, settings: Settings, now: float) -> str:
    # Hashed: it stays when all sessions of the principal are deleted, or a budget could be renewed like that.
    hashed = hashlib.sha256(b"perdure/account/" + owner.encode(errors="surrogatepass")).hexdigest()[:32]
    return f"{hashed}/{_period(settings, now)}"


def _period(settings: Settings, now: float) -> str:
    today = datetime.fromtimestamp(now, UTC).date().isoformat()
    match settings.principal_period:
        case "day":
            return today
        case "month":
            return today[:7]
        case "ever":
            return "ever"
