"""A network in front of a server on loopback: what it answers arrives some time later.

    python -m layertap.bench.distance PORT SECONDS

A process of its own, for copying bytes must not cost the measured one its interpreter. Answers longer than a
piece would be delayed again with each piece; those of uploads are short.
"""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PIECE_BYTES = 1 << 20


@contextmanager
def away(port: int, seconds: float) -> Iterator[int]:
    """The port behind which the server at `port` of loopback is `seconds` away, there and back."""
    command = [sys.executable, "-m", __name__, str(port), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def serve(port: int, seconds: float) -> None:
    """Relay connections for ever; the port to connect to is printed."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", port))
            for ends in ((client, server, 0.0), (server, client, seconds)):
                threading.Thread(target=_relay, args=ends, daemon=True).start()


def _relay(source: socket.socket, target: socket.socket, seconds: float) -> None:
    piece = memoryview(bytearray(PIECE_BYTES))
    try:
        while count := source.recv_into(piece):
            time.sleep(seconds)
            target.sendall(piece[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one side has hung up: so does the other
        source.close()
        target.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))
