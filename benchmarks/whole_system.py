"""The whole system on one host: Prefect's server, `layertap workers`, the coordinator, a lane on each device.

    python benchmarks/whole_system.py --lanes 2 --rate 10500 --json system.json

A target of random weights and rows of random tokens (lengths log-normal, or all the same) are made on the
spot, the store is a local folder. One run tells everything, for a large target takes a minute to load: when
all lanes have worked together for so long, one is killed, the others take its shards; then all but one are,
and that one works alone, for the ratio, and finishes the plan. Meanwhile the work pool lets no other lane in.
Batch files of committed shards are read back, compared with their checksums and deleted, since the disk is
smaller than what is written. In the end each row must be in the published version and in one committed
shard.

There are as many rows as `--rate` makes in that time, so a rate that is too high makes the run longer.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.folder_stack import STORAGE, let_in, stack_of
from benchmarks.gpu_engine import log_normal_lengths
from benchmarks.host_meter import HostMeter
from benchmarks.shard_verifier import ShardVerifier, each_row_once
from layertap.bench.random_targets import LAYER_IDS
from layertap.catalog import Catalog
from layertap.lane_record import LaneRecord, lane_records
from layertap.plan import PlanSettings
from layertap.shard_state import ShardState
from layertap.store import Store

MEAN_LENGTH, MAX_LENGTH, VOCAB_SIZE = 264, 4096, 512

ALL_ROWS = 913_786
"""Rows of the dataset for which time and room are projected."""

SHARD_S = 6.0
"""Seconds of a shard, about: short, so that little is in flight on the disk."""

TAKEN_S = 60.0
"""Seconds in which the shards of a dead lane are taken over; its claims take 30 to go stale."""

SKEW_S = 15.0
"""Seconds between the first lane's first batch and the last one's, for the size of it all."""

ROOT = "root"

PHASE_S = 400.0
"""Seconds after which lanes that don't work are given up."""

STARTED = time.monotonic()


def say(what: str, **figures: Any) -> None:
    """Print figures as they come, after the seconds since the start."""
    told = " ".join(f"{name}={json.dumps(value, default=str)}" for name, value in figures.items())
    print(f"{time.monotonic() - STARTED:6.1f} s  {what}  {told}", flush=True)


def write_rows(path: Path, num_tokens: float, row_length: int | None) -> int:
    """Write rows of random tokens as Parquet, about so many tokens; returns the number of rows."""
    random = np.random.default_rng(0)
    num_rows = max(1, int(num_tokens / (row_length or MEAN_LENGTH)))
    lengths = log_normal_lengths(num_rows, MEAN_LENGTH, MAX_LENGTH, random)
    if row_length:
        lengths[:] = row_length
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    values = random.integers(0, VOCAB_SIZE, offsets[-1], dtype=np.int32)
    ids = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))
    pq.write_table(pa.table({"input_ids": ids}), path)
    return num_rows


class Run:
    """The run under way, as its process and its store show it."""

    def __init__(self, process: "subprocess.Popen[bytes]", root: Path) -> None:
        self.process = process
        self.store = Store.folder(root)
        self.catalog = Catalog(self.store)
        self.plan_id = ""
        self.verifier: ShardVerifier | None = None

    def wait_for_plan(self) -> None:
        """Wait until the plan stands, and begin to verify its shards."""
        self.wait(lambda: bool(self.catalog.plans()), "plan")
        (self.plan_id,) = self.catalog.plans()
        self.plan = self.catalog.plan(self.plan_id)
        self.verifier = ShardVerifier(self.catalog, self.plan_id)
        self.verifier.start()

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = PHASE_S) -> None:
        """Wait for something of the run, which must not end before."""
        deadline, told = time.monotonic() + timeout_s, time.monotonic()
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no {what}: the run has ended, or {timeout_s:g} s are over")
            if self.plan_id and time.monotonic() - told > 10:
                told = time.monotonic()
                say("tokens", **{r.lane[-5:]: r.num_tokens for r in self.records()}, left=self.num_left())
            time.sleep(0.5)

    def records(self) -> list[LaneRecord]:
        """What the lanes tell, in the order in which they opened."""
        return lane_records(self.store, self.plan_id)

    def working(self) -> list[LaneRecord]:
        """The lanes that have extracted something."""
        return [record for record in self.records() if record.num_tokens]

    def num_left(self) -> int:
        """Tokens of the plan that no lane has extracted yet, about."""
        return self.plan.num_tokens - sum(record.num_tokens for record in self.records())


def timestamp(iso: str) -> float:
    """Time of day in seconds."""
    return datetime.fromisoformat(iso).timestamp()


def points(record: LaneRecord) -> list[tuple[float, float]]:
    """Time of day and tokens by then, at each sample of a lane that had worked by then."""
    opened = timestamp(record.opened_at)
    return [(opened + elapsed_s, tokens) for elapsed_s, tokens, _ in record.samples if tokens]


def rate(record: LaneRecord, start: float, end: float) -> dict[str, float]:
    """Tokens a second of a lane in a window of time of day, from its first sample there to its last.

    The last of a lane that lives lies at most an interval before the end. One that ended before counts as
    if it had been there to the end, and idle.
    """
    within = [point for point in points(record) if start <= point[0] <= end]
    if len(within) < 2:
        return {"tokens_per_s": 0.0, "seconds": 0.0}
    (first_s, first), (last_s, last) = within[0], within[-1]
    interval_s = median(after - before for (before, _), (after, _) in pairwise(within))
    seconds = (last_s if end - last_s <= 1.5 * interval_s else end) - first_s
    return {"tokens_per_s": (last - first) / seconds, "seconds": seconds}


def together(run: Run, names: list[str], end: float, meter: HostMeter) -> dict[str, Any]:
    """Figures of the steady state: from when all lanes have worked to `end`."""
    records = [record for record in run.records() if record.lane in names]
    start = max(points(record)[0][0] for record in records)
    lanes: dict[str, dict[str, Any]] = {r.lane: {"device": r.device, **rate(r, start, end)} for r in records}
    tokens_per_s = sum(lane["tokens_per_s"] for lane in lanes.values())
    mean_length = run.plan.num_tokens / run.plan.num_rows
    for lane in lanes.values():
        lane["samples_per_s"] = lane["tokens_per_s"] / mean_length
    root = run.catalog.root()
    all_tokens = ALL_ROWS * mean_length
    return {
        "steady_s": end - start,
        "lanes": lanes,
        "num_devices": len({lane["device"] for lane in lanes.values()}),
        "tokens_per_s": tokens_per_s,
        "samples_per_s": tokens_per_s / mean_length,
        "mean_length": mean_length,
        "hours_for_all_rows": all_tokens / tokens_per_s / 3600,
        "tb_for_all_rows": all_tokens * root.spec.bytes_per_token(root.target["hidden_size"]) / 1e12,
        **meter.between(start, end),
    }


def kill(lane: str, run: Run) -> dict[str, Any]:
    """SIGKILL the process of a lane; returns the shards that it held."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

    with get_client(sync_client=True) as client:
        (flow_run,) = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[lane]))
        )
    held = [
        shard
        for shard, state in run.catalog.states(run.plan_id).items()
        if state == ShardState.CLAIMED and last_claim(run, shard)["lane"] == lane
    ]
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT__FLOW_RUN_ID") == str(flow_run.id):
                process.kill()
        except psutil.Error:
            continue
    return {"lane": lane, "held": held, "at": time.time()}


def last_claim(run: Run, shard: int) -> dict[str, Any]:
    """The newest claim of a shard."""
    number, _ = run.catalog.snapshot(run.plan_id).claims[shard]
    return run.catalog.read_claim(run.plan_id, shard, number)


def ends(run: Run) -> dict[str, float]:
    """Time of day of each lane's last commit."""
    assert run.verifier is not None
    found: dict[str, float] = {}
    for outcome in list(run.verifier.outcomes.values()):
        found[outcome.lane] = max(found.get(outcome.lane, 0.0), timestamp(outcome.ended_at))
    return found


def measure(options: argparse.Namespace, run: Run, meter: HostMeter) -> None:
    """All phases of the run; figures are told and kept as they come."""
    found: dict[str, Any] = {}

    def keep(name: str, figures: dict[str, Any]) -> None:
        found[name] = figures
        say(name, **figures)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1, default=str))

    run.wait_for_plan()
    say("planned", rows=run.plan.num_rows, tokens=run.plan.num_tokens, shards=len(run.plan.shards))
    run.wait(lambda: len(run.working()) >= options.lanes, "work of all lanes")
    names = [record.lane for record in run.working()]
    say("all lanes work", seconds_before={r.lane: r.seconds for r in run.working()})
    if options.kill:
        until, tail = time.monotonic() + options.seconds, num_tokens_of_tail(options)
        run.wait(lambda: time.monotonic() > until or run.num_left() <= tail, "steady state")
        let_in(1)
        killed = [kill(names[-1], run)]
        keep("together", together(run, names, killed[0]["at"], meter))
        say("killed", **killed[0])
        if len(names) > 2:
            run.wait(lambda: has_been_taken(run, killed[0]), "new claims to the dead lane's shards")
            killed += [kill(lane, run) for lane in names[1:-1]]
        keep("alone", alone(options, run, names[0], killed[-1]["at"], meter))
        if found["alone"]["tokens_per_s"]:  # unless the others left it nothing to do
            keep(
                "ratio", {"to_one_alone": found["together"]["tokens_per_s"] / found["alone"]["tokens_per_s"]}
            )
        wait_for_end(run)
        keep("killed", {one["lane"]: taken(run, one) for one in killed})
    else:
        wait_for_end(run)
        keep("together", together(run, names, min(ends(run).values()), meter))
    for name, figures in ending(run).items():
        keep(name, figures)


def alone(options: argparse.Namespace, run: Run, lane: str, start: float, meter: HostMeter) -> dict[str, Any]:
    """Figures of the one lane that is left."""
    enough = time.time() + options.alone_seconds
    run.wait(lambda: time.time() > enough or run.num_left() <= 0, "time alone")
    (record,) = [record for record in run.records() if record.lane == lane]
    end = time.time()
    return {"device": record.device, **rate(record, start, end), **meter.between(start, end)}


def has_been_taken(run: Run, killed: Mapping[str, Any]) -> bool:
    """Whether other lanes have claimed all that a dead one held."""
    return all(last_claim(run, shard)["lane"] != killed["lane"] for shard in killed["held"])


def taken(run: Run, killed: Mapping[str, Any]) -> dict[str, Any]:
    """Who took a dead lane's shards, and how many seconds after its death."""
    claims = {shard: last_claim(run, shard) for shard in killed["held"]}
    return {
        **killed,
        "taken_by": {shard: claim["lane"] for shard, claim in claims.items()},
        "taken_after_s": {k: timestamp(claim["claimed_at"]) - killed["at"] for k, claim in claims.items()},
    }


def num_tokens_of_tail(options: argparse.Namespace) -> float:
    """Tokens that must be left when the first lane is killed."""
    others_s = TAKEN_S * (options.lanes - 1) if options.lanes > 2 else 0.0
    return float(options.rate * (options.alone_seconds + others_s)) if options.kill else 0.0


def num_tokens_of(options: argparse.Namespace) -> float:
    """Tokens that the lanes make in the time asked for."""
    together_s = options.lanes * (options.seconds + SKEW_S)
    return float(options.rate * together_s + num_tokens_of_tail(options))


def wait_for_end(run: Run) -> None:
    """Wait until the run has published, telling of its progress."""
    while run.process.poll() is None:
        try:
            run.wait(lambda: run.process.poll() is not None, "end", 10)
        except SystemExit:
            say("tokens", **{record.lane[-5:]: record.num_tokens for record in run.records()})
    if run.process.returncode:
        raise SystemExit(f"the run ended with {run.process.returncode}")


def ending(run: Run) -> dict[str, dict[str, Any]]:
    """What only the end shows: when lanes ended, what was verified, each row once."""
    assert run.verifier is not None
    run.verifier.finish()
    last, records = ends(run), run.records()
    lanes = {
        r.lane: {
            "device": r.device,
            "num_tokens": r.num_tokens,
            "seconds": r.seconds,
            "gpu": r.gpu,
            "peak_resident_gb": r.peak_resident_bytes / 1e9,
            "last_commit_before_the_end_s": max(last.values()) - last.get(r.lane, 0.0),
        }
        for r in records
    }
    return {
        "lanes": lanes,
        "verified": run.verifier.figures(),
        "rows": each_row_once(run.store, run.verifier.outcomes),
    }


def start_run(options: argparse.Namespace, work: Path, target: Path) -> Run:
    """`layertap run`, its output among ours."""
    command = [sys.executable, "-m", "layertap.cli", "run", str(work / "rows.parquet")]
    command += ["--target", str(target), "--layers", ",".join(map(str, LAYER_IDS[options.shape]))]
    command += ["--max-length", str(MAX_LENGTH), "--root", ROOT, "--lanes", str(options.lanes)]
    command += ["--storage", STORAGE, "--strict"]
    command += ["--param", f"max_batch_tokens={options.max_batch_tokens}"]
    command += ["--param", "check_space=false"]  # verified files are deleted meanwhile
    command += ["--param", f"shard_tokens={round(options.rate * SHARD_S)}"]
    return Run(subprocess.Popen(command), work / "store" / ROOT)


def run_all(options: argparse.Namespace, work: Path) -> None:
    """Make what is needed, run, measure."""
    target = options.target or work / "target"
    making = None
    if not (target / "config.json").exists():
        making = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu_targets", options.shape, target])
    num_rows = write_rows(work / "rows.parquet", num_tokens_of(options), options.row_length)
    say("rows are written", rows=num_rows)
    with stack_of(work / "stack", work / "store", options.lanes, options.port) as stack, HostMeter() as meter:
        say("server is up, workers are starting")
        if making and making.wait():
            raise SystemExit(f"the target can't be made: {making.returncode}")
        say("target is there", gb=sum(file.stat().st_size for file in target.iterdir()) / 1e9)
        run = start_run(options, work, target)
        try:
            measure(options, run, meter)
        finally:
            if run.verifier:
                run.verifier.stop()
            if options.logs:
                shutil.copytree(stack.state / "logs", options.logs, dirs_exist_ok=True)
            if run.plan_id and options.png:
                draw(run, options.png)


def draw(run: Run, path: Path) -> None:
    """The lanes' speed and where their seconds went, as a picture."""
    from layertap.plot import speed_png

    path.write_bytes(speed_png(run.records()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lanes", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--shape", choices=list(LAYER_IDS), default="27b")
    parser.add_argument(
        "--rate", type=float, default=10_500, help="tokens/s of a lane, for the size of it all"
    )
    parser.add_argument("--alone-seconds", type=float, default=60, help="how long one lane alone")
    parser.add_argument("--seconds", type=float, default=180, help="how long all lanes together")
    parser.add_argument("--kill", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--max-batch-tokens", type=int, default=PlanSettings().max_batch_tokens)
    parser.add_argument("--row-length", type=int, help="tokens of every row, such as 15")
    parser.add_argument("--work", type=Path, help="folder for everything; a temporary one if not given")
    parser.add_argument("--target", type=Path, help="folder of the target; made if it isn't there, and kept")
    parser.add_argument("--port", type=int, default=4290)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--png", type=Path, help="file for a picture of the lanes' speed")
    parser.add_argument("--logs", type=Path, help="folder for the logs of server and workers")
    options = parser.parse_args()
    clone = str(Path(__file__).resolve().parents[1])
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), clone]
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in paths)
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # workers and server end with it
    with tempfile.TemporaryDirectory(dir=options.work, prefix="whole-system-") as work:
        run_all(options, Path(work))


if __name__ == "__main__":
    main()
