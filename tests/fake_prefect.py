"""A stand-in for Prefect's server that answers everything alike, for tests of who asks it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """Answers every request with one status and body, and keeps what was posted."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.status, self.body = status, body
        self.posted: list[tuple[str, Any]] = []


class Answer(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.send_response(404 if "csrf-token" in self.path else self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, json.loads(body)))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def answering(status: int, body: Any = None) -> Iterator[FakeServer]:
    with FakeServer(status, json.dumps(body).encode() if body else b"") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
