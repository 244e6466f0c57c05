"""What the models of agents cost: the agent's price, that of the settings, or the list of `genai-prices`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cache
from typing import TypeAlias

from perdure.agents.agent import DEMO, Agent, Price
from perdure.errors import Misconfigured
from perdure.protocol.events import Usage
from perdure.settings import Settings
from perdure.store.values import DOLLAR

#: What usage costs, in billionths of a US dollar.
Cost: TypeAlias = Callable[[Usage], int]

_MILLION = 1_000_000

#: Providers that pydantic-ai and the list of prices name differently.
_PROVIDERS = {
    "openai-chat": "openai",
    "openai-responses": "openai",
    "google-gla": "google",
    "google-vertex": "google",
    "bedrock": "aws",
}


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
    """Raise `Misconfigured` if an agent spends from a budget of costs and its model has no known price."""
    for agent in agents:
        if not has_costs(agent, settings):
            continue
        for spender in _spenders(agent):
            if cost_of(spender, settings) is not None:
                continue
            model = spender.model or settings.model or DEMO
            spends = "has" if spender is agent else f"spends, as a subagent of {agent.name!r}, from"
            raise Misconfigured(
                f"Agent {spender.name!r} {spends} a budget of costs, and the price of its model {model} is not known: "
                f"set `Agent(price=Price(input=…, output=…))`, or PERDURE_PRICES."
            )


def _spenders(agent: Agent) -> Iterator[Agent]:
    """The agent and all agents that spend from its budgets."""
    yield agent
    for each in agent.subagents:
        # What an agent on another server costs is paid there.
        if isinstance(each, Agent):
            yield from _spenders(each)


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


@cache
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
