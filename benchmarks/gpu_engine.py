"""The engine on a GPU: a target of random weights, everything written to a local folder and read back.

    python benchmarks/gpu_engine.py --seconds 90 --out /data/bench --json engine.json

Row lengths are log-normal. Batches are planned, extracted and put as in a real run, two shards in flight;
shards are deleted once their checksums are verified. In the same process: the matrix product alone (the
ceiling), a batch of one row, and the forward pass of the same batches alone, eager and compiled. Clocks
differ between cards and with heat, so compare within a run. Random weights are made so that
rounding isn't amplified (`gpu_targets`); a self-check is shown.

With `--gpus N` one process a GPU: first the first alone, then all at once.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_targets import LAYER_IDS, build
from layertap.bench.engine import is_as_written
from layertap.errors import SelfCheckError
from layertap.extract import Extractor, ShardResult
from layertap.gpu_caches import use_caches
from layertap.plan import Estimate, Plan, PlanSettings, estimate, make_plan
from layertap.progress import Clock
from layertap.records import ShardRows
from layertap.spec import ExtractionSpec
from layertap.store import Store
from layertap.target import Target

SIGMA = 0.9
WARM_S = 8.0
"""Seconds of the engine before it is measured: threads, page cache and clocks settle."""

BARRIER_S = 300.0
"""Seconds, beside those in which the first GPU runs alone, that GPUs wait for one another."""


def log_normal_lengths(
    num_rows: int, mean_length: int, max_length: int, random: np.random.Generator
) -> NDArray[np.int32]:
    """[num_rows] lengths as real chats have them."""
    lengths = random.lognormal(np.log(mean_length) - SIGMA**2 / 2, SIGMA, num_rows)
    return np.clip(np.rint(lengths), 1, max_length).astype(np.int32)


def shards_of(options: argparse.Namespace, spec: ExtractionSpec) -> tuple[list[ShardRows], Plan]:
    """Rows of random tokens, planned: the shards, and the plan."""
    random = np.random.default_rng(0)
    num_tokens = log_normal_lengths(options.rows, options.mean_length, options.max_length, random)
    if options.longest:
        num_tokens[0] = options.longest
    keys = random.integers(0, 256, (options.rows, 16), dtype=np.uint8)
    settings = PlanSettings(max_batch_tokens=options.max_batch_tokens, shard_tokens=options.shard_tokens)
    plan = make_plan(keys, num_tokens, spec_fingerprint=spec.fingerprint, settings=settings)
    shards = []
    for part in plan.shard_slices():
        tokens = [random.integers(0, 512, n, dtype=np.int32) for n in plan.num_tokens[part]]
        shards.append(ShardRows.of(plan.keys[part], plan.batch[part], tokens))
    return shards, plan


def verify_and_delete(folder: Path, prefix: str, result: ShardResult) -> None:
    """Read a shard back through the page cache, compare checksums, delete it."""
    for file in [*result.files, result.index]:
        if not is_as_written(folder / prefix / file["name"], file):
            raise SystemExit(f"{prefix}/{file['name']} isn't what was written")
    shutil.rmtree(folder / prefix)


def dirty_bytes() -> int:
    """Bytes the page cache has still to write."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Dirty", "Writeback"))


@dataclass
class SteadyRun:
    """The engine running on before and after the stretch that is measured."""

    extractor: Extractor
    shards: list[ShardRows]
    folder: Path
    clock: Clock
    stored: list[tuple[float, int, int]] = field(default_factory=list)
    """When a batch was durable, its rows and its tokens."""

    results: list[ShardResult] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0
    dirty_bytes: int = 0

    def measure(self, seconds: float) -> tuple[float, int, int]:
        """Extract shard after shard, two in flight.

        Returns:
            Seconds from the first batch stored in the stretch to the last; rows and tokens after the first.
        """
        with ThreadPoolExecutor(1) as self._verifying, ThreadPoolExecutor(2) as self._in_flight:
            self._numbers = itertools.count()
            self._running: set[Future[None]] = set()
            self._verified: list[Future[None]] = []
            self._go_on(WARM_S)
            before, begin = self.clock.seconds, time.perf_counter()
            self._go_on(seconds)
            after, end = self.clock.seconds, time.perf_counter()
            self.dirty_bytes = dirty_bytes()
            for future in self._running:
                future.result()
            for future in self._verified:
                future.result()
        self.elapsed_s = end - begin
        self.spent = {on: s - before.get(on, 0.0) for on, s in after.items()}
        counted = sorted(batch for batch in self.stored if begin <= batch[0] <= end)
        rows, tokens = (sum(batch[k] for batch in counted[1:]) for k in (1, 2))
        return counted[-1][0] - counted[0][0], rows, tokens

    def _go_on(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            while len(self._running) < 2:
                self._running.add(self._in_flight.submit(self._extract, next(self._numbers)))
            done, self._running = wait(self._running, timeout=0.1, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()

    def _extract(self, number: int) -> None:
        prefix, so_far = f"shard-{number:05d}", (0, 0)

        def note(rows: int, tokens: int) -> None:
            nonlocal so_far
            self.stored.append((time.perf_counter(), rows - so_far[0], tokens - so_far[1]))
            so_far = rows, tokens

        shard = self.shards[number % len(self.shards)]
        result = self.extractor.extract_shard(shard, prefix, on_progress=note, should_stop=lambda: None)
        self.results.append(result)
        self._verified.append(self._verifying.submit(verify_and_delete, self.folder, prefix, result))


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
    }


def padded_batches(shard: ShardRows, device: torch.device) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Rows, tokens and the padded ids of each batch."""
    for number in np.unique(shard.batch):
        rows = np.flatnonzero(shard.batch == number)
        ids: NDArray[np.int32] = np.zeros((len(rows), shard.num_tokens[rows].max()), np.int32)
        for i, row in enumerate(rows):
            ids[i, : shard.num_tokens[row]] = shard.tokens(int(row))
        yield len(rows), int(shard.num_tokens[rows].sum()), torch.from_numpy(ids).to(device)


def forward_alone(target: Target, batches: list[tuple[int, int, torch.Tensor]]) -> dict[str, float]:
    """The forward pass with nothing copied or stored, over the batches once."""
    synchronize(target.device)
    start = time.perf_counter()
    for _, _, ids_BT in batches:
        target.tap(ids_BT)
    synchronize(target.device)
    elapsed_s = time.perf_counter() - start
    return {
        "tokens_per_s": sum(tokens for _, tokens, _ in batches) / elapsed_s,
        "samples_per_s": sum(rows for rows, _, _ in batches) / elapsed_s,
        "elapsed_s": elapsed_s,
    }


def batch_of(shape: tuple[int, int], target: Target) -> list[tuple[int, int, torch.Tensor]]:
    """Five times a batch of full rows, which reads the clock finely enough."""
    ids_BT = torch.randint(0, target.info.vocab_size, shape, device=target.device)
    return [(shape[0], ids_BT.numel(), ids_BT)] * 5


def matmul_flops_per_s(device: torch.device, hidden_size: int) -> float:
    """The rate of a large bfloat16 matrix product of random numbers: the ceiling."""
    a = torch.randn(8192, hidden_size, device=device, dtype=torch.bfloat16)
    b = torch.randn(hidden_size, 4 * hidden_size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ b
    synchronize(device)
    start = time.perf_counter()
    for _ in range(20):
        a @ b
    synchronize(device)
    return 20 * 2 * a.numel() * b.shape[1] / (time.perf_counter() - start)


def kernels(target: Target, ids_BT: torch.Tensor, num_rows: int = 20) -> list[dict[str, Any]]:
    """The kernels of one batch, by their share of its time on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        target.tap(ids_BT)
        synchronize(target.device)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    return [
        {
            "kernel": event.key,
            "calls": event.count,
            "ms": event.self_device_time_total / 1e3,
            "share": event.self_device_time_total / total,
        }
        for event in events[:num_rows]
    ]


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


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    try:
        found["self_check"] = target.self_check()
    except SelfCheckError as error:
        found["self_check"] = str(error)
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
        found |= alone("compiled", options, target, some)
    say(**found)
    found["environment"] = target.environment()
    if options.barrier:
        found["alone"] = alone_then_together(options, target, shards, cost)
    seconds = options.together_seconds if options.barrier else options.seconds
    found["engine"] = engine(seconds, options, target, shards, cost)
    found["ceiling_after_flops_per_s"] = matmul_flops_per_s(device, target.info.hidden_size)
    ceiling = max(found["ceiling_before_flops_per_s"], found["ceiling_after_flops_per_s"])
    rate = (found.get("alone") or found["engine"])["tokens_per_s"]
    found["share_of_ceiling"] = rate * flops_per_token / ceiling
    if options.rank == 0:
        found["engine_over_eager_alone"] = rate / found["eager_alone"]["tokens_per_s"]
    if device.type == "cuda":
        found["device_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["kernels"] = kernels(target, batch_of((options.max_batch_tokens // 264, 264), target)[0][2])
    say(**{name: found[name] for name in list(found)[list(found).index("environment") :]})
    return found


def alone(
    how: str, options: argparse.Namespace, target: Target, batches: list[tuple[int, int, torch.Tensor]]
) -> dict[str, Any]:
    """The forward pass alone: of some of the plan's batches, of one row, of short and of middling rows."""
    forward_alone(target, batches)  # kernels are made for shapes that are new
    found = {f"{how}_alone": forward_alone(target, batches)}
    for shape in ((1, options.mean_length), *((options.max_batch_tokens // n, n) for n in (264, 15))):
        found[f"{how}_{shape[0]}x{shape[1]}"] = forward_alone(target, batch_of(shape, target))
    return found


def alone_then_together(
    options: argparse.Namespace, target: Target, shards: list[ShardRows], cost: Estimate
) -> dict[str, Any] | None:
    """The first GPU runs while the others wait, but not for ever; then all go on together."""
    alone = engine(options.seconds, options, target, shards, cost) if options.rank == 0 else None
    say(alone=alone)
    (options.barrier / str(options.rank)).touch()
    deadline = time.monotonic() + options.seconds + BARRIER_S
    while (num_there := len(list(options.barrier.glob("[0-9]")))) < options.of:
        if time.monotonic() > deadline:
            raise SystemExit(f"only {num_there} of {options.of} GPUs are ready to go on together")
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
    alone = found[0]["alone"]["tokens_per_s"]
    rates = [one["engine"]["tokens_per_s"] for one in found]
    summary = {"one_alone": alone, "together": rates, "ratio": sum(rates) / alone}
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
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
