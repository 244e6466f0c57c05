"""Agents and runs as clients of Flue know them: prompts to named instances, and their events as Durable Streams."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from api.auth import Gate
from api.bodies import BodyReader, Fields, check_lane, parse_queue_mode
from api.durable.joint import Joint
from api.durable.offsets import place, write_offset
from api.durable.read import Reader, StreamNotFound, departing
from api.durable.sources import (
    AgentLog,
    EventLog,
    Log,
    Projection,
    RunLookup,
    SharedInstances,
    log_of_agent,
    log_of_run,
)
from api.envelope import SECURITY
from api.requests import WAIT, RequestLimits, check_json, idempotency_key, own_url, waits_for_result
from api.responses import flags, reply
from perdure.agents.registry import AgentRegistry
from perdure.errors import Invalid, PerdureError
from perdure.protocol.deliveries import DeliveryBody, FilePart, Message, QueueMode, TextPart
from perdure.protocol.events import Event, EventType, Usage
from perdure.protocol.flue import model_of, usage_of
from perdure.protocol.wire import JsonObject
from perdure.runtime.streams.instances import Admission, Instances, Named
from perdure.store.base import Store
from perdure.store.values import SessionRow

#: `/agents/{agent}/eve/v1/…` is something else.
_RESERVED = "eve"

_MOST_IMAGES = 100
#: Characters of base64.
_LARGEST_IMAGE = 14 * 1024**2
_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_LONGEST_NAME = 255


class PromptFailed(PerdureError):
    """The prompt has failed."""

    status = 500


class PromptAborted(PerdureError):
    """The prompt was aborted."""

    status = 500
    code = "submission_aborted"


@dataclass(frozen=True)
class _Result:
    outcome: str
    text: str
    usage: Usage
    model: str


class AgentRoutes:
    def __init__(
        self,
        gate: Gate,
        agents: AgentRegistry,
        instances: Instances,
        store: Store,
        reader: Reader,
        bodies: BodyReader,
        limits: RequestLimits,
        wait: float = WAIT,
    ) -> None:
        self._gate = gate
        self._agents = agents
        self._instances = instances
        self._shared = SharedInstances(instances)
        self._store = store
        self._reader = reader
        self._bodies = bodies
        self._limits = limits
        self._wait = wait

    async def prompt(self, request: Request) -> Response:
        """Send a message to the instance; it begins with the first one."""
        principal = await self._gate.admit(request)
        agent, instance = self._named(request)
        waits = waits_for_result(request)
        key = idempotency_key(request)
        if request.headers.get("content-type") is not None or request.headers.get("content-length") not in (None, "0"):
            check_json(request)

        def parse(fields: Fields) -> tuple[DeliveryBody, QueueMode | None]:
            body = DeliveryBody(message=parse_prompt(fields), principal=principal)
            self._limits.check(body)
            check_lane(fields)
            return body, parse_queue_mode(fields)

        body, mode = await self._bodies.read(request, parse, optional=True)
        admission = await self._instances.prompt(agent, instance, body, principal, key, mode)
        receipt = admission.receipt
        result = await self._result(request, admission, agent, instance) if waits else None
        url, offset = own_url(request), write_offset(place(admission.number, admission.start))
        answer: JsonObject = {"streamUrl": url, "offset": offset, "submissionId": admission.delivery_id}
        if receipt.deduplicated:
            answer["deduplicated"] = True
        headers = {**SECURITY, **flags(deduplicated=receipt.deduplicated, delayed=receipt.delayed)}
        if result is None:
            return reply(answer, 202, {"location": url, "stream-next-offset": offset, **headers})
        _raise_unless_completed(result, admission.delivery_id)
        shown = {"text": result.text, "usage": usage_of(result.usage), "model": model_of(result.model)}
        return reply({"result": shown, **answer}, 200, headers)

    async def read(self, request: Request) -> Response:
        """The events of the instance."""
        principal = await self._gate.admit(request)
        agent, instance = self._named(request)
        name, conversation = self._instances.name(agent, instance, principal), _shows_changes(request)
        newest = await self._shared.find(name)
        if newest is None:
            raise StreamNotFound

        def log_of(each: Named) -> Log:
            log = log_of_agent(each.row.session_id, agent, instance, number=each.number, conversation=conversation)
            return replace(log, policy=self._reader.policy)

        return await self._reader.respond(request, AgentLog(self._store, self._shared, name, newest, log_of))

    def _named(self, request: Request) -> tuple[str, str]:
        instance: str = request.path_params["instance"]
        is_text = instance.isascii() and instance.isprintable() and instance.strip()
        if instance == _RESERVED or not is_text or len(instance) > _LONGEST_NAME:
            raise Invalid(
                f"An instance has a name of at most {_LONGEST_NAME} printable ASCII characters, and not {_RESERVED!r}."
            )
        return self._agents[request.path_params["agent"]].name, instance

    async def _result(self, request: Request, admission: Admission, agent: str, instance: str) -> _Result | None:
        """What the prompt has come to; None when that is not known in time."""
        until, position = monotonic() + self._wait, admission.start
        receipt = admission.receipt
        log = log_of_agent(receipt.session_id, agent, instance)
        following = _Following(admission.delivery_id, Projection(self._store, log))
        async with self._store.watch(receipt.session_id) as watch, departing(request) as gone:
            while True:
                for event in (page := await self._store.events(receipt.session_id, position)):
                    position = event.index + 1
                    if (outcome := await following.take(event)) is not None:
                        return _Result(outcome, following.text, following.usage, following.model or "")
                if page:
                    continue
                if monotonic() >= until or self._reader.closing:
                    return None
                await self._reader.change(watch, until - monotonic(), gone)


class _Following:
    """Follows one submission through the events after it was accepted."""

    def __init__(self, submission: str, projection: Projection) -> None:
        self._submission = submission
        self._projection = projection
        self._begun = False
        self.text = ""
        self.usage = Usage()
        self.model: str | None = None

    async def take(self, event: Event) -> str | None:
        """The outcome, once it is settled."""
        self._begun = self._begun or self._submission in event.delivery_ids
        data: Mapping[str, Any] = event.data or {}
        if self._begun and event.type == EventType.MESSAGE_COMPLETED:
            self.text = data.get("message", "")
        if self._begun and event.type == EventType.STEP_COMPLETED:
            self.usage += Usage.model_validate(data.get("usage") or {})
        for shown in await self._projection.of(event):
            if shown["type"] == "turn":
                asked = shown["request"]
                self.model = f"{asked['providerId']}:{asked['requestedModel']}" if asked else self.model
            if shown["type"] == "submission_settled" and shown["submissionId"] == self._submission:
                return shown["outcome"]
        return None


class RunReader:
    """Serves the events of runs. Who may read a run is decided before."""

    def __init__(self, store: Store, reader: Reader, runs: RunLookup) -> None:
        """`runs` finds the record of a run."""
        self._store = store
        self._reader = reader
        self._runs = runs
        self._rows = Joint[SessionRow | None]()

    async def read(self, request: Request) -> Response:
        """The events of a run that exists and belongs to the caller."""
        log = log_of_run(request.path_params["run_id"], self._runs)
        return await self._reader.respond(request, EventLog(self._store, log, self._rows))


def parse_prompt(fields: Fields) -> Message:
    """The text, and the images, of a prompt."""
    text, images = fields.get("message"), fields.get("images", [])
    if not isinstance(text, str) or not text.strip():
        raise Invalid("Expected 'message' to be a text that is not empty.")
    if not isinstance(images, list) or len(cast("list[Any]", images)) > _MOST_IMAGES:
        raise Invalid(f"Expected 'images' to be an array of at most {_MOST_IMAGES} images.")
    if not images:
        return text
    return (TextPart(text=text), *(_image(each) for each in cast("list[Any]", images)))


def _image(value: Any) -> FilePart:
    given: Fields = cast("Fields", value) if isinstance(value, dict) else {}
    data, kind = given.get("data"), given.get("mimeType")
    if given.get("type") != "image" or not isinstance(data, str) or not isinstance(kind, str) or not kind.strip():
        raise Invalid("Expected each image to be {type: 'image', data, mimeType}.")
    if not 0 < len(data) <= _LARGEST_IMAGE or _BASE64.fullmatch(data) is None or len(data) % 4:
        raise Invalid(f"Expected 'data' of each image to be base64, of at most {_LARGEST_IMAGE} characters.")
    return FilePart(media_type=kind, data=data)


def _shows_changes(request: Request) -> bool:
    """Whether the changes of the conversation are asked for, and not its events."""
    given = request.query_params.getlist("view")
    if given not in ([], ["updates"]):
        raise Invalid("Expected 'view' to be updates.")
    return bool(given)


def _raise_unless_completed(result: _Result, submission: str) -> None:
    about = {"submissionId": submission}
    match result.outcome:
        case "completed":
            return
        case "aborted":
            raise PromptAborted(meta=about)
        case _:
            raise PromptFailed(meta=about)
