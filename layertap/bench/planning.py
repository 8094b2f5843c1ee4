"""Planning the headline job: 913,786 rows of 264 tokens in the mean, from the dataset's path to an estimate.

The dataset is an Arrow folder of int32 ids and int8 masks with log-normal lengths, 1.2 GB. It is opened,
scanned, deduplicated, planned and estimated in a process of its own, and measured against one hash over the
same bytes. Resident memory counts the mapped file's pages, which the system takes back at will; anonymous
memory is what planning itself holds. The goal is 20 s and 2 GB resident on two cores.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from layertap.bench import Measured, seconds_of
from layertap.bench.null_target import HIDDEN_SIZE, MAX_LENGTH, SPEC, VOCAB_SIZE, drawn_lengths
from layertap.bench.probes import MemoryPeak
from layertap.dataset import TokenDataset
from layertap.plan import PlanSettings, estimate, make_plan

NUM_ROWS = 913_786
NUM_PARAMETERS = 25_300_000_000
GOAL_S = 20.0
DATA = "data-00000-of-00001.arrow"


def measure(folder: Path) -> list[Measured]:
    """Planning against hashing; needs 1.3 GB of disk in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as dataset:
        write_dataset(Path(dataset), NUM_ROWS)
        data = np.memmap(Path(dataset) / DATA, np.uint8, mode="r").data
        hash_s = seconds_of(lambda: blake2b(data).digest())
        command = [sys.executable, "-m", "layertap.bench.planning", dataset]
        figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    total_s: float = figures["total_s"]
    return [
        Measured(
            name=f"planning {figures['rows']:,} rows",
            layertap=total_s,
            against=hash_s,
            unit="s",
            against_what="one blake2b over the dataset's bytes",
            ratio=total_s / hash_s,
            at_most=GOAL_S / hash_s,
            details=figures,
        )
    ]


def write_dataset(folder: Path, num_rows: int) -> None:
    """Random ids and masks as `save_to_disk` lays them out: one stream, 1,000 rows a record batch."""
    rng = np.random.default_rng(0)
    lengths = drawn_lengths(num_rows, rng)
    fields: list[pa.Field[Any]] = [
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.int8())),
    ]
    schema = pa.schema(fields)
    with pa.ipc.new_stream(str(folder / DATA), schema) as writer:
        for start in range(0, num_rows, 1000):
            offsets = np.concatenate([[0], np.cumsum(lengths[start : start + 1000])]).astype(np.int32)
            ids = rng.integers(0, VOCAB_SIZE, offsets[-1], np.int32)
            mask = rng.integers(0, 2, offsets[-1], np.int8)
            ends = pa.array(offsets, pa.int32())
            columns = [
                pa.ListArray.from_arrays(ends, pa.array(ids, pa.int32())),
                pa.ListArray.from_arrays(ends, pa.array(mask, pa.int8())),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": DATA}]}))


def plan_dataset(folder: Path) -> dict[str, Any]:
    """Everything between a path and an estimate; seconds by step, and peaks in bytes."""
    marks = [("", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    with MemoryPeak() as memory:
        dataset = TokenDataset.open(folder)
        mark("open_s")
        scan = dataset.scan(vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)
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
        "anonymous_gb": memory.peak_bytes / 1e9,
        "rows": found.num_rows,
        "tokens": found.num_tokens,
        "batches": found.num_batches,
        "shards": found.num_shards,
        "padding_percent": 100 * found.padding_share,
        "imbalance_percent": 100 * found.imbalance,
    }


if __name__ == "__main__":
    print(json.dumps(plan_dataset(Path(sys.argv[1]))))
