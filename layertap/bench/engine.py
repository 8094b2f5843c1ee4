"""The engine around a null target: what reading, staging, framing and storing sustain on a local folder.

Batches are drawn evenly from plans of three sizes and go through an `Extractor` as in a lane, with every file
synced to disk. In turns with it, the same bytes are written to one file with plain `write()` calls and one
fsync. After each trial the files are read back, compared with their checksums, and deleted.
"""

import os
import shutil
import statistics
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from layertap.bench import Measured, in_turns, median_ratio, seconds_of
from layertap.bench.null_target import NUM_SLOTS, SPEC, NullTarget, planned, rows_of
from layertap.bench.probes import GilTicker, MemoryPeak
from layertap.extract import Extractor, ShardResult
from layertap.plan import Plan, PlanSettings
from layertap.progress import Clock
from layertap.records import ShardRows
from layertap.store import Store, checksum
from layertap.target import Target

PLANS = (10_000, 100_000, 913_786)
NUM_BATCHES = 5
NUM_TRIALS = 5


def measure(folder: Path) -> list[Measured]:
    """One ratio for each size of plan; needs 3 GB of disk in `folder`."""
    settings = PlanSettings()
    target = NullTarget.made(settings.max_batch_tokens)
    return [_of_plan(num_rows, planned(num_rows, settings), target, folder) for num_rows in PLANS]


def batches_of(plan: Plan, num_batches: int) -> list[list[int]]:
    """Lengths of the rows of some batches, evenly over the plan: from its longest rows to its shortest."""
    edges = np.flatnonzero(np.diff(plan.batch) | np.diff(plan.shard)) + 1
    spans = np.split(np.arange(len(plan.rows)), edges)
    by_length = sorted(spans, key=lambda span: -int(plan.num_tokens[span[0]]))
    chosen = [by_length[k] for k in np.linspace(0, len(spans) - 1, num_batches).round().astype(int)]
    return [plan.num_tokens[span].tolist() for span in chosen]


class _Engine:
    """An extractor on a folder, and what its trials showed."""

    def __init__(self, extractor: Extractor, rows: ShardRows, folder: Path) -> None:
        self._extractor, self._rows, self._folder = extractor, rows, folder
        self.cpu_s: list[float] = []
        self.peaks_bytes: list[int] = []
        self.ticker_figures: list[dict[str, float]] = []
        self.nbytes = 0

    def trial(self) -> float:
        """Seconds of one shard, from its first read to its synced index."""
        prefix = f"trial-{uuid.uuid4().hex[:8]}"
        with MemoryPeak() as memory, GilTicker() as ticker:
            start, cpu_start = time.perf_counter(), time.process_time()
            result = self._extractor.extract_shard(
                self._rows, prefix, on_progress=lambda *_: None, should_stop=lambda: None
            )
            elapsed_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        self.cpu_s.append(cpu_s)
        self.peaks_bytes.append(memory.peak_bytes)
        self.ticker_figures.append(ticker.figures())
        self.nbytes = result.nbytes
        _verify_and_delete(self._folder / prefix, result)
        return elapsed_s

    def plain(self) -> float:
        """Seconds of one plain write of the same bytes, and its fsync."""
        return plain_write_s(self._folder / "plain", self.nbytes)


def _of_plan(num_rows: int, plan: Plan, target: Target, folder: Path) -> Measured:
    lengths = batches_of(plan, NUM_BATCHES)
    max_batch_bytes = max(map(sum, lengths)) * SPEC.bytes_per_token(target.info.hidden_size)
    store = Store.folder(folder)
    with Extractor(
        target, store, max_batch_bytes=max_batch_bytes, num_slots=NUM_SLOTS, clock=Clock()
    ) as extractor:
        engine = _Engine(extractor, rows_of(lengths), folder)
        engine.trial()  # the first one touches the slots' memory for the first time
        for kept in (engine.cpu_s, engine.peaks_bytes, engine.ticker_figures):
            kept.clear()
        engine_s, plain_s = in_turns(NUM_TRIALS, engine.trial, engine.plain)
    gigabytes = engine.nbytes / 1e9
    return Measured(
        name=f"engine around a null target, plan of {num_rows:,} rows",
        layertap=gigabytes / statistics.median(engine_s),
        against=gigabytes / statistics.median(plain_s),
        unit="GB/s",
        against_what="one write() and fsync of the same bytes",
        ratio=median_ratio(engine_s, plain_s),
        at_most=1.5,
        details={
            "engine_s": engine_s,
            "plain_s": plain_s,
            "gigabytes": gigabytes,
            "rows_of_batches": [len(batch) for batch in lengths],
            "longest_of_batches": [batch[0] for batch in lengths],
            "batches_per_s": NUM_BATCHES / statistics.median(engine_s),
            "cpu_s_per_gb": statistics.median(engine.cpu_s) / gigabytes,
            "peak_memory_gb": [peak / 1e9 for peak in engine.peaks_bytes],
            "gil_waits_of_a_ticking_thread": _worst(engine.ticker_figures),
        },
    )


def _worst(figures: list[dict[str, float]]) -> dict[str, float]:
    """Of all trials: the longest wait, the median of medians, and sums."""
    return {
        "wake-ups": sum(f["wake-ups"] for f in figures),
        "median_ms": statistics.median(f["median_ms"] for f in figures),
        "longest_ms": max(f["longest_ms"] for f in figures),
        "total_ms": sum(f["total_ms"] for f in figures),
    }


def plain_write_s(path: Path, nbytes: int) -> float:
    """Seconds in which so many bytes are written to a new file in 512 MB pieces, and synced; deletes it."""
    piece = np.ones(512_000_000, np.uint8).data

    def write() -> None:
        left = nbytes
        while left:
            left -= os.write(descriptor, piece[:left])
        os.fsync(descriptor)

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        return seconds_of(write)
    finally:
        os.close(descriptor)
        path.unlink()


def is_as_written(path: Path, file: Mapping[str, Any]) -> bool:
    """Whether a file has the size and the checksum that its outcome records; through the page cache."""
    data = np.memmap(path, np.uint8, mode="r")
    return (len(data), checksum(data.data)) == (file["size"], file["checksum"])


def _verify_and_delete(folder: Path, result: ShardResult) -> None:
    for file in [*result.files, result.index]:
        assert is_as_written(folder / file["name"], file), f"{file['name']} differs"
    shutil.rmtree(folder)
