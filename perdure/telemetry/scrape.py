"""Metrics as Prometheus reads them: as text, and at an address of their own."""

import contextlib
import logging
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.exposition import generate_latest

log = logging.getLogger("perdure.telemetry")

#: Seconds within which a reader sends its request and takes the response, all of it: the next one waits meanwhile.
_PATIENCE = 5.0


class Scrape:
    """What was measured in this process, in a registry of its own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.reader = PrometheusMetricReader(registry=self._registry)
        # A collection is not made for several readers at once.
        self._lock = threading.Lock()

    def text(self) -> bytes:
        """All metrics. It takes milliseconds: call it in a thread."""
        with self._lock:
            return generate_latest(self._registry)

    def listen(self, host: str, port: int) -> "Listener | None":
        """Serve them; None when the address cannot be had: metrics do not keep a process from its work."""
        try:
            return Listener(self, host, port)
        except OSError as error:
            log.error("no metrics are served at %s port %s: %s", host, port, error.strerror or error)
            return None


class _Server(socketserver.TCPServer):
    # Not `HTTPServer`: it looks its own name up, which takes seconds where no one knows it.
    allow_reuse_address = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)


def _cut(connection: socket.socket) -> None:
    """End what is read from and written to a connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Listener:
    """Serves one reader at a time, in a thread: when the event loop is blocked, metrics are still to be had."""

    def __init__(self, scrape: Scrape, host: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                super().setup()
                # A timeout of the socket begins again with each byte.
                self._deadline = threading.Timer(_PATIENCE, _cut, [self.connection])
                self._deadline.daemon = True
                self._deadline.start()

            def finish(self) -> None:
                self._deadline.cancel()
                super().finish()

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                body = scrape.text()
                self.send_response(200)
                self.send_header("content-type", scrape.content_type)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """A line for each scrape would say nothing."""

        self._server = _Server(host, port, Handler)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        log.info("Serving metrics on http://%s:%s/metrics", host, port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
