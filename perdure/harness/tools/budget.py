"""Budgets of tokens and costs: whether the next model call fits into them, and what happens if it does not.

Runs only for agents and deployments with a budget. The budgets of a turn and of a session are compared with what is
recorded. That of a principal is shared by sessions in many processes, so each call first reserves what it may use.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from itertools import chain, repeat
from typing import Any, TypeAlias, cast

from pydantic_ai.messages import ModelResponse

from perdure.agents.agent import DEMO, Agent, Price
from perdure.errors import BudgetReached, Misconfigured
from perdure.harness.events import EventFactory
from perdure.harness.journal import Ask, RequestedCall, TurnJournal
from perdure.harness.reply import RequestedCalls, Settlement, UsableReply, settle_failure, settle_reply
from perdure.protocol.deliveries import Mode
from perdure.protocol.events import Usage
from perdure.protocol.inputs import InputRequest, Option, digest
from perdure.protocol.names import MODEL_SCOPE
from perdure.protocol.requests import Coordinates, Failure
from perdure.settings import Settings
from perdure.store.base import Store, all_inputs, write_at_last
from perdure.store.values import Attempt, Commit, Committed, Fence, Hold, InputQuery, Reservation, SessionRow, Spending

from .approvals import EXTEND, EXTEND_BUDGET, request_id

#: What usage costs, in billionths of a US dollar: whole numbers, so that sums are exact.
Cost: TypeAlias = Callable[[Usage], int]

#: Units of cost in a dollar.
DOLLAR = 1_000_000_000
_MILLION = 1_000_000

#: Providers that pydantic-ai and the list of prices name differently.
_PROVIDERS = {
    "openai-chat": "openai",
    "openai-responses": "openai",
    "google-gla": "google",
    "google-vertex": "google",
    "bedrock": "aws",
}

log = logging.getLogger("perdure.budget")

#: Tokens of a reply that are reserved if the agent's settings have no `max_tokens`.
_REPLY_TOKENS = 1_000

#: For how many seconds a call waits for what other calls have reserved, and its pauses.
_PATIENCE = 60.0
_PAUSES = (0.1, 0.2, 0.5, 1.0)

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

    @property
    def failure(self) -> Failure:
        sentence = f"The {self.scope} has used {self.words(self.used)} of its budget of {self.words(self.limit)}"
        details = {
            "budget": self.name,
            "used": self.shown(self.used),
            "limit": self.shown(self.limit),
            "needed": self.shown(self.needed),
        }
        return Failure(
            code=f"{self.scope.upper()}_BUDGET_REACHED",
            message=f"{sentence}, and the next model call, which needs about {self.words(self.needed)}, does not fit.",
            details=details,
        )


@dataclass(frozen=True)
class Budget:
    """The budgets of one attempt at a model call."""

    store: Store
    agent: Agent
    row: SessionRow
    at: Coordinates
    attempt: Attempt
    settings: Settings
    #: What the call is expected to use.
    wanted: Usage
    #: None: no budget is one of costs.
    cost: Cost | None
    #: The account of the principal in this period; None if principals have no budget.
    account: str | None

    @classmethod
    def of(
        cls, store: Store, agent: Agent, row: SessionRow, at: Coordinates, attempt: Attempt, settings: Settings,
        tokens: int, now: float,
    ) -> "Budget":  # fmt: skip
        reply = agent.settings.get("max_tokens") or _REPLY_TOKENS
        shared = settings.principal_tokens is not None or settings.principal_cost is not None
        return cls(
            store=store,
            agent=agent,
            row=row,
            at=at,
            attempt=attempt,
            settings=settings,
            wanted=Usage(input_tokens=tokens, output_tokens=reply),
            cost=cost_of(agent, settings) if has_costs(agent, settings) else None,
            account=_account(row.principal.owner, settings, now) if shared else None,
        )

    # --- of the turn and of the session ---

    async def stopped(
        self, factory: EventFactory, mode: Mode, turn: TurnJournal, *, can_ask: bool
    ) -> Settlement | None:
        """How the step ends if the call does not fit into the budget of its turn or its session."""
        reached = await self._reached(turn)
        if reached is None:
            return None
        log.info("%s: the budget %s is reached", self.at.session_id, reached.name)
        if can_ask and mode == "conversation" and self.agent.limits.extended_by is not None:
            asked = UsableReply(ModelResponse(parts=[]), "other", Usage(), self._question(reached), turn.principal)
            return settle_reply(factory, mode, asked)
        return settle_failure(factory, mode, reached.failure, Usage())

    async def failure(self, turn: TurnJournal) -> Failure | None:
        """Why the call does not fit into the budget of its turn or its session, if it does not."""
        reached = await self._reached(turn)
        return reached.failure if reached else None

    async def _reached(self, turn: TurnJournal) -> _Limit | None:
        limits, used, session = self.agent.limits, turn.usage, self.row.usage
        for limit in (
            *self._limits("turn", limits.turn_tokens, limits.turn_cost, used),
            *self._limits("session", limits.session_tokens, limits.session_cost, session),
        ):
            if limit.used + limit.needed <= limit.limit:
                continue
            # Each turn has a whole budget, so its extension is the turn that the answer begins.
            extensions = await self._extensions(limit.name) if limit.scope == "session" else 0
            extended = replace(limit, limit=limit.limit * (1 + extensions))
            if limit.used + limit.needed > extended.limit:
                return extended
        return None

    def _limits(self, scope: str, tokens: int | None, dollars: float | None, used: Usage) -> list[_Limit]:
        limits = {
            "tokens": tokens,
            "cost": None if dollars is None else round(dollars * DOLLAR),
        }
        return [
            _Limit(scope, unit, limit, self._amount(unit, used), self._amount(unit, self.wanted))
            for unit, limit in limits.items()
            if limit is not None
        ]

    def _amount(self, unit: str, usage: Usage) -> int:
        if unit == "tokens":
            return usage.input_tokens + usage.output_tokens
        return self.cost(usage) if self.cost else 0

    async def _extensions(self, name: str) -> int:
        """How often people have extended this budget of the session."""
        query = InputQuery(session_id=self.at.session_id, kind="question", status="answered")
        rows = [row for row in await all_inputs(self.store, query) if row.request.tool == EXTEND_BUDGET]
        return sum(
            row.request.input.get("budget") == name and row.answer is not None and row.answer.option_id == EXTEND
            for row in rows
        )

    def _question(self, reached: _Limit) -> RequestedCalls:
        """A question to people, in the form of a call that the model has not made."""
        at, responders = self.at, self.agent.limits.extended_by
        assert responders is not None
        call_id = f"budget_{at.turn}_{at.step}"
        failure = reached.failure
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
        """The store, with reservations and spendings added to the commits of this attempt."""
        return cast("Store", _BilledStore(self)) if self.account else self.store

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

    async def commit(self, account: str, commit: Commit) -> Committed:
        used = commit.change.usage if commit.change else None
        if used is not None and used != Usage():
            spent = Spending(account, self._amount("tokens", used), self._amount("cost", used))
            commit = replace(commit, spends=spent)
        fence = commit.fence
        if fence and fence.hold is Hold.RAISE and fence.scope == MODEL_SCOPE and commit.close_turn is None:
            return await self._reserved(replace(commit, reserve=self._reservation(account)))
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
    return _Limit("principal", known["unit"], known["limit"], known["used"], known["wanted"]).failure


class _BilledStore:
    """A store whose commits are on account."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def __getattr__(self, name: str) -> Any:
        return getattr(self._budget.store, name)

    async def commit(self, commit: Commit) -> Committed:
        assert self._budget.account is not None
        return await self._budget.commit(self._budget.account, commit)


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


# --- prices -------------------------------------------------------------------------------------------------


def cost_of(agent: Agent, settings: Settings) -> Cost | None:
    """What the agent's model costs; None if that is not known.

    The price of the agent counts first, then that of the settings, then the list of `genai-prices`.
    """
    model = agent.model or settings.model or DEMO
    if agent.price is not None:
        return _declared(agent.price)
    if model in settings.prices:
        return _declared(_price(model, settings.prices[model]))
    return _listed(model)


def check_prices(agents: Iterable[Agent], settings: Settings) -> None:
    """Raise `Misconfigured` if an agent has a budget of costs and a model without a price."""
    for agent in agents:
        if has_costs(agent, settings) and cost_of(agent, settings) is None:
            model = agent.model or settings.model or DEMO
            raise Misconfigured(
                f"Agent {agent.name!r} has a budget of costs, and the price of its model {model} is not known: "
                f"set `Agent(price=Price(input=…, output=…))`, or PERDURE_PRICES."
            )


def has_costs(agent: Agent, settings: Settings) -> bool:
    limits = agent.limits
    return any(each is not None for each in (limits.turn_cost, limits.session_cost, settings.principal_cost))


def _price(model: str, given: Mapping[str, float]) -> Price:
    try:
        return Price(**given)
    except TypeError:
        message = f"PERDURE_PRICES: the price of {model} has the fields input, output, cache_read and cache_write."
        raise Misconfigured(message) from None


def _declared(price: Price) -> Cost:
    read = price.input if price.cache_read is None else price.cache_read
    write = price.input if price.cache_write is None else price.cache_write

    def cost(usage: Usage) -> int:
        plain = max(0, usage.input_tokens - usage.cache_read_tokens - usage.cache_write_tokens)
        dollars = plain * price.input + usage.output_tokens * price.output
        dollars += usage.cache_read_tokens * read + usage.cache_write_tokens * write
        return round(dollars * DOLLAR / _MILLION)

    return cost


def _listed(model: str) -> Cost | None:
    provider, _, name = model.rpartition(":")
    # Imported late: the list is large.
    import genai_prices

    def cost(usage: Usage) -> int:
        counted = genai_prices.Usage(
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cache_read_tokens=usage.cache_read_tokens,
            cache_write_tokens=usage.cache_write_tokens,
        )
        found = genai_prices.calc_price(counted, name, provider_id=_PROVIDERS.get(provider, provider) or None)
        return int(Decimal(found.total_price) * DOLLAR)

    try:
        cost(Usage(input_tokens=1))
    except (LookupError, ValueError):
        return None
    return cost
