"""One model call, from the records to a reply in the records."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from uuid import uuid4

from perdure import telemetry
from perdure.agents.agent import Agent
from perdure.agents.registry import AgentRegistry
from perdure.errors import ModelFailed
from perdure.models.base import DEMO, ModelSource, Prompt, Reply
from perdure.protocol.events import Usage
from perdure.protocol.names import MODEL_SCOPE, REPLY
from perdure.protocol.requests import Failure, Finished, ModelCall, ModelOutcome, Unheard
from perdure.settings import Settings
from perdure.store.base import Attempt, Commit, DeliveryTaken, Fence, Hold, SessionRow, Store

from .calls import CallNames, asked
from .facts import Facts
from .history import Histories, Past, call_ids_of
from .journal import HeardDelivery, TurnJournal, model_outcome
from .killpoints import reach
from .opening import Opening, hear, open_step
from .prompt import joined, messages_of
from .scene import find_agent, find_session, view_of
from .settling import Settlement, settle_failure, settle_reply
from .steadfast import commit_steadfastly
from .telling import Telling
from .toolbox import Usable, open_toolbox


@dataclass(frozen=True)
class _Scene:
    """What an attempt knows before it asks."""

    call: ModelCall
    attempt: Attempt
    row: SessionRow
    agent: Agent
    past: Past
    turn: TurnJournal

    @property
    def facts(self) -> Facts:
        return Facts(self.call.at, self.attempt.number)

    @property
    def recorded(self) -> ModelOutcome | None:
        """How this step, or its whole turn, has ended already."""
        record = self.turn.at(self.call.at.step, REPLY) or self.turn.over
        return model_outcome(record) if record else None


class ModelStep:
    """Asks the model once for each step, and never twice for an answer that was recorded."""

    def __init__(
        self,
        store: Store,
        agents: AgentRegistry,
        models: ModelSource,
        settings: Settings,
        histories: Histories | None = None,
    ) -> None:
        self._store = store
        self._agents = agents
        self._models = models
        self._settings = settings
        self._histories = histories or Histories(store)

    async def run(self, call: ModelCall, attempt: Attempt) -> ModelOutcome:
        scene = await self._scene(call, attempt)
        if scene.recorded:
            return scene.recorded
        reach("model_before_begin")
        begun = await self._begin(scene)
        reach("model_after_begin")
        if not isinstance(begun, _Scene):
            return begun
        outcome = await self._answer(begun)
        reach("model_after_settle")
        return outcome

    async def _scene(self, call: ModelCall, attempt: Attempt) -> _Scene:
        row = await find_session(self._store, call.at.session_id)
        agent = find_agent(self._agents, call.agent)
        past, turn = await self._histories.load(call.at.session_id, call.at.turn)
        return _Scene(call, attempt, row, agent, past, turn)

    # --- before the model is asked ---

    async def _begin(self, scene: _Scene) -> "_Scene | ModelOutcome":
        """Take the step over, hear its deliveries, tell the readers; all in one commit."""
        call = scene.call
        while True:
            heard: tuple[HeardDelivery, ...] = ()
            if call.at.step == 0:
                heard, turn = await hear(self._store, call.at, call.deliveries, scene.turn)
                if not heard:
                    return Unheard()
                scene = replace(scene, turn=turn)
            opening = open_step(call.at, scene.attempt.number, heard, scene.turn, scene.agent.name, self._model(scene))
            try:
                return await self._open(scene, opening)
            except DeliveryTaken:
                # Withdrawn or refused since it was read: look again at what is left.
                continue

    async def _open(self, scene: _Scene, opening: Opening) -> "_Scene | ModelOutcome":
        limit = self._limit(scene)
        settlement = settle_failure(scene.facts, scene.call.mode, limit, Usage()) if limit else Settlement()
        at = scene.call.at
        done = await self._store.commit(
            Commit(
                at.session_id,
                unless=(at.turn, at.step, REPLY),
                fence=self._fence(scene, Hold.RAISE),
                superseding=scene.facts.superseded(scene.attempt.generation),
                records=(*opening.records, *settlement.records),
                events=(*opening.events, *settlement.events),
                consume=opening.consume,
                consume_turn=at.turn,
                close=settlement.close,
                close_turn=at.turn if limit else None,
                change=settlement.changing(opening.change),
            )
        )
        if done.existing:
            return model_outcome(done.existing)
        if limit:
            return Finished(failure=limit)
        return replace(scene, turn=scene.turn.plus(opening.records))

    def _limit(self, scene: _Scene) -> Failure | None:
        limits, used = scene.agent.limits, scene.row.usage
        if scene.call.at.step >= limits.steps_per_turn:
            return Failure(
                code="STEP_LIMIT_REACHED",
                message=f"The turn was stopped after {limits.steps_per_turn} steps.",
            )
        for name, limit, count in (
            ("input", limits.input_tokens, used.input_tokens),
            ("output", limits.output_tokens, used.output_tokens),
        ):
            if limit is not None and count >= limit:
                return Failure(
                    code="SESSION_TOKEN_LIMIT_REACHED",
                    message=f"The session has used {count} {name} tokens; its limit is {limit}.",
                )
        return None

    # --- the model ---

    async def _answer(self, scene: _Scene) -> ModelOutcome:
        calls = CallNames(scene.call.at, scene.past.call_ids | call_ids_of(scene.turn))
        telling = Telling(self._store, scene.facts, scene.attempt, calls)
        tools = await open_toolbox(scene.agent)
        spent = Usage()
        try:
            reply, spent = await self._ask(scene, telling, tools)
        except ModelFailed as failed:
            if failed.transient:
                raise
            return await self._settle(
                scene, telling, settle_failure(scene.facts, scene.call.mode, _failure(failed), spent)
            )
        if reply is None:
            failure = _failure(ModelFailed("Empty model response"), name="Empty model response")
            return await self._settle(scene, telling, settle_failure(scene.facts, scene.call.mode, failure, spent))
        response = calls.applied(reply.response)
        wanted = asked(response, tools, scene.call.at, self._settings)
        return await self._settle(
            scene, telling, settle_reply(scene.facts, scene.call.mode, response, reply.finish_reason, spent, wanted)
        )

    async def _ask(self, scene: _Scene, telling: Telling, tools: Mapping[str, Usable]) -> tuple[Reply | None, Usage]:
        """The model's answer, asked for a second time when the first one is empty; and what that cost."""
        model = self._models.model(self._model(scene))
        prompt = await self._prompt(scene, tools)
        spent = Usage()
        for _ in range(2):
            with telemetry.model_call(
                scene.call.at, scene.agent.name, self._model(scene), scene.attempt.number
            ) as spanned:
                reply = await telling.follow(model.stream(prompt))
                telemetry.model_replied(spanned, reply.usage, reply.finish_reason)
            spent = spent + reply.usage
            if reply.response.tool_calls or (reply.response.text or "").strip():
                return reply, spent
        return None, spent

    async def _prompt(self, scene: _Scene, tools: Mapping[str, Usable]) -> Prompt:
        messages = [*scene.past.messages, *messages_of(scene.turn)]
        return Prompt(
            messages=joined(messages, await self._instructions(scene)),
            tools=[tool.definition for tool in tools.values()],
            settings=scene.agent.settings,
        )

    async def _instructions(self, scene: _Scene) -> str:
        instructions = scene.agent.instructions
        if isinstance(instructions, str):
            return instructions
        said = instructions(view_of(scene.row, scene.call.at, scene.turn.principal))
        return await said if inspect.isawaitable(said) else said

    # --- after it has answered ---

    async def _settle(self, scene: _Scene, telling: Telling, settlement: Settlement) -> ModelOutcome:
        """Record the answer, tell it, and leave the step; all in one commit."""
        reach("model_before_settle")
        at = scene.call.at
        done = await commit_steadfastly(
            self._store,
            Commit(
                at.session_id,
                unless=(at.turn, at.step, REPLY),
                fence=self._fence(scene, Hold.RELEASE),
                records=settlement.records,
                events=(*telling.rest(), *settlement.events),
                close=settlement.close,
                change=settlement.change,
            ),
        )
        if done.existing is None and (ended := settlement.ended):
            telemetry.turn_ended(scene.agent.name, ended)
        return model_outcome(done.existing or settlement.records[0])

    def _fence(self, scene: _Scene, hold: Hold) -> Fence:
        return Fence(scene.call.at.turn, scene.call.at.step, MODEL_SCOPE, scene.attempt, hold)

    def _model(self, scene: _Scene) -> str:
        return scene.agent.model or self._settings.model or DEMO


def _failure(failed: ModelFailed, name: str = "ModelFailed") -> Failure:
    details = {"errorId": str(uuid4()), "message": failed.message, "name": name, **failed.details}
    return Failure(code=failed.code, message=failed.message, details=details)
