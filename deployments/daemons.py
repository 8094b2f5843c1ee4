"""Background processes of the embedded stack: started, found again by pid file, ended."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from layertap.errors import InputError, LayertapError

LOG_LINES_SHOWN = 15


class DaemonError(LayertapError):
    """A process of the embedded stack didn't start."""


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """A process in a session of its own, with a log and a pid file in the state folder."""

    name: str
    state: Path

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self.state / "logs" / f"{self.name}.log"

    @property
    def _pid_file(self) -> Path:
        return self.state / "pids" / f"{self.name}.json"

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it in the background."""
        for path in (self.log, self._pid_file):
            path.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = psutil.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pid_file.write_text(json.dumps({"pid": process.pid, "created": process.create_time()}))

    def process(self) -> psutil.Process | None:
        """The process, or None when it doesn't run; another one with a reused pid isn't taken for it."""
        try:
            noted = json.loads(self._pid_file.read_text())
            process = psutil.Process(noted["pid"])
            same = abs(process.create_time() - noted["created"]) < 1.0
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except (FileNotFoundError, psutil.NoSuchProcess):
            return None

    def end(self, timeout_s: float) -> bool:
        """End it and wait until it's gone, killing it after `timeout_s`; False if it didn't run."""
        process = self.process()
        if process is not None:
            process.terminate()
            _, alive = psutil.wait_procs([process], timeout=timeout_s)
            for survivor in alive:
                survivor.kill()
        self._pid_file.unlink(missing_ok=True)
        return process is not None

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `ready` says so.

        Raises:
            DaemonError: the process ended, or wasn't ready within `timeout_s`; with the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self.process() is None:
                raise DaemonError(f"{self.name} ended while starting; the end of {self.log}:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise DaemonError(f"{self.name} isn't up after {timeout_s:g} s; {self.log}:\n{self._tail()}")
            time.sleep(0.3)

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


def answers(url: str) -> bool:
    """Whether an HTTP server answers at `url`."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def check_port_free(port: int, *, purpose: str, option: str) -> None:
    """Refuse a port on loopback that somebody else listens on.

    Raises:
        InputError: naming the port and the option that moves it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                f"port {port}, wanted for {purpose}, is taken by another process; "
                f"end that one or choose another port with {option}"
            ) from error
