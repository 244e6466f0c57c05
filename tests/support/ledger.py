"""The outside world of a tool: a process that writes down every effect before it answers.

    POST /effect {"key": …, "body": …}   one line, on the disk before the answer
    POST /pass {"gate": …}               waits there until the gate is opened
    POST /open {"gate": …}               opens a gate for good
    GET  /effects  GET /waiting          what happened, and who waits where

An effect takes the options `delayBefore`, `delayAfter` (seconds), `hang` (written down, and never answered) and
`honour` (a key that is known already has no second effect).
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from perdure.dev.supervisor import die_with_parent

# How long a caller may wait at a gate before the ledger takes it for forgotten.
_GATE_PATIENCE = 120.0


class Book:
    """The effects, in memory and on the disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self._lock = threading.Lock()
        self.effects: list[dict[str, Any]] = []

    def write(self, key: str, body: Any, *, honour: bool) -> bool:
        """Write the effect down; False when its key is known and honoured."""
        with self._lock:
            if honour and any(effect["key"] == key for effect in self.effects):
                return False
            effect = {"key": key, "body": body, "at": time.time()}
            self._file.write(json.dumps(effect).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self.effects.append(effect)
            return True


class Gates:
    """Places where a caller waits until a test lets it pass."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: set[str] = set()
        self.waiting: list[str] = []

    def pass_through(self, gate: str) -> bool:
        with self._changed:
            self.waiting.append(gate)
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: gate in self._open, timeout=_GATE_PATIENCE)
            finally:
                self.waiting.remove(gate)

    def open(self, gate: str) -> None:
        with self._changed:
            self._open.add(gate)
            self._changed.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, book: Book) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.book = book
        self.gates = Gates()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Callers die in the middle of a request here; anything else is a mistake of ours.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def ledger(self) -> "_Server":
        assert isinstance(self.server, _Server)
        return self.server

    def do_GET(self) -> None:
        match self.path:
            case "/effects":
                self._answer(200, list(self.ledger.book.effects))
            case "/waiting":
                self._answer(200, list(self.ledger.gates.waiting))
            case _:
                self._answer(404, None)

    def do_POST(self) -> None:
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        match self.path:
            case "/effect":
                self._effect(asked)
            case "/pass":
                passed = self.ledger.gates.pass_through(asked["gate"])
                self._answer(200 if passed else 504, {"passed": passed})
            case "/open":
                self.ledger.gates.open(asked["gate"])
                self._answer(200, {})
            case _:
                self._answer(404, None)

    def _effect(self, asked: dict[str, Any]) -> None:
        time.sleep(asked.get("delayBefore", 0))
        fresh = self.ledger.book.write(asked["key"], asked.get("body"), honour=asked.get("honour", False))
        time.sleep(asked.get("delayAfter", 0))
        if asked.get("hang"):
            self.ledger.gates.pass_through("hang")
        self._answer(200, {"fresh": fresh})

    def _answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        # The caller may be dead by now; that is what we are here for.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@dataclass(frozen=True)
class Ledger:
    """The ledger, for a test."""

    url: str
    process: "subprocess.Popen[bytes]"

    def effects(self) -> list[dict[str, Any]]:
        return self._get("/effects")

    def of_call(self, tool: str, note: str) -> list[dict[str, Any]]:
        """The effects of one tool with one note."""
        return [each for each in self.effects() if each["body"]["tool"] == tool and each["body"]["note"] == note]

    def open(self, gate: str) -> None:
        self._post("/open", {"gate": gate})

    def reached(self, gate: str) -> bool:
        """Whether a tool waits at the gate right now."""
        return gate in self._get("/waiting")

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def _post(self, path: str, body: Any) -> None:
        request = urllib.request.Request(self.url + path, data=json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()


@contextlib.contextmanager
def running_ledger(directory: Path) -> Generator[Ledger]:
    """A ledger in a process of its own, which ends with this block, or with us."""
    tie: Callable[[], None] = die_with_parent()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ledger", "--file", str(directory / "ledger.jsonl")],
        stdout=subprocess.PIPE,
        preexec_fn=tie,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield Ledger(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, required=True)
    server = _Server(Book(parser.parse_args().file))
    server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
