"""What sessions do: each scenario is recorded, and its recordings are replayed for as long as they may matter."""

from .bounds import BOUNDS
from .cancels import CANCELS
from .care import CARE
from .children import CHILDREN
from .inline import INLINE
from .parking import PARKING
from .programs import PROGRAMS
from .renewal import RENEWAL
from .runs import RUNS
from .stage import Scenario, Stage
from .turns import TURNS

SCENARIOS = tuple(
    each
    for table in (PARKING, CANCELS, TURNS, CARE, RENEWAL, BOUNDS, INLINE, CHILDREN, PROGRAMS, RUNS)
    for each in table.scenarios
)

__all__ = ["SCENARIOS", "Scenario", "Stage"]
