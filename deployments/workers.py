"""Workers of one host: one a GPU, pinned to it by UUID, and stopped so that no flow run stays Running.

A Prefect worker that is told to end takes its engines down without a word to the server. So the engines are
told first, and each ends its flow run as Crashed; what they leave undone is reported for them.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import psutil

from deployments.automations import HEARTBEAT_S
from deployments.bootstrap import CONTROL_POOL, LANE_POOL
from layertap.errors import DeviceError

GRACE_S = 30.0
"""Seconds an engine has to end its flow run before it is killed."""

SUBMIT_S = 2.0
"""Seconds between a worker's taking a flow run and its engine's start, with room."""

RESTART_S = 5.0
"""Seconds between the death of a worker and its replacement."""

COORDINATORS_PER_WORKER = 8
"""Coordinators wait and watch; many fit one worker."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One Prefect worker to run."""

    name: str
    pool: str
    limit: int
    """Flow runs it takes at a time."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """What its environment, and so its lanes', has beside the supervisor's."""


def visible_gpus() -> list[str]:
    """UUIDs of this host's GPUs, or of those that CUDA_VISIBLE_DEVICES leaves; empty where there is none.

    Raises:
        DeviceError: the driver's tool fails, or CUDA_VISIBLE_DEVICES names a GPU that isn't there.
    """
    try:
        command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        return []
    except subprocess.CalledProcessError as error:
        told = (error.stdout + error.stderr).strip()
        raise DeviceError(f"nvidia-smi can't list the GPUs: {told or error}") from error
    uuids = dict(line.split(", ") for line in listed.splitlines())
    return _chosen(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _chosen(uuids: dict[str, str], visible: str | None) -> list[str]:
    """The UUIDs that CUDA_VISIBLE_DEVICES (indices, or UUIDs or their beginnings) leaves, in its order."""
    if visible is None:
        return list(uuids.values())
    chosen = []
    for name in filter(None, map(str.strip, visible.split(","))):
        found = [uuid for index, uuid in uuids.items() if index == name or uuid.startswith(name)]
        if len(found) != 1:
            there = ", ".join(f"{index} ({uuid})" for index, uuid in uuids.items())
            raise DeviceError(f"CUDA_VISIBLE_DEVICES names {name!r}; this host has {there}")
        chosen += found
    return chosen


def lane_workers(num_lanes: int | None = None) -> list[WorkerSpec]:
    """A worker for each visible GPU; `num_lanes` unpinned ones (else one) where there is none.

    Raises:
        DeviceError: more lanes than GPUs were asked for.
    """
    gpus = visible_gpus()
    if gpus and num_lanes is not None and num_lanes > len(gpus):
        raise DeviceError(f"{num_lanes} lanes asked for, but this host shows {len(gpus)} GPUs, one a lane")
    if gpus:
        places = [{"CUDA_VISIBLE_DEVICES": uuid} for uuid in gpus[:num_lanes]]
    else:
        num_threads = max(1, (os.cpu_count() or 1) // (num_lanes or 1))
        places = [{"OMP_NUM_THREADS": str(num_threads)}] * (num_lanes or 1)
    host = socket.gethostname()
    return [
        WorkerSpec(name=f"{host}-lane-{k}", pool=LANE_POOL, limit=1, environment=place)
        for k, place in enumerate(places)
    ]


def control_workers() -> list[WorkerSpec]:
    """The one worker that runs this host's coordinators."""
    name = f"{socket.gethostname()}-control"
    return [WorkerSpec(name=name, pool=CONTROL_POOL, limit=COORDINATORS_PER_WORKER)]


class Worker:
    """A Prefect worker process, started again when it dies."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._engines: list[psutil.Process] = []
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process"]
        command += ["--pool", self.spec.pool, "--name", self.spec.name, "--limit", str(self.spec.limit)]
        settings = {
            "PREFECT_LOGGING_EXTRA_LOGGERS": "layertap",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": HEARTBEAT_S,
        }
        environment = {**os.environ, **settings, **self.spec.environment}
        # Its own session, so that a Ctrl-C in the terminal reaches the supervisor alone.
        self.process = psutil.Popen(command, env=environment, start_new_session=True)

    def engines(self) -> list[psutil.Process]:
        """The processes that execute its flow runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child for child in self.process.children() if _alive(child)]
        return []

    def look(self) -> None:
        """Replace the process if it died; its orphaned engines end first, they may hold the GPU."""
        if self.process.poll() is None:
            self._engines = self.engines()
            return
        print(f"worker {self.spec.name} ended with status {self.process.returncode}; starting it again")
        _end([engine for engine in self._engines if _alive(engine)])
        time.sleep(RESTART_S)
        self._start()


def supervise(specs: Iterable[WorkerSpec]) -> None:
    """Run workers until SIGTERM or Ctrl-C, then stop them in order."""
    stopping = threading.Event()
    # Handlers of our own also make the workers start with default ones, even if we inherited SIG_IGN.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    workers = [Worker(spec) for spec in specs]
    while not stopping.wait(1.0):
        for worker in workers:
            worker.look()
    stop(workers)


def stop(workers: Sequence[Worker]) -> None:
    """End the engines, see to it that the server knows, and then end the workers.

    A suspended worker doesn't see its engine end, so it takes no other flow run meanwhile.
    """
    workers = [worker for worker in workers if worker.process.poll() is None]
    try:
        _end(_suspend(workers))
    finally:  # nobody else would wake them
        for worker in workers:
            worker.process.terminate()
            worker.process.resume()
    _, alive = psutil.wait_procs([worker.process for worker in workers], timeout=GRACE_S)
    for process in alive:
        process.kill()


def _suspend(workers: Sequence[Worker]) -> list[psutil.Process]:
    """Suspend the workers and list their engines; one that may be about to start its engine gets a moment."""
    for worker in workers:
        worker.process.suspend()
    if idle := [worker for worker in workers if not worker.engines()]:
        for worker in idle:
            worker.process.resume()
        time.sleep(SUBMIT_S)
        for worker in idle:
            worker.process.suspend()
    return [engine for worker in workers for engine in worker.engines()]


def _flow_run(engine: psutil.Process) -> UUID | None:
    """The flow run that a process executes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if text := engine.environ().get("PREFECT__FLOW_RUN_ID"):
            return UUID(text)
    return None


def _report_ended(flow_runs: Iterable[UUID]) -> None:
    """Tell the server of the runs whose engines had no time to; it may be away, or not know them any more."""
    import httpx
    from prefect.exceptions import PrefectException

    for flow_run in flow_runs:
        try:
            _set_ended(flow_run)
        except (httpx.HTTPError, PrefectException) as error:
            print(f"the server wasn't told that flow run {flow_run} ended with its worker: {error!r}")


def _set_ended(flow_run: UUID) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled, Crashed

    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run).state
        if state is not None and not state.is_final():
            ended = Cancelled if state.is_cancelling() else Crashed
            client.set_flow_run_state(flow_run, ended(message="its worker was stopped"), force=True)


def _end(engines: Sequence[psutil.Process]) -> None:
    """End engines and whatever is left of their process groups; report what they could not."""
    flow_runs = [run for engine in engines if (run := _flow_run(engine))]
    for engine in engines:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.terminate()
    deadline = time.monotonic() + GRACE_S
    while any(map(_alive, engines)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for engine in engines:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
    _report_ended(flow_runs)


def _alive(process: psutil.Process) -> bool:
    """Whether the process still executes: a suspended worker leaves its dead engines as zombies."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
