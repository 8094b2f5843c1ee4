"""The stack as tests see it: commands, what Prefect says of its runs, what its store holds."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from deployments.commands import DATABASE_VARIABLE
from deployments.daemons import check_port_free
from deployments.stack import Stack
from layertap.catalog import Catalog
from layertap.errors import InputError
from layertap.object_server import ObjectServer, ServerPorts
from layertap.store import Store

LANES = 2


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "layertap.cli", *arguments]


def environment() -> dict[str, str]:
    """That of a user who has no Prefect settings; and none of this process leaks."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}


def layertap(*arguments: str, **variables: str) -> str:
    """Run a `layertap` command that must succeed; returns what it printed."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=300, env=environment() | variables
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


def failing_layertap(*arguments: str) -> str:
    """Run a `layertap` command that must end with status 1; returns what it printed."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 1, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_for(condition: Callable[[], Any], timeout_s: float = 300.0) -> Any:
    """Wait until the condition gives something true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {condition.__name__}"
        time.sleep(0.5)
    return found


@dataclass(frozen=True)
class RealStack:
    stack: Stack

    @property
    def state(self) -> str:
        return str(self.stack.state)

    def up(self) -> None:
        ports = ["--port", str(self.stack.port), "--s3-port", str(self.stack.s3_port)]
        database = {DATABASE_VARIABLE: self.stack.database}
        layertap("up", "--state", self.state, *ports, "--lanes", str(LANES), **database)

    def start_workers(self) -> None:
        """As on hosts that come back: nothing else of the stack is touched."""
        for name, options in (("control", ["--control"]), ("lanes", ["--lanes", str(LANES)])):
            self.stack.daemon(name).start(command("workers", *options), self.stack.environment())

    def declare_dead_after(self, silence_s: float) -> None:
        """Have the automations wait so long for a heartbeat, until the next `up`."""
        code = (
            "from datetime import timedelta\n"
            "from deployments.automations import make_automations\n"
            f"make_automations(timedelta(seconds={silence_s}))"
        )
        subprocess.run([sys.executable, "-c", code], check=True, env=self.stack.environment())

    def num_heartbeats(self, flow_run: str) -> int:
        """Heartbeats of a flow run that the server has seen."""
        resource = {"id": [f"prefect.flow-run.{flow_run}"]}
        sought = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": resource}
        return int(self.post("events/filter", {"filter": sought, "limit": 10})["total"])

    def run_options(self, dataset: str, target: str, root: str, *, shard_tokens: int = 600) -> list[str]:
        return [
            *("run", dataset, "--target", target, "--layers", "0,2,3", "--dtype", "float32"),
            *("--max-length", "64", "--root", root, "--lanes", str(LANES), "--state", self.state),
            *("--param", f"shard_tokens={shard_tokens}", "--param", "max_batch_tokens=256"),
        ]

    def layertap(self, *arguments: str) -> str:
        """A command that must succeed, on this stack; returns what it printed."""
        return layertap(*arguments, "--state", self.state)

    def store(self, root: str) -> Store:
        server = ObjectServer.running(self.stack.objects)
        assert server is not None
        return Store.s3(server.settings(prefix=root), server.session())

    def outcomes(self, root: str) -> list[str]:
        return [o.path for o in self.store(root).list("plans") if o.path.endswith(".outcome")]

    def ask(self, what: str, **filters: Any) -> list[dict[str, Any]]:
        """Prefect's API: what there is of flow_runs, task_runs, artifacts, …"""
        found: list[dict[str, Any]] = self.post(f"{what}/filter", filters)
        return found

    def logs(self) -> list[dict[str, Any]]:
        """All that runs and workers have logged to Prefect."""
        found: list[dict[str, Any]] = []
        while page := self.ask("logs", sort="TIMESTAMP_ASC", limit=200, offset=len(found)):
            found += page
        return found

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """A request to Prefect's API; its answer."""
        answer = httpx.post(f"{self.stack.api_url}/{path}", json=body, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def runs_of(self, flow: str, root: str) -> list[dict[str, Any]]:
        """The flow's runs on this root, oldest first."""
        runs = self.ask("flow_runs", flows={"name": {"any_": [flow]}}, sort="EXPECTED_START_TIME_ASC")
        return [run for run in runs if _root(run["parameters"]) == root]

    def engine(self, flow_run: str) -> psutil.Process:
        """The process that executes a flow run."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run:
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"no process executes flow run {flow_run}")


def _root(parameters: dict[str, Any]) -> Any:
    form = next((value for value in parameters.values() if isinstance(value, dict)), parameters)
    return form.get("root")


def run_of(stack: RealStack, flow: str, root: str, state: str) -> dict[str, Any]:
    """The newest run of a flow on a root, once it is in the state."""

    def found() -> dict[str, Any] | None:
        runs = stack.runs_of(flow, root)
        return runs[-1] if runs and runs[-1]["state_type"] == state else None

    run: dict[str, Any] = wait_for(found)
    return run


def working_lanes(stack: RealStack, root: str) -> list[dict[str, Any]]:
    """The lanes that run on a root."""
    return [lane for lane in stack.runs_of("extraction_lane", root) if lane["state_type"] == "RUNNING"]


@contextmanager
def damaged_shard(stack: RealStack, root: str) -> Iterator[None]:
    """Shard 1 of the run on `root` can't be read inside the context, and is whole again behind it.

    The lanes must have been ended before the run started: nobody may read the shard before it is damaged.
    """
    store = stack.store(root)
    (plan_id,) = wait_for(Catalog(store).plans)
    path = f"plans/{plan_id}/shard-00001.arrow"
    whole = store.get(path)
    store.put(path, whole[:-1] + bytes([whole[-1] ^ 1]))
    stack.up()
    try:
        yield
    finally:
        store.put(path, whole)


def start(arguments: list[str]) -> "subprocess.Popen[str]":
    """Start a `layertap` command."""
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )


def free_ports() -> tuple[int, int]:
    """A port for Prefect, and the first of five in a row for the object server."""
    while True:
        first = random.randrange(12_000, 20_000, 10)
        try:
            check_port_free(first, purpose="a test", option="")
            ServerPorts(
                s3=first + 1, master=first + 2, volume=first + 3, filer=first + 4, admin=first + 5
            ).check_free()
            return first, first + 1
        except InputError:
            continue


@contextmanager
def failing_run(stack: RealStack, dataset: str, target: str, root: str) -> Iterator[str]:
    """What a run printed that failed at its shard 1, which can't be read until the context ends."""
    options = stack.run_options(dataset, target, root)
    assert stack.stack.daemon("lanes").end(90)
    run = start(options)
    with damaged_shard(stack, root):
        output, _ = run.communicate(timeout=400)
        assert run.returncode == 1
        yield output
