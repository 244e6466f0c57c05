"""What sessions and principals have spent, as the store counts it. Frozen values, no I/O."""

from dataclasses import dataclass, field

from perdure.protocol.events import Usage

#: Units of cost in a US dollar: whole numbers, so that sums are exact.
DOLLAR = 1_000_000_000


@dataclass(frozen=True)
class Below:
    """What the descendants of a session have used."""

    usage: Usage = field(default_factory=Usage)
    # In billionths of a US dollar: each at the price of the agent that has used it, as far as that is known.
    cost: int = 0
    # The tokens and the cost of these when the session's latest turn began.
    tokens_before: int = 0
    cost_before: int = 0

    @property
    def dollars(self) -> float:
        return self.cost / DOLLAR


@dataclass(frozen=True)
class Spending:
    """What an account, a principal in a period, has spent: tokens, and billionths of a dollar."""

    account: str
    tokens: int
    cost: int


@dataclass(frozen=True)
class Reservation(Spending):
    """What an attempt may spend at most, and the limits of its account."""

    most_tokens: int | None = None
    most_cost: int | None = None
