"""Plans the headline job, 913,786 rows of 264 tokens in the mean, and says what it took.

    python benchmarks/plan.py [--rows N]

The dataset is an Arrow folder of int32 ids and int8 masks with log-normal lengths, written to a temporary
folder (1.2 GB). Opening, scanning, `unique`, `make_plan` and `estimate` run in a process of their own.
Resident memory counts the mapped file's pages, which the system takes back at will; anonymous memory is what
planning itself holds. The goal is 20 s and 2 GB resident on two cores.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from layertap.dataset import TokenDataset
from layertap.plan import PlanSettings, estimate, make_plan
from layertap.spec import ExtractionSpec

NUM_ROWS, MEAN_TOKENS, MAX_TOKENS = 913_786, 264, 4096
VOCAB_SIZE = 248_320
SPEC = ExtractionSpec(target_identity="benchmark", layer_ids=(1, 16, 31, 46, 61), max_length=MAX_TOKENS)
HIDDEN_SIZE, NUM_PARAMETERS = 5120, 25_300_000_000


def draw_lengths(num_rows: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Log-normal lengths, capped, with the wanted mean; spread as in real chats (p99 / p50 of about 12)."""
    shape = rng.lognormal(0, 1.1, num_rows)
    low, high = 1.0, float(MAX_TOKENS)
    while high - low > 0.01:
        scale = (low + high) / 2
        lengths = np.clip(shape * scale, 1, MAX_TOKENS).astype(np.int64)
        low, high = (scale, high) if lengths.mean() < MEAN_TOKENS else (low, scale)
    return lengths


def write_dataset(folder: Path, num_rows: int) -> None:
    """Random ids and masks as `save_to_disk` lays them out: one stream, 1,000 rows a record batch."""
    rng = np.random.default_rng(0)
    lengths = draw_lengths(num_rows, rng)
    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())})
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), schema) as writer:
        for start in range(0, num_rows, 1000):
            offsets = np.concatenate([[0], np.cumsum(lengths[start : start + 1000])]).astype(np.int32)
            ids = rng.integers(0, VOCAB_SIZE, offsets[-1], np.int32)
            mask = rng.integers(0, 2, offsets[-1], np.int8)
            columns = [
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for values in (ids, mask)
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )


class AnonymousPeak(threading.Thread):
    """Samples the process's anonymous memory 50 times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0

    def run(self) -> None:
        """Sample until the process ends."""
        while True:
            status = Path("/proc/self/status").read_text()
            kilobytes = int(status.split("RssAnon:")[1].split()[0])
            self.peak_bytes = max(self.peak_bytes, kilobytes * 1024)
            time.sleep(0.02)


def plan_dataset(folder: Path) -> dict[str, float]:
    """Everything between a path and an estimate; seconds by step, and peaks in bytes."""
    sampler = AnonymousPeak()
    sampler.start()
    marks = [("", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    dataset = TokenDataset.open(folder)
    mark("open_s")
    scan = dataset.scan(vocab_size=VOCAB_SIZE, max_length=MAX_TOKENS)
    mark("scan_s")
    rows = scan.unique()
    mark("unique_s")
    plan = make_plan(
        scan.keys[rows], scan.num_tokens[rows], spec_fingerprint=SPEC.fingerprint, settings=PlanSettings()
    )
    mark("make_plan_s")
    found = estimate(plan, spec=SPEC, hidden_size=HIDDEN_SIZE, num_parameters=NUM_PARAMETERS)
    mark("estimate_s")
    seconds = {name: now - before for (_, before), (name, now) in zip(marks, marks[1:], strict=False)}
    return {
        **seconds,
        "total_s": marks[-1][1] - marks[0][1],
        "cpu_s": time.process_time(),
        "resident_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "anonymous_gb": sampler.peak_bytes / 1e9,
        "rows": found.num_rows,
        "tokens": found.num_tokens,
        "batches": found.num_batches,
        "shards": found.num_shards,
        "data_tb": found.data_bytes / 1e12,
        "padding_percent": 100 * found.padding_share,
        "imbalance_percent": 100 * found.imbalance,
        "gpu_hours": found.gpu_hours,
        "requests": found.num_requests,
        "max_batch_mb": found.max_batch_bytes / 1e6,
    }


def main() -> None:
    """Write the dataset, plan it in a fresh process, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(plan_dataset(arguments.measure)))
        return
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as folder:
        write_dataset(Path(folder), arguments.rows)
        command = [sys.executable, __file__, "--measure", folder]
        figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    for name, value in figures.items():
        print(f"{name:<20}{value:>16,.3f}" if isinstance(value, float) else f"{name:<20}{value:>16,}")


if __name__ == "__main__":
    main()
