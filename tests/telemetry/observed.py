"""Stacks that export to a collector, and what arrives there."""

import hashlib
import uuid
from typing import Any

from tests.support.collector import Collector, Line, Point, Seen
from tests.support.plugin import StackFactory
from tests.support.processes import wait_until
from tests.support.stack import Stack
from tests.support.talk import Json, Talk

KEYS = {"ada": "the key of ada", "olga": "the key of olga"}


def observed(make: StackFactory, collector: Collector, **environment: str) -> Stack:
    """A stack that tells the collector everything at once."""
    return make(
        agents="tests.telemetry.agents:agents",
        provider=True,
        environment={
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_BLRP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "300",
            **environment,
        },
    )


def api_keys() -> str:
    """Two callers; one of them is an operator."""
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    return f"ada={digests['ada']},olga={digests['olga']}+role=operator"


class Traced:
    """A caller whose sessions are in a trace of their own."""

    def __init__(self, talk: Talk, collector: Collector) -> None:
        self.trace = uuid.uuid4().hex
        self.talk = talk
        self._collector = collector
        talk.http.headers["traceparent"] = f"00-{self.trace}-b7ad6b7169203331-01"

    async def says(self, message: str) -> list[Json]:
        await (self.talk.send if self.talk.session_id else self.talk.create)(message)
        return await self.talk.until_boundary()

    def named(self, name: str) -> list[Seen]:
        return [span for span in self._collector.spans if span.name == name and span.trace == self.trace]

    def spans(self, name: str, count: int = 1) -> list[Seen]:
        """The spans of this name, when so many have arrived."""
        wait_until(lambda: len(self.named(name)) >= count, f"{count} × {name} in {self.trace}")
        return self.named(name)

    def span(self, name: str) -> Seen:
        [span] = self.spans(name)
        return span


def points(collector: Collector, metric: str, **attributes: Any) -> list[Point]:
    """The points of a metric with these attributes, when there are some."""
    wanted = {name.replace("__", "."): value for name, value in attributes.items()}

    def found() -> list[Point]:
        return [
            point for point in collector.points if point.metric == metric and wanted.items() <= point.attributes.items()
        ]

    wait_until(lambda: bool(found()), f"{metric} {wanted}; there are {sorted(collector.metrics)}")
    return found()


def lines(collector: Collector, event: str) -> list[Line]:
    def found() -> list[Line]:
        return [line for line in collector.lines if line.event == event]

    wait_until(lambda: bool(found()), event)
    return found()
