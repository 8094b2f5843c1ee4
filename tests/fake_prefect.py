"""A stand-in for Prefect's server that answers everything with one status, for tests of who asks it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """Answers every request with one status, and keeps what was posted."""

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.status = status
        self.posted: list[tuple[str, Any]] = []


class Answer(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.send_response(404 if "csrf-token" in self.path else self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, json.loads(body)))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def answering(status: int) -> Iterator[FakeServer]:
    with FakeServer(status) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
