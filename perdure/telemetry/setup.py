"""OpenTelemetry, configured by its own environment variables, and metrics for Prometheus.

`OTEL_EXPORTER_OTLP_ENDPOINT` (or the one of a signal alone) enables the export, PERDURE_METRICS and
PERDURE_METRICS_PORT the scraping. Without them nothing is measured and the SDK is not imported.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace
from temporalio.client import Plugin

from perdure.errors import Invalid

from . import gauges, spans
from .spans import Choices

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource

    from .scrape import Scrape

log = logging.getLogger("perdure.telemetry")

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
#: Seconds for the last spans and metrics to leave. A collector that does not answer must not hold a process up.
_LAST = 5.0
#: Seconds between two looks at the event loop.
_LOOK = 0.5

Closer = Callable[[], Any]


class Telemetry:
    """The configured exporters. `close` flushes them."""

    def __init__(
        self,
        plugins: Sequence[Plugin] = (),
        closers: Sequence[Closer] = (),
        scrape: "Scrape | None" = None,
        *,
        measures: bool = False,
    ) -> None:
        self.plugins = plugins
        #: What Prometheus reads, if metrics are to be scraped.
        self.scrape = scrape
        #: Whether metrics leave this process at all.
        self.measures = measures
        self._closers = closers

    def close(self) -> None:
        """End all exporters, together and in bounded time."""
        threads = [threading.Thread(target=_closed, args=(close,), daemon=True) for close in self._closers]
        for thread in threads:
            thread.start()
        deadline = monotonic() + _LAST
        for thread in threads:
            thread.join(max(0.0, deadline - monotonic()))


def _closed(close: Closer) -> None:
    try:
        close()
    except Exception as error:
        log.warning("telemetry could not be closed: %s", type(error).__name__)


def set_up(
    service: str, choices: Choices, *, scraped: bool = False, listen: tuple[str, int] | None = None
) -> Telemetry:
    """Configure exporters from the environment. The plugins are for the Temporal client.

    `scraped`: metrics are collected for a reader in this process; `listen`: they are also served at this address.
    """
    spans.choose(choices)
    traces, meters = _enabled("TRACES"), _enabled("METRICS")
    logs = "logs" in choices.content and _enabled("LOGS")
    if "traces" in choices.content and not traces:
        log.warning("PERDURE_TELEMETRY_CONTENT names traces, and no endpoint takes them")
    if "logs" in choices.content and not logs:
        log.warning("PERDURE_TELEMETRY_CONTENT names logs, and no endpoint takes them")
    scraped = scraped or listen is not None
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (traces or meters or logs or scraped):
        return Telemetry()
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service)})
    plugins: list[Plugin] = []
    closers: list[Closer] = []
    if traces:
        plugins.append(_export_spans(resource, closers))
    if logs:
        _export_logs(resource, closers)
    scrape = _scrape(listen, closers) if scraped else None
    if meters or scrape:
        readers = [*([_exporting_reader()] if meters else []), *([scrape.reader] if scrape else [])]
        _measure(resource, readers, closers)
    return Telemetry(plugins, closers, scrape, measures=meters or scraped)


def _export_spans(resource: "Resource", closers: list[Closer]) -> Plugin:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from temporalio.contrib.opentelemetry import OpenTelemetryPlugin, create_tracer_provider

    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise _missing() from None

    # This provider does not export the spans of a replayed workflow again.
    provider = create_tracer_provider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    closers.append(provider.shutdown)
    return OpenTelemetryPlugin()


def _export_logs(resource: "Resource", closers: list[Closer]) -> None:
    """Export the events with content, and no line of the log."""
    from opentelemetry._logs import set_logger_provider
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    try:
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    except ImportError:
        raise _missing() from None
    provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
    set_logger_provider(provider)
    closers.append(provider.shutdown)


def _exporting_reader() -> "MetricReader":
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    except ImportError:
        raise _missing() from None
    return PeriodicExportingMetricReader(OTLPMetricExporter())


def _scrape(listen: tuple[str, int] | None, closers: list[Closer]) -> "Scrape":
    try:
        from .scrape import Scrape
    except ImportError:
        raise Invalid("Metrics for Prometheus need the extra: pip install 'perdure[prometheus]'.") from None
    scrape = Scrape()
    if listen is not None and (listener := scrape.listen(*listen)) is not None:
        closers.append(listener.close)
    return scrape


def _measure(resource: "Resource", readers: "Sequence[MetricReader]", closers: list[Closer]) -> None:
    from opentelemetry.sdk.metrics import MeterProvider

    provider = MeterProvider(resource=resource, metric_readers=readers, shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    closers.append(provider.shutdown)
    watching = asyncio.get_running_loop().create_task(_watch_loop())
    loop = asyncio.get_running_loop()
    closers.append(lambda: loop.call_soon_threadsafe(watching.cancel))


async def _watch_loop() -> None:
    """Measure by how much the event loop is late."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LOOK
        await asyncio.sleep(_LOOK)
        gauges.loop_was_late(max(0.0, loop.time() - due))


def _enabled(signal: str) -> bool:
    return bool(os.environ.get(_ENDPOINT) or os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"))


def _missing() -> Invalid:
    return Invalid("Exporting telemetry needs the extra: pip install 'perdure[otlp]'.")
