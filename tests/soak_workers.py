"""Runs of the soak through a real Prefect server: its lanes, and their workers, are killed at random.

A worker that is killed takes its lane with it and is started again by its supervisor. If it was that of the
coordinators, the run is started again, as a user would. A lane needs half a minute to start, so kills are at
least as far apart.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from deployments.stack import BLOCK, Stack
from layertap.object_server import ObjectServer
from tests.proxy import Proxy
from tests.soak import MAX_STARTS, Soak
from tests.system.stacks import RealStack, free_ports, layertap, start, wait_for

GAP_S = (30.0, 45.0)
"""Seconds between two kills, drawn from between these."""

RUN_S = 900.0
LANES_END_S = 120.0

SAVE_BLOCK = """
import os
from deployments.bootstrap import save_s3_block
save_s3_block("{block}", bucket="{bucket}", endpoint_url="{endpoint}", region="{region}",
    access_key=os.environ["AWS_ACCESS_KEY_ID"], secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
    config=dict(s3=dict(addressing_style="path")))
"""


@contextmanager
def running_stack(folder: Path, num_lanes: int) -> Iterator[tuple[RealStack, ObjectServer]]:
    """A stack with so many workers for lanes."""
    port, s3_port = free_ports()
    stack = RealStack(Stack(state=folder / "stack", port=port, s3_port=s3_port))
    ports = ["--port", str(port), "--s3-port", str(s3_port)]
    layertap("up", "--state", stack.state, *ports, "--lanes", str(num_lanes))
    try:
        server = ObjectServer.running(stack.stack.objects)
        assert server is not None
        yield stack, server
    finally:
        layertap("down", "--state", stack.state)


def use_proxy(stack: RealStack, server: ObjectServer, proxy: Proxy) -> None:
    """Have everything that runs on the stack reach the store through the proxy."""
    settings = server.settings()
    code = SAVE_BLOCK.format(
        block=BLOCK, bucket=settings.bucket, endpoint=proxy.endpoint_url, region=settings.region
    )
    environment = {**stack.stack.environment(), **server.environment()}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)


@dataclass
class WorkersSoak(Soak):
    """One run through Prefect and what was done to it."""

    stack: RealStack | None = None

    def go(self) -> None:
        """Start the run as often as it takes, as a user would."""
        while self.num_starts < MAX_STARTS:
            self.num_starts += 1
            if self._run_once():
                break
        self.num_left()
        assert self.stack is not None
        self.num_started = len(self.stack.runs_of("extraction_lane", self.name))

    def num_left(self) -> int:
        """Lanes that live though their run is over, and don't end in the time that they have for it.

        A worker may have taken one from the queue right before the run's end.
        """
        with suppress(AssertionError):
            wait_for(lambda: not self._engines("lanes"), LANES_END_S)
        return len(self._engines("lanes"))

    def _run_once(self) -> bool:
        assert self.stack is not None
        options = self.stack.run_options(self.settings.dataset, self.settings.target, self.name)
        options[options.index("--lanes") + 1] = str(self.num_lanes)
        run = start(options)
        self._plan_kill()
        deadline = time.monotonic() + RUN_S
        while run.poll() is None:
            if self.num_killed < self.num_kills and time.monotonic() > self.kill_due:
                self._kill_one()
                self._plan_kill()
            assert time.monotonic() < deadline, f"{self.name} doesn't end"
            time.sleep(0.5)
        if run.returncode and run.stdout:
            print(f"{self.name}, start {self.num_starts}: {run.stdout.read()[-1000:]}", file=sys.stderr)
        return run.returncode == 0

    def _kill_one(self) -> None:
        """Kill a lane, a lane's worker, or now and then the worker of the coordinators."""
        victims = [*self._engines("lanes"), *self._workers("lanes"), *self._workers("control")]
        if victims:
            with suppress(psutil.NoSuchProcess):
                self.draw.choice(sorted(victims, key=lambda process: process.pid)).kill()
                self.num_killed += 1

    def _workers(self, daemon: str) -> list[psutil.Process]:
        assert self.stack is not None
        supervisor = self.stack.stack.daemon(daemon).process()
        return supervisor.children() if supervisor else []

    def _engines(self, daemon: str) -> list[psutil.Process]:
        return [engine for worker in self._workers(daemon) for engine in _children(worker)]


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        children: list[psutil.Process] = process.children()
        return children
    return []
