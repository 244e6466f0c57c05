"""The limits of a turn: when it may not begin another step, how long it may take, and what counts as used."""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from perdure.agents.agent import Limits
from perdure.errors import DeadlineExceeded, KillsWorkers
from perdure.harness.journal import USAGE, StoredUsage, TurnJournal, written
from perdure.protocol import names
from perdure.protocol.events import Usage
from perdure.protocol.inputs import digest
from perdure.protocol.requests import Coordinates, Failure
from perdure.store.attempts import AttemptReport
from perdure.store.base import Store, commit_with_retries
from perdure.store.values import Attempt, Commit, SessionChange


def limit_reached(limits: Limits, step: int, used: Usage, turn: TurnJournal | None = None) -> Failure | None:
    """The failure of a turn that may not begin this step. `used`: by the session and its descendants."""
    if step >= limits.steps_per_turn:
        message = f"The turn was stopped after {limits.steps_per_turn} steps."
        return Failure(code="STEP_LIMIT_REACHED", message=message)
    if failure := token_limit_reached(limits, used):
        return failure
    times = limits.repeated_calls
    if turn and times and step >= times and (tool := _repeated(turn, range(step - times, step))):
        message = f"The model has called {tool} with the same arguments in {times} steps, always with the same result."
        return Failure(code="NO_PROGRESS", message=message, details={"toolName": tool, "times": times})
    return None


def token_limit_reached(limits: Limits, used: Usage, who: str = "The session") -> Failure | None:
    for name, limit, count in (
        ("input", limits.input_tokens, used.input_tokens),
        ("output", limits.output_tokens, used.output_tokens),
    ):
        if limit is not None and count >= limit:
            message = f"{who} has used {count} {name} tokens; its limit is {limit}."
            return Failure(code="SESSION_TOKEN_LIMIT_REACHED", message=message)
    return None


def _repeated(turn: TurnJournal, steps: range) -> str | None:
    """The tool of a call that was made in each of these steps, with the same arguments and the same result."""
    repeated: dict[str, str] | None = None
    for step in reversed(steps):
        reply = turn.reply(step)
        calls = {
            digest({"tool": call.tool, "input": call.input, "outcome": outcome.model_dump(mode="json")}): call.tool
            for call in (reply.calls if reply else ())
            if (outcome := turn.outcome(step, call.call_id))
        }
        repeated = calls if repeated is None else {key: tool for key, tool in repeated.items() if key in calls}
        if not repeated:
            return None
    return next(iter(repeated.values()), None) if repeated else None


#: Attempts at a provider that returns transient errors: about 15 seconds with their pauses. Then the turn fails and
#: the session continues. An activity whose worker died has more attempts (workflows/policies.py).
_PROVIDER_ATTEMPTS = 6


def provider_attempts(limits: Limits) -> float:
    return math.inf if limits.max_attempts is None else min(limits.max_attempts, _PROVIDER_ATTEMPTS)


def refuse_killer(attempt: Attempt, limits: Limits) -> None:
    """Raise `KillsWorkers` if the attempts before this one have cost too many workers."""
    if limits.max_deaths is not None and attempt.deaths >= limits.max_deaths:
        raise KillsWorkers(f"The worker died in {attempt.deaths} attempts at this step.")


def deadline_failure(limits: Limits) -> Failure:
    seconds = limits.turn_seconds
    return Failure(code=DeadlineExceeded.code, message=f"The turn was stopped: its deadline is {seconds:g} seconds.")


@asynccontextmanager
async def until_deadline(left: float | None) -> AsyncGenerator[None]:
    """Raise `DeadlineExceeded` when the work takes longer than what is left of the turn's time."""
    limit = asyncio.timeout(left)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise DeadlineExceeded from None
        raise


async def add_usage(
    store: Store, at: Coordinates, key: str, kind: str, usage: Usage, report: AttemptReport | None = None
) -> None:
    """Count what was paid for and is in no other record: once for each key of a step, also after the session's end.

    `report`: of the attempt that has used it.
    """
    if usage == Usage():
        return
    key = names.usage_key(key)
    commit = Commit(
        at.session_id,
        unless=(at.turn, at.step, key),
        records=(written(at.turn, at.step, key, USAGE, StoredUsage(kind=kind, usage=usage)),),
        change=SessionChange(usage=usage),
        report=report,
        late=True,
    )
    await commit_with_retries(store, commit)
