"""OpenTelemetry, configured by its own environment variables.

`OTEL_EXPORTER_OTLP_ENDPOINT` (or the one for traces or metrics alone) enables it. Without it, nothing is exported and
the SDK is not imported.
"""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace
from temporalio.client import Plugin

from perdure.errors import Invalid

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Telemetry:
    """The configured exporters. `close` flushes them."""

    def __init__(self, plugins: Sequence[Plugin], closers: Sequence[Callable[[], Any]]) -> None:
        self.plugins = plugins
        self._closers = closers

    def close(self) -> None:
        for close in self._closers:
            close()


def set_up(service: str) -> Telemetry:
    """Configure exporters from the environment. The plugins are for the Temporal client."""
    traces, meters = _enabled("TRACES"), _enabled("METRICS")
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (traces or meters):
        return Telemetry((), ())
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service)})
    plugins: list[Plugin] = []
    closers: list[Callable[[], Any]] = []
    if traces:
        plugins.append(_export_spans(resource, closers))
    if meters:
        _export_metrics(resource, closers)
    return Telemetry(plugins, closers)


def _export_spans(resource: "Resource", closers: list[Callable[[], Any]]) -> Plugin:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from temporalio.contrib.opentelemetry import OpenTelemetryPlugin, create_tracer_provider

    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise _missing() from None

    # This provider does not export the spans of a replayed workflow again.
    provider = create_tracer_provider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    closers.append(provider.shutdown)
    return OpenTelemetryPlugin()


def _export_metrics(resource: "Resource", closers: list[Callable[[], Any]]) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    except ImportError:
        raise _missing() from None
    provider = MeterProvider(resource=resource, metric_readers=[PeriodicExportingMetricReader(OTLPMetricExporter())])
    metrics.set_meter_provider(provider)
    closers.append(provider.shutdown)


def _enabled(signal: str) -> bool:
    return bool(os.environ.get(_ENDPOINT) or os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"))


def _missing() -> Invalid:
    return Invalid("Exporting telemetry needs the extra: pip install 'perdure[otlp]'.")
