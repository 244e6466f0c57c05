"""An OTLP collector that remembers what it was sent."""

import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """A span, as it arrived."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    raw: str
    failed: bool = False


@dataclass(frozen=True)
class Point:
    """A number of a metric, or how often a histogram was recorded."""

    metric: str
    attributes: dict[str, Any]
    number: float


@dataclass(frozen=True)
class Line:
    """A log record, as it arrived."""

    event: str
    attributes: dict[str, Any]


class Collector:
    """Listens on loopback while the `with` block runs."""

    def __init__(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.receive(self.path, gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.spans: list[Seen] = []
        self.metrics: set[str] = set()
        self.points: list[Point] = []
        self.lines: list[Line] = []
        self.raw_metrics: list[str] = []

    def __enter__(self) -> "Collector":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def receive(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            self.spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
        if path == "/v1/metrics":
            request = ExportMetricsServiceRequest.FromString(body)
            points = list(_points(request))
            self.points.extend(points)
            self.metrics |= {point.metric for point in points}
            self.raw_metrics.append(str(request))
        if path == "/v1/logs":
            self.lines.extend(_lines(ExportLogsServiceRequest.FromString(body)))


def _spans(request: ExportTraceServiceRequest) -> Iterator[Seen]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    service=service,
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    attributes=_attributes(span.attributes),
                    raw=str(span),
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                )


def _points(request: ExportMetricsServiceRequest) -> Iterator[Point]:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                data = getattr(metric, str(metric.WhichOneof("data")))
                for point in data.data_points:
                    is_histogram = hasattr(point, "bucket_counts")
                    number = point.count if is_histogram else point.as_int or point.as_double
                    yield Point(metric.name, _attributes(point.attributes), number)


def _lines(request: ExportLogsServiceRequest) -> Iterator[Line]:
    for resource in request.resource_logs:
        for scope in resource.scope_logs:
            for record in scope.log_records:
                yield Line(record.event_name, _attributes(record.attributes))


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
