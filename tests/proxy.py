"""A proxy in front of a real S3 server that does to requests what networks and busy stores do.

It hands on what clients signed, the Host header included, so the server behind checks every signature.
"""

import random
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

PIECE_BYTES = 64 << 10

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}


@dataclass
class Faults:
    """What goes wrong, as shares of all requests; may be changed while the proxy runs."""

    slow_down: float = 0.0
    """Answered 503 SlowDown after the body was read."""

    cut_upload: float = 0.0
    """The connection ends half-way through the request's body; the server sees nothing of it."""

    lost_reply: float = 0.0
    """The server does what was asked, and nobody answers."""

    cut_reply: float = 0.0
    """The connection ends half-way through the reply's body."""

    bytes_per_s: float | None = None
    """Of all uploads together."""

    refuses_checksums: bool = False
    """Uploads with a checksum header are refused, as by stores that don't know them."""

    ignores_conditions: bool = False
    """A put that may only create succeeds where the object exists."""

    forbidden: re.Pattern[str] | None = None
    """Requests, as `PUT /bucket/key?query`, that match it are answered with AccessDenied."""

    unanswered: re.Pattern[str] | None = None
    """The first that matches it is never answered, nor seen by the server."""

    expired_keys: set[str] = field(default_factory=set)
    """Access keys answered with ExpiredToken, which the answer to a HEAD has no body to say."""

    expired_status: int = 400
    """HTTP status of that answer."""

    conflict: float = 0.0
    """A put that may only create is answered 409, as by AWS where others create the object just now."""

    undeleted: list[str] = field(default_factory=list)
    """Codes with which the next deletions of objects fail, each in an answer of 200."""

    flip_upload: float = 0.0
    """A bit of the request's body is flipped on its way."""

    first: dict[str, re.Pattern[str]] = field(default_factory=dict)
    """One of the shares above, by name -> requests, the first of which meets it for sure."""

    on_stored: Callable[[str], None] = lambda _: None
    """Called with an object's path after the server has stored it whole, and before it is told so."""


class Proxy:
    """The proxy, its faults, and what it did so far."""

    def __init__(
        self,
        upstream_port: int,
        faults: Faults | None = None,
        *,
        seed: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.faults = faults or Faults()
        self.counts: Counter[str] = Counter()
        self.requests: list[str] = []
        """As `PUT /bucket/key?query`."""
        self.unsigned: list[str] = []
        """Paths of the bodies that came without a signature of their own."""
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._upload_ends_at = 0.0
        self.ended, self.holds_one = threading.Event(), threading.Event()
        self.held = ""
        """Path of the request that is never answered."""
        proxy = self

        class Handler(_Handler):
            upstream = ("127.0.0.1", upstream_port)

        Handler.proxy = proxy
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.endpoint_url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator["Proxy"]:
        """Serve in threads of this process."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.ended.set()
            self._server.shutdown()
            self._server.server_close()

    def draw(self, request: str) -> str | None:
        """The fault of the next request, which counts once it has done something."""
        self.count("requests")
        with self._lock:
            for name, requests in self.faults.first.items():
                if requests.match(request):
                    del self.faults.first[name]
                    return name
            point = self._random.random()
            for name in ("slow_down", "cut_upload", "lost_reply", "cut_reply", "flip_upload", "conflict"):
                point -= getattr(self.faults, name)
                if point < 0:
                    return name
        return None

    def count(self, name: str) -> None:
        """Count a request, or a fault that was done to one."""
        with self._lock:
            self.counts[name] += 1

    def hold(self, path: str) -> bool:
        """Keep a request, if it is the first, until the proxy ends; returns whether it was."""
        with self._lock:
            if self.held:
                return False
            self.held = path
        self.holds_one.set()
        return self.ended.wait()

    def throttle(self, num_bytes: int) -> None:
        """Wait as long as these bytes take on a line that all uploads share."""
        if not self.faults.bytes_per_s:
            return
        with self._lock:
            now = time.monotonic()
            self._upload_ends_at = max(now, self._upload_ends_at) + num_bytes / self.faults.bytes_per_s
            wait_s = self._upload_ends_at - now
        time.sleep(wait_s)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    upstream: tuple[str, int]

    def _handle(self) -> None:
        request, faults = f"{self.command} {self.path}", self.proxy.faults
        fault = self.proxy.draw(request)
        self.proxy.requests.append(request)
        length = int(self.headers.get("Content-Length", 0))
        if fault == "cut_upload":
            self.rfile.read(length // 2)
            return self._hang_up(fault)
        body = self._body(length)
        if body and self.headers.get("x-amz-content-sha256") == "UNSIGNED-PAYLOAD":
            self.proxy.unsigned.append(self.path)
        key = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        checksums = [
            n for n in self.headers if n.lower().startswith(("x-amz-checksum", "x-amz-sdk-checksum"))
        ]
        if fault == "slow_down":
            self.proxy.count(fault)
            return self._refuse(503, "SlowDown")
        if key in faults.expired_keys:
            return self._refuse(faults.expired_status, "ExpiredToken")
        if self._is_one_of(faults.forbidden):
            return self._refuse(403, "AccessDenied")
        if self._is_one_of(faults.unanswered) and self.proxy.hold(self.path):
            return self._hang_up("unanswered")
        if faults.refuses_checksums and checksums and self.command == "PUT":
            return self._refuse(400, "InvalidArgument")
        if fault == "conflict" and self.headers.get("If-None-Match"):
            self.proxy.count(fault)
            return self._refuse(409, "ConditionalRequestConflict")
        if faults.undeleted and self.path.endswith("?delete"):
            return self._keep(faults.undeleted.pop(), body)
        if fault == "flip_upload" and body and self.command == "PUT":
            self.proxy.count(fault)
            body = bytes([body[0] ^ 1]) + body[1:]
        reply = self._ask(body)
        data = reply.read()
        if reply.status == 200 and self._has_stored():
            faults.on_stored(urlsplit(self.path).path)
        if fault == "lost_reply":
            return self._hang_up(fault)
        if faults.ignores_conditions and reply.status in (409, 412):
            reply.status, data = 200, b""
            reply.headers["ETag"] = '"none"'
        self._answer(reply, data, cut=fault == "cut_reply" and bool(data))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _has_stored(self) -> bool:
        """Whether this request makes an object if it succeeds: a put of it whole, or the end of parts."""
        query = urlsplit(self.path).query
        return not query if self.command == "PUT" else self.command == "POST" and "uploadId=" in query

    def _is_one_of(self, requests: re.Pattern[str] | None) -> bool:
        return requests is not None and requests.match(f"{self.command} {self.path}") is not None

    def _body(self, length: int) -> bytes:
        pieces = []
        while length:
            pieces.append(self.rfile.read(min(PIECE_BYTES, length)))
            length -= len(pieces[-1])
            self.proxy.throttle(len(pieces[-1]))
        return b"".join(pieces)

    def _ask(self, body: bytes) -> HTTPResponse:
        connection = HTTPConnection(*self.upstream, timeout=120)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in HOP_BY_HOP | {"expect"}:
                connection.putheader(name, value)
        connection.endheaders(body or None)
        return connection.getresponse()

    def _answer(self, reply: HTTPResponse, data: bytes, *, cut: bool) -> None:
        self.send_response_only(reply.status)
        is_head = self.command == "HEAD"
        for name, value in reply.getheaders():
            if name.lower() not in HOP_BY_HOP | {"content-length"} or (is_head and name == "Content-Length"):
                self.send_header(name, value)
        if not is_head:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self._hang_up("cut_reply")

    def _keep(self, code: str, body: bytes) -> None:
        key = body.decode().partition("<Key>")[2].partition("</Key>")[0]
        error = f"<Error><Key>{key}</Key><Code>{code}</Code><Message>kept</Message></Error>"
        self._say(200, f"<DeleteResult>{error}</DeleteResult>")

    def _refuse(self, status: int, code: str) -> None:
        self._say(status, "" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>")

    def _say(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _hang_up(self, fault: str) -> None:
        self.proxy.count(fault)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
