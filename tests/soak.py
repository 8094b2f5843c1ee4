"""`make soak`: runs through a failing network, their lanes killed at random; every row must come out once.

Lanes are processes on the library alone, without a scheduler, forked from a server that has torch imported:
they start in seconds, which is measured first, and kills are as far apart. Beats come every three seconds.
With `--workers` runs go through a real Prefect server instead, see soak_workers.
"""

import json
import multiprocessing
import os
import random
import re
import secrets
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

import layertap.lane
import layertap.watch
from layertap import HiddenStates
from layertap.catalog import Catalog
from layertap.coordinator import Run
from layertap.garbage import find_garbage
from layertap.lane import Lane
from layertap.lane_work import extract_in_threads
from layertap.object_server import ObjectServer, ServerPorts
from layertap.preview import RunSettings
from layertap.store import Store
from layertap.verify import verify_root
from layertap.watch import Watch
from tests.models import saved, tiny_llama
from tests.proxy import Faults, Proxy
from tests.runs import plain_states, save_rows, settings_for, some_rows
from tests.soak_slow import slow_store

BEAT_S = 3.0
BUCKET = "layertap"
LANES_END_S = 60.0
MAX_STARTS = 6
"""Times the same run is started before its rows count as lost."""

GAP_IN_STARTS = (1.0, 2.0)
"""Time between two kills, drawn from between these, in times that a lane takes to its first claim."""

NUM_STARTS_MEASURED = 3

MARK = "LAYERTAP_SOAK"
"""In the environment of everything that a soak starts."""

CLAIM = re.compile(r"\.claim-\d+$")

KEPT = re.compile("multiprocessing.(forkserver|resource_tracker)")


def lane_process(uri: str, plan_id: str, run: str, target: str, name: str) -> None:
    """A lane, from its first look for work to its last shard."""
    layertap.lane.BEAT_S = BEAT_S
    lane = Lane.open(Store.open(uri), plan_id, run=run, target=target, name=name)
    if lane is not None:
        with lane:
            extract_in_threads(lane)


@dataclass
class Soak:
    """One run and what was done to it."""

    name: str
    settings: RunSettings
    uri: str
    num_lanes: int
    num_kills: int
    gap_s: tuple[float, float]
    draw: random.Random
    lanes: list[BaseProcess] = field(default_factory=list)
    num_killed: int = 0
    num_started: int = 0
    num_starts: int = 0
    kill_due: float = 0.0

    def go(self) -> None:
        """Start the run as often as it takes, as a user would."""
        while self.num_starts < MAX_STARTS:
            self.num_starts += 1
            run = Run.prepare(Store.open(self.uri), self.settings)
            if run.plan is None:
                break
            watch = run.watch()
            self._work(run, watch)
            if run.publish(watch).version.complete:
                break

    def _work(self, run: Run, watch: Watch) -> None:
        assert run.plan is not None
        self._plan_kill()
        while not watch.poll().finished:
            self.lanes = [lane for lane in self.lanes if lane.is_alive()]
            while len(self.lanes) < self.num_lanes:
                self._start(run, run.plan.plan_id)
            if self.num_killed < self.num_kills and time.monotonic() > self.kill_due:
                self.draw.choice(self.lanes).kill()
                self.num_killed += 1
                self._plan_kill()
            time.sleep(0.3)
        deadline = time.monotonic() + LANES_END_S
        for lane in self.lanes:
            lane.join(max(0.0, deadline - time.monotonic()))
            assert not lane.is_alive(), f"{lane.name} doesn't end though no work is left"

    def _plan_kill(self) -> None:
        self.kill_due = time.monotonic() + self.draw.uniform(*self.gap_s)

    def seconds_to_first_claim(self) -> float:
        """How long a lane of this run takes from its start to its first claim; it is killed then."""
        run = Run.prepare(Store.open(self.uri), self.settings)
        assert run.plan is not None
        begun = time.monotonic()
        self._start(run, run.plan.plan_id)
        while not any(
            ".claim-" in name for name in run.catalog.store.names(f"plans/{run.plan.plan_id}/state")
        ):
            assert self.lanes[0].is_alive(), "the lane ended before it claimed anything"
            time.sleep(0.05)
        self.lanes[0].kill()
        return time.monotonic() - begun

    def _start(self, run: Run, plan_id: str) -> None:
        name = f"lane-{self.num_started}"
        self.num_started += 1
        arguments = (self.uri, plan_id, run.run_id, self.settings.target, name)
        lane = multiprocessing.get_context("forkserver").Process(
            target=lane_process, args=arguments, name=name
        )
        lane.start()
        self.lanes.append(lane)

    def num_left(self) -> int:
        """Lanes that live though their run is over."""
        return sum(lane.is_alive() for lane in self.lanes)

    def check(self, store: Store, rows: list[dict[str, Any]], model: Any) -> dict[str, int]:
        """Everything promised, seen without the proxy."""
        attempts = {info.path.rsplit("/", 1)[0] for info in store.list("plans") if "/data/" in info.path}
        assert not (late := claims_of_ended_shards(store)), late
        assert rows_of_outcomes(store) == len(rows), "a row was computed twice, under two plans"
        verify_root(store, num_rows=None).check()
        read = HiddenStates(store)
        assert [read[i]["row"] for i in range(len(read))] == list(range(len(rows)))
        for i in self.draw.sample(range(len(rows)), 20):
            assert read[i]["input_ids"].tolist() == rows[i]["input_ids"]
            layers, _ = plain_states(model, rows[i]["input_ids"])
            assert (read[i]["hidden_states"] - layers).abs().max() < 1e-3
        assert Run.prepare(store, self.settings).plan is None, "a second run would compute something again"
        garbage = find_garbage(store, older_than=timedelta(0))
        garbage.delete()
        verify_root(store, num_rows=None).check()
        outcomes = sum(info.path.endswith(".outcome") for info in store.list("plans"))
        return {"shards": outcomes, "tries": len(attempts), "garbage": len(garbage.reasons)}


def claims_of_ended_shards(store: Store) -> list[str]:
    """Claims that were made when their shard's outcome stood already: what is stored was computed again."""
    state = {info.path: info for info in store.list("plans") if "/state/" in info.path}
    late = []
    for path in filter(CLAIM.search, state):
        outcome = state[CLAIM.sub(".outcome", path)]
        claimed_at = datetime.fromisoformat(json.loads(store.get(path))["claimed_at"])
        if claimed_at > outcome.modified_at:
            late.append(path)
    return late


def rows_of_outcomes(store: Store) -> int:
    """Rows stored or refused by the outcomes of all plans; more than there are if plans overlap."""
    catalog = Catalog(store)
    outcomes = [catalog.outcome(plan, k) for plan in catalog.plans() for k in catalog.committed(plan)]
    return sum(outcome.num_rows + len(outcome.refused) for outcome in outcomes)


def main() -> None:
    """Run it."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1003)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--share", type=float, default=0.2, help="of store calls that fail")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", action="store_true", help="through a Prefect server and its workers")
    parser.add_argument("--slow", action="store_true", help="one lane and a slow store: see soak_slow")
    options = parser.parse_args()
    part = options.share / 20
    faults = Faults(slow_down=8 * part, cut_upload=4 * part, lost_reply=4 * part, cut_reply=4 * part)
    os.environ[MARK] = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        soak = through_workers if options.workers else through_the_library
        soak(options, Path(folder), faults)
    left = processes_left()
    print(json.dumps({"processes left": len(left)}))
    assert not left, left


def processes_left() -> list[str]:
    """What still runs of all that was started, but for the two processes that multiprocessing keeps."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            is_mine = process.environ().get(MARK) == os.environ[MARK] and process.pid != os.getpid()
            if is_mine and process.status() != psutil.STATUS_ZOMBIE and not KEPT.search(command):
                found.append(f"{process.pid}: {command}")
    return found


def through_the_library(options: Any, folder: Path, faults: Faults) -> None:
    """Runs whose lanes are processes of this one."""
    layertap.watch.BEAT_S = BEAT_S
    multiprocessing.set_forkserver_preload(["tests.soak"])
    server = ObjectServer.start(folder / "objects", ports=ServerPorts.free(), buckets=[BUCKET])
    try:
        with Proxy(server.ports.s3, faults, seed=options.seed).running() as proxy:
            os.environ |= {**server.environment(), "AWS_ENDPOINT_URL_S3": proxy.endpoint_url}
            if options.slow:
                proxy.faults = Faults()
                print(json.dumps(slow_store(folder, server, proxy)))
            else:
                go(options, folder, server, proxy, Soak, gap_s=None)
    finally:
        server.stop()


def through_workers(options: Any, folder: Path, faults: Faults) -> None:
    """Runs through a Prefect server and its workers."""
    from tests.soak_workers import GAP_S, WorkersSoak, running_stack, use_proxy

    with (
        running_stack(folder, options.lanes) as (stack, server),
        Proxy(server.ports.s3, faults, seed=options.seed).running() as proxy,
    ):
        use_proxy(stack, server, proxy)
        go(options, folder, server, proxy, partial(WorkersSoak, stack=stack), gap_s=GAP_S)


def go(
    options: Any,
    folder: Path,
    server: ObjectServer,
    proxy: Proxy,
    make: Callable[..., "Soak"],
    *,
    gap_s: tuple[float, float] | None,
) -> None:
    """All runs; a line of JSON for each, and one for all together.

    Args:
        gap_s: seconds between two kills at least and at most; None has them follow from a lane's start.
    """
    model = tiny_llama()
    rows = some_rows(options.rows)
    settings = settings_for(save_rows(rows, folder / "rows"), saved(model, folder / "target"))

    def made(name: str, gap_s: tuple[float, float]) -> Soak:
        draw = random.Random(f"{options.seed} {name}")
        return make(name, settings, f"s3://{BUCKET}/{name}", options.lanes, options.kills, gap_s, draw)

    if gap_s is None:
        starts = [made(f"start-{k}", (0, 0)).seconds_to_first_claim() for k in range(NUM_STARTS_MEASURED)]
        start_s = sorted(starts)[NUM_STARTS_MEASURED // 2]
        gap_s = (GAP_IN_STARTS[0] * start_s, GAP_IN_STARTS[1] * start_s)
        print(json.dumps({"seconds to a lane's first claim": round(start_s, 1)}))
    print(json.dumps({"seconds between kills": [round(s, 1) for s in gap_s]}), flush=True)
    lines = []
    for number in range(options.runs):
        lines.append(go_once(made(f"run-{number}", gap_s), server, proxy, rows, model))
        print(json.dumps(lines[-1]), flush=True)
        assert not lines[-1]["processes left"]
    summed = ("seconds", "kills", "requests", "faults")
    print(json.dumps({"runs": len(lines), **{name: sum(line[name] for line in lines) for name in summed}}))


def go_once(
    run: Soak, server: ObjectServer, proxy: Proxy, rows: list[dict[str, Any]], model: Any
) -> dict[str, Any]:
    """One run, and what it came to."""
    before, start = proxy.counts.copy(), time.monotonic()
    run.go()
    elapsed_s = time.monotonic() - start
    done = proxy.counts - before
    direct = Store.s3(server.settings(BUCKET, prefix=run.name), server.session())
    return {
        "run": run.name,
        "seconds": round(elapsed_s),
        "kills": run.num_killed,
        "lanes started": run.num_started,
        "starts": run.num_starts,
        "requests": done["requests"],
        "faults": sum(done.values()) - done["requests"],
        **run.check(direct, rows, model),
        "processes left": run.num_left(),
    }


if __name__ == "__main__":
    sys.exit(main())
