"""All patches of the workflows; `make lint` compares this list with the code.

A patch keeps runs replayable that began before a change. From its date on it may be removed, in two steps: first
`workflow.deprecate_patch(id)` replaces the branch; once no run is open that began with the branch, the call goes, too.
"""

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal

#: A parked session may keep its run for months.
_STAYS = timedelta(days=365)


@dataclass(frozen=True)
class Patch:
    """A row of the table in docs/deploying.md."""

    id: str
    #: "both": the code of turns, which drivers execute, too.
    workflow: Literal["driver", "both", "run"]
    since: date
    #: What runs do that began without it.
    before: str

    @property
    def may_go(self) -> date:
        """The first day on which it may be removed, if no run is open that began without it."""
        return self.since + _STAYS


PATCHES = (
    Patch("inbox-in-order", "driver", date(2026, 11, 18), "read deliveries in the order in which signals arrived"),
    Patch(
        "only-news-makes-due", "driver", date(2026, 11, 18), "retried a held turn for a delivery that they had already"
    ),
    Patch(
        "spare-what-is-parked",
        "driver",
        date(2026, 11, 18),
        "withdrew input requests when a cancel of the next turn came before the answer",
    ),
    Patch(
        "tokens-in-between",
        "driver",
        date(2026, 11, 19),
        "refused deliveries that came with a token which a turn had set and replaced again",
    ),
    Patch("silent-turns-keep-their-number", "driver", date(2026, 11, 18), "counted turns that emitted no events"),
    Patch(
        "renew-when-parked",
        "driver",
        date(2026, 11, 18),
        "continued as new only after a turn, and only when Temporal suggested it",
    ),
    Patch(
        "stop-before-calls",
        "both",
        date(2026, 11, 18),
        "began the tool calls of a reply although its turn was being cancelled",
    ),
    Patch(
        "conclude-to-the-end", "both", date(2026, 11, 18), "cancelled the activity that was writing the end of a turn"
    ),
    Patch(
        "keep-unknown-kinds",
        "driver",
        date(2026, 11, 19),
        "ignored deliveries of kinds that they could not read, until the sweeper signalled them again",
    ),
    Patch(
        "look-when-unknown-arrives",
        "driver",
        date(2026, 11, 19),
        "looked for a build that reads a delivery of an unknown kind only after the next signal if they waited already",
    ),
    Patch("cancel-turn-once", "driver", date(2026, 11, 19), "asked a turn to stop at each signal of a cancel"),
    Patch("shorter-runs", "driver", date(2026, 11, 19), "continued as new after 400 events instead of 200"),
    Patch("session-bounds", "driver", date(2026, 11, 19), "had no deadline and no idle time-out"),
    Patch("controls", "driver", date(2026, 11, 19), "left controls (`compact`, `clear`, `reset`) to a newer build"),
    Patch(
        "turns-before-renewal",
        "driver",
        date(2026, 11, 19),
        "continued as new at once, also when a message was about to come",
    ),
    Patch("inline-turns", "driver", date(2026, 11, 19), "ran each turn as a child workflow"),
    Patch("children", "both", date(2026, 11, 19), "left the work of children to a newer build"),
    Patch("code-mode", "both", date(2026, 11, 19), "left programs of the model to a newer build"),
    Patch(
        "children-end-first",
        "both",
        date(2026, 11, 20),
        "ended a parked turn before its children if a cancel came with an answer, or a control",
    ),
    Patch(
        "decide-again-before-dispatch",
        "driver",
        date(2026, 11, 20),
        "heard no cancel while the children of a turn could not be started",
    ),
    Patch(
        "run-hears-late-cancel",
        "run",
        date(2026, 11, 20),
        "waited on if they were cancelled in Temporal while their function parked or failed",
    ),
    Patch(
        "changed-references",
        "driver",
        date(2026, 11, 20),
        "kept a waiting delivery at its place, with its mode, although its sender had changed that",
    ),
    Patch(
        "wait-to-collect",
        "driver",
        date(2026, 11, 20),
        "read at once what was to be collected, and joined only what followed one another",
    ),
    Patch(
        "drop-superseded",
        "driver",
        date(2026, 11, 20),
        "began a turn without events for each message that a later one had superseded",
    ),
    Patch(
        "supersede-as-stored",
        "driver",
        date(2026, 11, 20),
        "dropped what waited in a task when a message interrupted it, and let an earlier cancel stop that message",
    ),
    Patch(
        "forget-what-joined",
        "driver",
        date(2026, 11, 20),
        "began a turn without events for each message that had entered a running one",
    ),
    Patch(
        "cancel-names-what-waits",
        "driver",
        date(2026, 11, 20),
        "let a cancel that came late stop the turn of a message that had replaced what it meant",
    ),
    Patch("parallel-calls", "both", date(2026, 11, 18), "began all calls of a reply at once"),
)
