"""A compaction of a long session: what a step costs beside its model calls, on the store alone."""

import asyncio
from collections.abc import AsyncGenerator
from time import perf_counter

from pydantic_ai.messages import ModelResponse, TextPart
from pydantic_ai.usage import RequestUsage

from bench.http import Refused
from bench.plan import Plan
from bench.stats import median
from bench.table import Line, Target
from perdure.agents import Agent, AgentRegistry
from perdure.harness.harness import Harness
from perdure.models.base import Prompt, Reply, finish_reason, usage_of
from perdure.protocol.deliveries import LOCAL, DeliveryBody, DeliveryRef
from perdure.protocol.requests import Coordinates, ModelCall
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.deliveries import NewDelivery
from perdure.store.follow import read_all
from perdure.store.open import open_store
from perdure.store.values import Attempt, NewSession
from perdure.testing import OneModel

NAME = "compaction"

#: The tokens of one turn, half of them in its message and half in its reply, and the window that they fill.
_TOKENS = 2_000
_WINDOW = 100_000
_TEXT = "word" * (_TOKENS // 2)
#: Milliseconds that a compaction may cost beside the model call that it is.
_SHARE = 100


class _Instant:
    """A model without latency. Each turn adds to the request what was said in it."""

    def __init__(self) -> None:
        self.tokens = 0

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Reply, None]:
        self.tokens += _TOKENS
        usage = RequestUsage(input_tokens=self.tokens, output_tokens=_TOKENS // 2)
        response = ModelResponse(parts=[TextPart(_TEXT)], usage=usage, finish_reason="stop")
        yield Reply(response, finish_reason(response), usage_of(response))


async def measure(database: str, plan: Plan) -> list[Line]:
    store = await open_store(database)
    try:
        await store.migrate()
        plain, warm, cold = list[float](), list[float](), list[float]()
        async with asyncio.timeout(4 * plan.patience):
            for number in range(plan.compactions):
                for measured, fresh in ((warm, False), (cold, True)):
                    before, compacting = await _session(store, f"ses_compaction_{number}_{fresh}", fresh=fresh)
                    plain.append(before)
                    measured.append(compacting)
    finally:
        await store.close()
    what = f"step with a summary of {_WINDOW:,} tokens"
    return [
        Line(NAME, f"{what}, p50", "ms", 1e3 * median(warm), target=Target("≤", _SHARE)),
        Line(NAME, f"{what}, on a worker that has not served the session, p50", "ms", 1e3 * median(cold)),
        Line(NAME, "step before it, p50", "ms", 1e3 * median(plain)),
    ]


async def _session(store: Store, session_id: str, *, fresh: bool) -> tuple[float, float]:
    """Fill the window of one session; the seconds of the last step before the compaction, and of the one with it."""
    agent, model = Agent(name="bench", instructions="You are measured."), _Instant()

    def worker() -> Harness:
        return Harness(store, AgentRegistry([agent]), OneModel(model), Settings(agents=""))

    await store.create_session(
        NewSession(session_id, agent="bench", mode="conversation", token_hash=session_id, principal=LOCAL)
    )
    harness, seconds, turn = worker(), 0.0, 0
    # The threshold is 0.9 of the window.
    while model.tokens + _TOKENS <= 0.9 * _WINDOW:
        seconds, turn = await _step(store, harness, session_id, turn), turn + 1
    compacting = await _step(store, worker() if fresh else harness, session_id, turn)
    summaries = [event.turn async for event in read_all(store, session_id) if event.type == "compaction.completed"]
    if summaries != [turn]:
        raise Refused(f"the history was summarised in the turns {summaries}, and not in {turn}")
    return seconds, compacting


async def _step(store: Store, harness: Harness, session_id: str, turn: int) -> float:
    body = DeliveryBody(message=_TEXT, principal=LOCAL).model_dump(mode="json")
    delivery = NewDelivery(session_id, f"{session_id}/{turn}", body, LOCAL.owner)
    await store.accept(delivery)
    call = ModelCall(
        at=Coordinates(session_id=session_id, turn=turn),
        agent="bench",
        deliveries=(DeliveryRef(id=delivery.delivery_id, token_hash=session_id),),
    )
    begun = perf_counter()
    await harness.call_model(call, Attempt(1, turn + 1))
    return perf_counter() - begun
