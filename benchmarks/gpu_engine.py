"""The engine on a GPU: a target of random weights, everything written to a local folder and read back.

    python benchmarks/gpu_engine.py --seconds 90 --out /data/bench --json engine.json

Row lengths are log-normal. Batches are planned, extracted and put as in a real run, two shards in flight;
shards are deleted once their checksums are verified. In the same process: the matrix product alone (the
ceiling), a batch of one row, and the forward pass of the same batches alone, eager and compiled. Clocks
differ between cards and with heat, so compare within a run. Random weights are made so that
rounding isn't amplified (`layertap.bench.random_targets`). What is timed must pass the self-check and run on
no slow kernel.

With `--gpus N` one process a GPU: first each one alone, then all at once. Figures are printed as they come,
then the ratios as a table.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_table import ratios
from benchmarks.steady_run import SteadyRun
from layertap.bench.command import show
from layertap.bench.forward import Batch, batch_of, forward_alone, matmul_flops_per_s, synchronize
from layertap.bench.probes import GilTicker
from layertap.bench.random_targets import LAYER_IDS, build
from layertap.extract import Extractor
from layertap.gpu_caches import use_caches
from layertap.plan import Estimate, Plan, PlanSettings, estimate, make_plan
from layertap.progress import Clock
from layertap.records import ShardRows
from layertap.spec import ExtractionSpec
from layertap.store import Store
from layertap.target import Target

SIGMA = 0.9

BARRIER_S = 300.0
"""Seconds, beside those in which a GPU runs alone, that GPUs wait for one another."""

PROFILED = 4
"""Batches one after another of which the kernels are listed."""

EARLY = 4
"""Place of the shard with the longest row: after those that warm the engine up, within any stretch."""


def log_normal_lengths(
    num_rows: int, mean_length: int, max_length: int, random: np.random.Generator
) -> NDArray[np.int32]:
    """[num_rows] lengths as real chats have them."""
    lengths = random.lognormal(np.log(mean_length) - SIGMA**2 / 2, SIGMA, num_rows)
    return np.clip(np.rint(lengths), 1, max_length).astype(np.int32)


def shards_of(options: argparse.Namespace, spec: ExtractionSpec) -> tuple[list[ShardRows], Plan]:
    """Rows of random tokens, planned: the shards in an order that mixes their lengths, and the plan."""
    random = np.random.default_rng(0)
    num_tokens = log_normal_lengths(options.rows, options.mean_length, options.max_length, random)
    if options.longest:
        num_tokens[0] = options.longest
    keys = random.integers(0, 256, (options.rows, 16), dtype=np.uint8)
    settings = PlanSettings(max_batch_tokens=options.max_batch_tokens, shard_tokens=options.shard_tokens)
    plan = make_plan(keys, num_tokens, spec_fingerprint=spec.fingerprint, settings=settings)
    parts = [*plan.shard_slices()]
    order = [*random.permutation(len(parts))]
    longest = max(order, key=lambda k: int(plan.num_tokens[parts[k]].max()))
    order.remove(longest)
    order.insert(EARLY, longest)
    shards = []
    for part in (parts[k] for k in order):
        tokens = [random.integers(0, 512, n, dtype=np.int32) for n in plan.num_tokens[part]]
        shards.append(ShardRows.of(plan.keys[part], plan.batch[part], tokens))
    return shards, plan


def engine(
    seconds: float, options: argparse.Namespace, target: Target, shards: list[ShardRows], cost: Estimate
) -> dict[str, Any]:
    """Figures of the engine over `seconds` of steady state."""
    folder = Path(tempfile.mkdtemp(dir=options.out))
    clock, peaks, ended = Clock(), dict[str, float](), threading.Event()
    watcher = threading.Thread(target=watch_memory, args=(peaks, ended))
    watcher.start()
    try:
        with (
            Extractor(
                target,
                Store.folder(folder),
                max_batch_bytes=cost.max_batch_bytes,
                num_slots=target.info.num_slots(target.spec, cost.max_batch_bytes),
                clock=clock,
            ) as extractor,
            timed_taps(target) as taps,
            GilTicker() as ticker,
        ):
            run = SteadyRun(extractor, shards, folder, clock)
            counted_s, num_rows, num_tokens = run.measure(seconds)
    finally:
        shutil.rmtree(folder)
        ended.set()
        watcher.join()
    nbytes = num_tokens * target.spec.bytes_per_token(target.info.hidden_size)
    return {
        "tokens_per_s": num_tokens / counted_s,
        "samples_per_s": num_rows / counted_s,
        "counted_s": counted_s,
        "num_rows": num_rows,
        "num_tokens": num_tokens,
        "written_gb": nbytes / 1e9,
        "written_gb_per_s": nbytes / 1e9 / counted_s,
        "dirty_gb_at_the_end": run.dirty_bytes / 1e9,
        "elapsed_s": run.elapsed_s,
        "seconds": run.spent,
        "device_busy_share": taps.get("busy share"),
        "outside_forward_share": 1 - run.spent["forward"] / run.elapsed_s,
        "num_refused": sum(len(r.refused) for r in run.results),
        "num_splits": sum(r.num_splits for r in run.results),
        "host_memory_gib": peaks.get("host GiB", 0.0),
        "gil_waits_of_a_ticking_thread": ticker.figures(),
    }


def padded_batches(shard: ShardRows, device: torch.device) -> Iterator[Batch]:
    """The batches of a shard."""
    for number in np.unique(shard.batch):
        rows = np.flatnonzero(shard.batch == number)
        ids: NDArray[np.int32] = np.zeros((len(rows), shard.num_tokens[rows].max()), np.int32)
        for i, row in enumerate(rows):
            ids[i, : shard.num_tokens[row]] = shard.tokens(int(row))
        yield len(rows), int(shard.num_tokens[rows].sum()), torch.from_numpy(ids).to(device)


def kernels(target: Target, ids_BT: torch.Tensor, num_rows: int = 20) -> dict[str, Any]:
    """The kernels of a batch by their share of its time on the GPU, and how long none runs between them."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            target.tap(ids_BT)
        synchronize(target.device)
    spans = [e.time_range for e in profiler.events() if e.device_type == DeviceType.CUDA]
    busy_us, span_us = covered([(span.start, span.end) for span in spans])
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    table = [
        {
            "kernel": event.key,
            "calls": event.count / PROFILED,
            "ms": event.self_device_time_total / PROFILED / 1e3,
            "share": event.self_device_time_total / total,
        }
        for event in events[:num_rows]
    ]
    return {"batch_ms": span_us / PROFILED / 1e3, "idle_share": 1 - busy_us / span_us, "kernels": table}


def covered(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """How much of the time from the first begin to the last end lies in any of the spans, and all of it."""
    spans = sorted(spans)
    first = end = spans[0][0]
    inside = 0.0
    for begin, until in spans:
        inside += max(0.0, until - max(begin, end))
        end = max(end, until)
    return inside, end - first


@contextmanager
def timed_taps(target: Target) -> Iterator[dict[str, float]]:
    """Have the GPU itself time each forward pass of the block; afterwards says their share of its time."""
    found, tap, pairs = dict[str, float](), target.tap, list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def timed(ids_BT: torch.Tensor) -> list[torch.Tensor]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        states = tap(ids_BT)
        end.record()
        pairs.append((start, end))
        return states

    if target.device.type == "cuda":
        target.tap = timed  # type: ignore[method-assign]
    yield found
    target.tap = tap  # type: ignore[method-assign]
    synchronize(target.device)
    if pairs:
        busy_ms = sum(start.elapsed_time(end) for start, end in pairs)
        found["busy share"] = busy_ms / pairs[0][0].elapsed_time(pairs[-1][1])


def watch_memory(peaks: dict[str, float], ended: threading.Event) -> None:
    """Note the process's largest resident memory."""
    while not ended.wait(0.5):
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peaks["host GiB"] = max(peaks.get("host GiB", 0), int(status["VmRSS"].split()[0]) / 2**20)


def say(**figures: Any) -> None:
    """Print figures as they come."""
    for name, value in figures.items():
        print(f"{name}: {json.dumps(value, default=str)}", flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one GPU."""
    device = torch.device(options.device)
    if device.type == "cuda":
        use_caches(device)
    spec = ExtractionSpec(
        target_identity="random",
        layer_ids=LAYER_IDS[options.shape],
        max_length=max(options.max_length, options.longest or 0),
    )
    start = time.perf_counter()
    target = Target.from_backbone(build(options.shape, options.device), spec=spec)
    flops_per_token = 2 * target.info.executed_parameters(spec)  # attention itself isn't counted
    found: dict[str, Any] = {"loading_s": time.perf_counter() - start}
    found["eager_kernels"] = target.environment()["kernels"]
    shards, plan = shards_of(options, spec)
    cost = estimate(
        plan, spec=spec, hidden_size=target.info.hidden_size, num_parameters=target.info.num_parameters
    )
    found["plan"] = {
        "num_batches": cost.num_batches,
        "num_shards": len(shards),
        "mean_length": float(plan.num_tokens.mean()),
        "longest": int(plan.num_tokens.max()),
        "padding_share": cost.padding_share,
    }
    batches = [batch for shard in shards for batch in padded_batches(shard, device)]
    some = batches[:: max(1, len(batches) // options.alone_batches)]
    found["ceiling_before_flops_per_s"] = matmul_flops_per_s(device, target.info.hidden_size)
    if options.rank == 0:
        found |= alone("eager", options, target, some)
    if options.compile:
        start = time.perf_counter()
        target.compile(max_batch_tokens=options.max_batch_tokens)
        synchronize(device)
        found["compiling_s"] = time.perf_counter() - start
        target.refuse_slow_kernels()
    found["self_check"] = target.self_check()
    if options.compile:
        found |= alone("compiled", options, target, some)
    say(**found)
    found["environment"] = target.environment()
    if options.barrier:
        found["alone"] = alone_then_together(options, target, shards, cost)
    seconds = options.together_seconds if options.barrier else options.seconds
    found["engine"] = engine(seconds, options, target, shards, cost)
    found["ceiling_after_flops_per_s"] = matmul_flops_per_s(device, target.info.hidden_size)
    ceiling = max(found["ceiling_before_flops_per_s"], found["ceiling_after_flops_per_s"])
    found["flops_per_token"] = flops_per_token
    rate = (found.get("alone") or found["engine"])["tokens_per_s"]
    found["share_of_ceiling"] = rate * flops_per_token / ceiling
    if options.rank == 0:
        found["engine_over_eager_alone"] = rate / found["eager_alone"]["tokens_per_s"]
    if device.type == "cuda":
        found["device_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["kernels"] = kernels(target, batch_of((options.max_batch_tokens // 264, 264), target)[0][2])
    say(**{name: found[name] for name in list(found)[list(found).index("environment") :]})
    return found


def alone(how: str, options: argparse.Namespace, target: Target, batches: list[Batch]) -> dict[str, Any]:
    """The forward pass alone: of some of the plan's batches, of one row, of short and of middling rows."""
    forward_alone(target, batches)  # kernels are made for shapes that are new
    found = {f"{how}_alone": forward_alone(target, batches)}
    for shape in ((1, options.mean_length), *((options.max_batch_tokens // n, n) for n in (264, 15))):
        found[f"{how}_{shape[0]}x{shape[1]}"] = forward_alone(target, batch_of(shape, target))
    return found


def alone_then_together(
    options: argparse.Namespace, target: Target, shards: list[ShardRows], cost: Estimate
) -> dict[str, Any] | None:
    """Each GPU runs while the others wait, but not for ever; then all go on together."""
    alone = None
    for rank in range(options.of):
        if rank == options.rank:
            alone = engine(options.seconds, options, target, shards, cost)
            say(alone=alone)
            (options.barrier / str(rank)).touch()
        deadline = time.monotonic() + options.seconds + BARRIER_S
        while not (options.barrier / str(rank)).exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"GPU {rank} of {options.of} isn't ready to go on together")
            time.sleep(0.05)
    return alone


def measure_several(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """The same on several GPUs at once, a process each."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as barrier:
        folder = Path(name)
        children = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments, "--gpus", "1", "--barrier", barrier]
                + ["--rank", str(k), "--of", str(options.gpus), "--json", str(folder / f"{k}.json")],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": str(k)},
                stdout=None if k == 0 else subprocess.DEVNULL,
            )
            for k in range(options.gpus)
        ]
        codes = [child.wait() for child in children]
        if any(codes):
            raise SystemExit(f"exit codes {codes}")
        found = [json.loads((folder / f"{k}.json").read_text()) for k in range(options.gpus)]
    alone, rates = ([one[when]["tokens_per_s"] for one in found] for when in ("alone", "engine"))
    summary = {"alone": alone, "together": rates, "ratio": len(rates) * sum(rates) / sum(alone)}
    say(**summary)
    return {**summary, "gpus": found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=90, help="how long to measure the engine")
    parser.add_argument("--out", type=Path, help="folder to write to; a temporary one if not given")
    parser.add_argument("--together-seconds", type=float, default=45, help="how long all GPUs together")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--shape", choices=list(LAYER_IDS), default="27b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rows", type=int, default=12000)
    parser.add_argument("--mean-length", type=int, default=264)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--longest", type=int, help="tokens of one row that is longer than all others")
    parser.add_argument("--shard-tokens", type=int, default=260_000)
    parser.add_argument("--max-batch-tokens", type=int, default=PlanSettings().max_batch_tokens)
    parser.add_argument("--alone-batches", type=int, default=24, help="batches of the forward pass alone")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--barrier", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    found = measure_several(options, sys.argv[1:]) if options.gpus > 1 else measure(options)
    if not options.barrier:
        show(ratios(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
