"""One session in a world that is played: people, an agent with its tools, a scripted model, Temporal and the store."""

import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.usage import RequestUsage
from pydantic_core import from_json, to_json

import activities.attempt
import perdure.harness.events
import perdure.harness.model_call
import perdure.harness.resume
import perdure.harness.tools.call
import perdure.harness.turn
import perdure.runtime.deliveries
import perdure.runtime.drivers.client
import perdure.runtime.inputs
import perdure.runtime.sessions
import perdure.runtime.signals
import workflows.inbox
import workflows.outcomes
import workflows.session
import workflows.turn
import workflows.versions
from activities.model import ModelActivities
from activities.tools import ToolActivities
from activities.turns import TurnActivities
from perdure import Agent, AgentRegistry, ToolContext, tool
from perdure.agents.agent import OnInterruptedReply, Turns, WhileWaiting
from perdure.errors import Conflict, Invalid, ModelFailed, Unavailable
from perdure.harness.harness import Harness
from perdure.models.base import Delta, Prompt, Reply, TextDelta, finish_reason, usage_of
from perdure.protocol import names
from perdure.protocol.deliveries import LOCAL, Capabilities, DeliveryBody, Mode, Receipt
from perdure.protocol.requests import ToolCall
from perdure.runtime.reconciler import Reconciler
from perdure.runtime.sessions import Sessions
from perdure.runtime.sweeper import Sweeper
from perdure.session import decisions
from perdure.session.decisions import Wait
from perdure.session.state import SessionState, derive_token, hash_token, load_session
from perdure.settings import Settings
from perdure.store.base import Store
from perdure.store.deliveries import DeliveryRow
from perdure.store.inputs import InputQuery, InputRow
from perdure.store.values import SessionRow

from .processes import CURRENT, Fate, Pace, Process, Processes, WatchedStore, patiently, watched
from .script import Answer, call, next_words, response_to, without_beginning
from .temporal import RUNNING, PlayedDriver, Temporal

SECRET = b"secret"
OTHER_TOKEN = "another token"

#: Names of tools in the script, and what they are.
AT_MOST_ONCE = frozenset({"charge", "pay", "risky", "rekey"})
GATED = frozenset({"pay", "refund", "risky"})

#: What one reply of the model costs.
COST = 7

#: When everything begins.
START = 1_900_000_000.0

_TOOLS = AT_MOST_ONCE | GATED | {"look", "ask"}


class Serving(AgentRegistry):
    """The agents of the workers, which may be away."""

    served = True

    def get(self, name: str) -> Agent | None:
        return super().get(name) if self.served else None


@dataclass(frozen=True)
class Effect:
    call_id: str
    tool: str
    #: When it was decided that it happens, in the order of everything.
    begun: int
    #: The turn that ran it.
    turn: int


@dataclass(frozen=True)
class CancelRequest:
    """A cancel that was accepted."""

    at: int
    turn: int
    #: What waited to be read by that turn, if it had not begun.
    met: frozenset[str] | None


@dataclass
class Notes:
    """What the test has seen happen, beside what the product says."""

    effects: list[Effect] = field(default_factory=list[Effect])
    cancel_requests: list[CancelRequest] = field(default_factory=list[CancelRequest])
    #: Accepted deliveries, and the hash of the token that each came with.
    accepted: dict[str, str] = field(default_factory=dict[str, str])
    #: The key of the request that each came with.
    made: dict[str | None, str] = field(default_factory=dict[str | None, str])
    receipts: dict[str, Receipt] = field(default_factory=dict[str, Receipt])
    wrong: list[str] = field(default_factory=list[str])


class World:
    """Everything but the store lasts for one example."""

    def __init__(
        self,
        store: Store,
        patch: pytest.MonkeyPatch,
        *,
        waiting: WhileWaiting = "queue",
        turns: Turns,
        broken: OnInterruptedReply = "retract",
    ) -> None:
        self.now = START
        self.store = store
        self.notes = Notes()
        self.processes = Processes(lambda: self.now)
        self.dooms: Counter[str] = Counter()
        self.session_id = ""
        self.mode: Mode = "conversation"
        self._keys = itertools.count(1)
        self._ids = itertools.count(1)
        self._shaken: set[int] = set()
        self.repeats: list[Callable[[], Awaitable[Receipt]]] = []
        self.seen = watched(WatchedStore(store, self.processes, self._observe))
        self.agents = Serving([replace(self._agent(waiting), turns=turns, on_interrupted_reply=broken)])
        settings = Settings(agents="", model="script", stream_buffer_ms=0)
        workers = [self._worker(settings) for _ in range(2)]
        self.temporal = Temporal(self.processes, lambda: self.now, workers)
        self.driver = PlayedDriver(self.temporal)
        self._patch(patch)
        known = AgentRegistry(list(self.agents))
        self.sessions = Sessions(self.seen, cast(Any, None), secret=SECRET, agents=known)

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        for shell in (workflows.session, workflows.inbox, workflows.outcomes, workflows.turn, workflows.versions):
            patch.setattr(shell, "workflow", self.temporal)
        for module in (
            perdure.harness.model_call,
            perdure.harness.tools.call,
            perdure.harness.events,
            perdure.harness.resume,
            perdure.harness.turn,
        ):
            patch.setattr(module, "reach", self._reach)
        # No wall clock decides what happens: a step may take as long as the machine likes.
        patch.setattr(perdure.harness.events, "_PACE", float("inf"))
        for module in (perdure.runtime.drivers.client, perdure.runtime.signals):
            patch.setattr(module, "in_time", patiently)
        patch.setattr(activities.attempt, "HANDED_BACK", 2)
        patch.setattr(perdure.runtime.inputs, "_now", lambda: datetime.fromtimestamp(self.now, UTC))
        patch.setattr(perdure.runtime.deliveries, "ulid", lambda: f"{next(self._ids):06}")
        patch.setattr(perdure.runtime.sessions, "DriverClient", self._driver)

    def _worker(self, settings: Settings) -> dict[str, Callable[..., Any]]:
        """As `worker.py` puts it together."""
        harness = Harness(self.seen, self.agents, self, settings, clock=lambda: self.now)
        turns, model, tools = TurnActivities(harness), ModelActivities(harness), ToolActivities(harness)
        return {
            names.CALL_MODEL: model.call_model,
            names.CALL_TOOL: tools.call_tool,
            names.RESUME_TURN: turns.resume_turn,
            names.PARK_TURN: turns.park_turn,
            names.WITHDRAW_INPUTS: turns.withdraw_inputs,
            names.REMIND: turns.remind,
            names.CONCLUDE_TURN: turns.conclude_turn,
            names.REFUSE_DELIVERY: turns.refuse_delivery,
            names.ATTEND_SESSION: turns.attend_session,
            names.CLOSE_SESSION: turns.close_session,
            names.REBUILD_SESSION: turns.rebuild_session,
        }

    def _driver(self, client: object, queue: str) -> PlayedDriver:
        return self.driver

    def _reach(self, point: str) -> None:
        if self.dooms[point] > 0 and CURRENT.get() is not None:
            self.dooms[point] -= 1
            self.processes.die_here()

    # --- the agent ------------------------------------------------------------------------------------------

    def _agent(self, waiting: WhileWaiting) -> Agent:
        @tool(effects="idempotent")
        async def look(ctx: ToolContext, n: int) -> str:
            return await self._effect(ctx, n)

        @tool
        async def charge(ctx: ToolContext, n: int) -> str:
            return await self._effect(ctx, n)

        @tool
        async def rekey(ctx: ToolContext, n: int) -> str:
            await ctx.session.set_continuation_token(OTHER_TOKEN)
            return await self._effect(ctx, n)

        @tool(approval="always", expires=100, remind=[30])
        async def pay(ctx: ToolContext, n: int) -> str:
            return await self._effect(ctx, n)

        @tool(approval="always", effects="idempotent", expires=100, on_expiry="approve")
        async def refund(ctx: ToolContext, n: int) -> str:
            return await self._effect(ctx, n)

        @tool(approval="always", expires=150, on_expiry="fail")
        async def risky(ctx: ToolContext, n: int) -> str:
            return await self._effect(ctx, n)

        return Agent("played", tools=[look, charge, rekey, pay, refund, risky], while_waiting=waiting)

    async def _effect(self, context: ToolContext, n: int) -> str:
        process = CURRENT.get()
        assert process is not None
        await self.processes.gate("work")
        call = cast(ToolCall, process.argument)
        turn = (call.told_at or call.at).turn
        self.notes.effects.append(Effect(context.call_id, context.tool, process.wrote, turn))
        await self.processes.access(lambda: self._must_be_approved(context, n))
        await self.processes.gate("work")
        return f"{context.tool} {n}"

    async def _must_be_approved(self, context: ToolContext, n: int) -> None:
        asked = [row for row in await self.inputs() if row.request.call_id == context.call_id]
        if context.tool in GATED and not asked:
            self.notes.wrong.append(f"{context.call_id} ran without a request")
        for row in asked:
            answer = row.answer
            if answer is None or not answer.approves or row.status not in ("answered", "expired"):
                self.notes.wrong.append(f"{context.call_id} ran as {row.status} with {answer}")
            elif {"n": n} != (answer.arguments or row.request.input):
                self.notes.wrong.append(f"{context.call_id} ran with n={n}, approved was {answer}")

    # --- the model ------------------------------------------------------------------------------------------

    def model(self, name: str) -> "World":
        return self

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Delta | Reply, None]:
        self._must_be_paired(prompt.messages)
        messages, begun = without_beginning(prompt.messages)
        words = dict(next_words(messages))
        if "broken" in words:
            raise ModelFailed("No.")
        if "shaky" in words and words["shaky"] not in self._shaken:
            self._shaken.add(words["shaky"])
            raise ModelFailed("Not now.", transient=True)
        text = "" if "silent" in words else "well said".removeprefix(begun)
        first, second = text[:4], text[4:]
        if first:
            yield TextDelta(first)
        await self.processes.gate("work")
        if second:
            yield TextDelta(second)
            # Now the first piece is written, and what comes next may be a death.
            await self.processes.gate("work")
        asked = [(word, n) for word, n in words.items() if word in _TOOLS]
        made = [call(word, n, index) for index, (word, n) in enumerate(asked)]
        response = ModelResponse(
            parts=[*([TextPart(text)] if text else []), *made],
            usage=RequestUsage(input_tokens=COST),
            finish_reason="tool_call" if made else "stop",
        )
        yield Reply(response=response, finish_reason=finish_reason(response), usage=usage_of(response))

    def _must_be_paired(self, messages: Sequence[ModelMessage]) -> None:
        """Each call has its one result in the request that follows."""
        known: set[str] = set()
        for message, following in itertools.zip_longest(messages, messages[1:]):
            if not isinstance(message, ModelResponse):
                continue
            asked = [part.tool_call_id for part in message.parts if isinstance(part, ToolCallPart)]
            parts = following.parts if isinstance(following, ModelRequest) else ()
            given = [part.tool_call_id for part in parts if isinstance(part, ToolReturnPart)]
            if sorted(asked) != sorted(given):
                self.notes.wrong.append(f"a prompt pairs the calls {asked} with the results {given}")
            if known.intersection(asked):
                self.notes.wrong.append(f"a prompt has the calls {asked} twice")
            known.update(asked)

    # --- what was written to the store -----------------------------------------------------------------------

    async def _observe(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        match name:
            case "create_session" | "accept":
                self._accept(result.delivery)
            case "answer":
                if result.delivery is not None:
                    self._accept(result.delivery)
            case "cancel":
                if result is not None and all(each.turn != result.turn for each in self.notes.cancel_requests):
                    row = await self.row()
                    waits = row.turns == result.turn
                    met = frozenset(each.delivery_id for each in await self.store.unread(self.session_id))
                    at = next(self.processes.order)
                    self.notes.cancel_requests.append(CancelRequest(at, result.turn, met if waits else None))
            case _:
                pass

    def _accept(self, row: DeliveryRow) -> None:
        self.session_id = self.session_id or row.session_id
        self.notes.accepted.setdefault(row.delivery_id, str((row.ref or {}).get("tokenHash")))
        if (process := CURRENT.get()) is not None:
            self.notes.made.setdefault(row.delivery_id, process.argument)

    # --- what people do -------------------------------------------------------------------------------------

    async def begin(self, text: str, mode: Mode, fate: Fate) -> None:
        self.mode = mode
        self.session_id = "ses_000001"
        key = f"k{next(self._keys)}"
        asks = Capabilities(request_input=True)

        async def start() -> Receipt:
            return await self.sessions.start("played", text, mode=mode, capabilities=asks, idempotency_key=key)

        await self.request("start", start, key, fate)

    async def say(self, text: str, *, coalesce: bool, old: bool, fate: Fate, pace: Pace) -> None:
        token, key = await self.token(old=old), f"k{next(self._keys)}"

        async def deliver() -> Receipt:
            return await self.sessions.deliver(
                token, text, session_id=self.session_id, coalesce=coalesce, idempotency_key=key
            )

        await self.request("message", deliver, key, fate, pace)

    async def answer(self, which: int, how: Answer, fate: Fate, pace: Pace, *, by_token: bool) -> None:
        rows = await self.inputs()
        if not rows:
            return
        response, key = response_to(rows[which % len(rows)], how), f"k{next(self._keys)}"
        token = await self.token(old=False)
        body = DeliveryBody(input_responses=(response,), principal=LOCAL)

        async def give() -> Receipt:
            if by_token:
                return await self.sessions.deliver(token, body=body, session_id=self.session_id, idempotency_key=key)
            return await self.sessions.inputs.answer(response, LOCAL, idempotency_key=key)

        await self.request("answer", give, key, fate, pace)

    async def repeat(self, which: int) -> None:
        """A caller whose request was not answered retries it."""
        if self.repeats:
            await self.repeats[which % len(self.repeats)]()

    async def cancel(self, turn_id: str | None, fate: Fate, pace: Pace) -> None:
        async def stop() -> None:
            await self.sessions.cancel(self.session_id, turn_id=turn_id)

        await self._run("cancel", stop, fate, pace)

    async def signal(self, name: str, *data: Any) -> None:
        """A client of Temporal signals the driver with anything at all."""
        run = self.temporal.runs[self.session_id]
        if self.temporal.statuses[self.session_id] is not RUNNING or run.session is None:
            return
        getattr(run.session, name)(*data)
        # As Temporal's queries do, and a new run.
        assert to_json(run.session.describe())
        state = run.session._state  # pyright: ignore[reportPrivateUsage]
        assert load_session(from_json(to_json(state.model_dump(mode="json")))) == state
        await self.processes.rest()

    async def sweep(self) -> None:
        """A process that was just started looks after all sessions."""
        signals = self.sessions._signals  # pyright: ignore[reportPrivateUsage]

        async def look() -> None:
            await Sweeper(self.seen, signals, clock=lambda: self.now).sweep()
            await Reconciler(self.seen, self.driver).reconcile()

        await self._run("sweep", look, "lives", "end")

    async def request(
        self, name: str, work: Callable[[], Awaitable[Receipt]], key: str, fate: Fate, pace: Pace = "end"
    ) -> None:
        async def ask() -> None:
            receipt = await work()
            first = self.notes.receipts.setdefault(key, receipt)
            if receipt.delivery_id is not None and receipt.delivery_id not in self.notes.accepted:
                self.notes.wrong.append(f"{receipt.delivery_id} was acknowledged and not accepted")
            # An answer that lost a race in its last moment was not delivered: nothing is kept under its key.
            if self.notes.made.get(first.delivery_id) == key and first.delivery_id != receipt.delivery_id:
                self.notes.wrong.append(f"one request has two receipts: {first} and {receipt}")

        async def again() -> Receipt:
            await self._run(f"{name} again", ask, "lives", "end", key)
            return self.notes.receipts.get(key, Receipt(session_id="", delivery_id=None))

        self.repeats.append(again)
        await self._run(name, ask, fate, pace, key)

    async def _run(self, name: str, work: Callable[[], Awaitable[None]], fate: Fate, pace: Pace, key: str = "") -> None:
        async def ask() -> None:
            try:
                await work()
            except (Conflict, Invalid, Unavailable):
                # Nothing was accepted.
                return
            except Exception as error:
                self.processes.faults.append(error)

        process = self.processes.start(name, ask, fate=fate)
        process.argument = key
        await self.processes.rest()
        await self.processes.go(process, pace)

    # --- looking --------------------------------------------------------------------------------------------

    async def row(self) -> SessionRow:
        row = await self.store.session(self.session_id)
        assert row is not None
        return row

    async def token(self, *, old: bool) -> str:
        current = await self.store.token_of(self.session_id)
        first = derive_token(SECRET, self.session_id)
        return OTHER_TOKEN if current == hash_token(OTHER_TOKEN) and not old else first

    async def inputs(self) -> Sequence[InputRow]:
        return (await self.store.inputs(InputQuery(session_id=self.session_id, status=None, limit=200))).rows

    @property
    def state(self) -> SessionState | None:
        run = self.temporal.runs.get(self.session_id)
        return None if run is None or run.session is None else run.session._state  # pyright: ignore[reportPrivateUsage]

    # --- to the end -----------------------------------------------------------------------------------------

    async def run_all(self) -> None:
        """All processes run until all that can be done without people or time is done."""
        for _ in range(500):
            await self.processes.rest()
            for process in self.temporal.stopping():
                await self.notice(process)
            if not self.processes.alive:
                return
            await self.processes.go(self.processes.alive[0], "end")
        raise AssertionError("the processes do not end")

    async def notice(self, process: Process) -> None:
        """The process learns that its turn is to be stopped."""
        if process.notice is not None and process.begun:
            process.notice()
            await self.processes.rest()

    async def finish(self, *, answers: bool) -> None:
        """Serve, sweep, answer or wait until nothing is left to do."""
        self.dooms.clear()
        self.agents.served = True
        # Each message that waits may take a few rounds.
        for _ in range(100 + 4 * len(self.notes.accepted)):
            await self.run_all()
            self.now += 10
            await self.sweep()
            await self.run_all()
            row = await self.row()
            if row.ended:
                return
            state = self.state
            assert state is not None, "an open session has no driver"
            move = decisions.next_move(state, self.now)
            if not isinstance(move, Wait):
                continue
            waiting = [index for index, each in enumerate(await self.inputs()) if each.status == "open"]
            if not waiting and await self.store.unread(self.session_id):
                continue
            if waiting and (answers or move.until is None):
                await self.answer(waiting[0], "approve", "lives", "end", by_token=False)
            elif move.until is not None:
                self.now = max(self.now, move.until)
                await self.processes.rest()
            else:
                return
        raise AssertionError(f"the session does not settle: {await self.row()}, {self.state}")

    async def end(self) -> None:
        await self.temporal.end()
