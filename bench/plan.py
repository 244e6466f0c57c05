"""How much is measured. Every loop is bounded here, in count and in time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The counts of one run."""

    # One session: rounds of turns, floor and product by turns.
    rounds: int = 10
    turns: int = 20
    warmup: int = 10
    # Many sessions at once.
    crowd: int = 50
    crowd_rounds: int = 3
    crowd_turns: int = 10
    # A reply in tokens.
    tokens: int = 400
    tokens_per_second: int = 200
    # More busy sessions than a worker keeps in its cache, and as many as there is room for.
    busy: int = 260
    busy_in_cache: int = 160
    busy_turns: int = 4
    # Growth of one session; both windows are [from, to) and equally long.
    growth: int = 2000
    young: tuple[int, int] = (100, 121)
    old: tuple[int, int] = (1980, 2001)
    # Model calls of the turn that shows what a step costs Temporal.
    tool_rounds: int = 40
    # The event log alone.
    appends: int = 2000
    writers: int = 16
    readers: int = 200
    published: int = 200
    # Forks: turns of the old session, forks of each session that are timed.
    forked_turns: int = 1000
    forks: int = 100
    # Sessions that are compacted, on each kind of worker.
    compactions: int = 10
    # Commits with a checkpoint.
    checkpoints: int = 100
    # Idle.
    parked: int = 1000
    parked_warmup: int = 100
    idle_seconds: float = 20.0
    # A restart of the worker: sessions, turns that each has had, sessions that keep taking turns.
    restarted: int = 500
    restarted_turns: int = 300
    restarted_active: int = 50
    # Sessions that wake on a new worker: the turns that each has had, and how often each wakes.
    ages: tuple[int, ...] = (20, 100, 1000)
    wakes: int = 10
    # Children of one turn at once, and how often the most of them are started; turns with one child beside one tool.
    children: tuple[int, int, int] = (1, 10, 50)
    families: int = 3
    # Inner calls of a program, and programs.
    inner_calls: int = 20
    programs: int = 3
    # Readers of one stream, in each of two forms, and the events of a long log.
    watchers: int = 200
    logged: int = 100_000
    # The console: pages that are loaded, the events of a long session, consoles that are open at once.
    console_loads: int = 10
    console_events: int = 10_000
    consoles: int = 50
    # Posts to one session at once.
    posts: int = 50
    # No single wait is longer.
    patience: float = 60.0


FULL = Plan()

QUICK = Plan(
    rounds=4,
    turns=10,
    warmup=5,
    crowd_rounds=2,
    crowd_turns=3,
    tokens=100,
    busy_turns=2,
    growth=120,
    young=(5, 26),
    old=(100, 121),
    tool_rounds=10,
    appends=500,
    published=50,
    forks=30,
    compactions=4,
    checkpoints=30,
    parked=200,
    parked_warmup=50,
    idle_seconds=5.0,
    restarted=30,
    restarted_turns=30,
    restarted_active=20,
    ages=(20, 100),
    wakes=5,
    families=1,
    programs=1,
    logged=20_000,
    console_loads=5,
    consoles=20,
)

#: So small that it shows only that everything works.
TINY = Plan(
    rounds=1,
    posts=3,
    turns=2,
    warmup=1,
    crowd=3,
    crowd_rounds=1,
    crowd_turns=2,
    tokens=5,
    busy=4,
    busy_in_cache=2,
    busy_turns=1,
    growth=10,
    young=(1, 4),
    old=(7, 10),
    # More than an agent may repeat a call by default.
    tool_rounds=6,
    appends=20,
    writers=4,
    readers=5,
    published=5,
    forked_turns=20,
    forks=5,
    compactions=1,
    checkpoints=3,
    parked=3,
    parked_warmup=2,
    idle_seconds=0.5,
    restarted=3,
    restarted_turns=3,
    restarted_active=2,
    ages=(1, 2),
    wakes=1,
    children=(1, 2, 3),
    families=1,
    inner_calls=2,
    programs=1,
    watchers=2,
    logged=200,
    console_loads=1,
    console_events=80,
    consoles=2,
)
