"""Reads a root as trainers do, and says what share of the disk's and the server's own rate that is.

    python benchmarks/reader.py [--gib 1.0] [--folder DIR] [--rounds 3] [--only local,s3]

A root of random bytes (rows of 264 tokens in the mean, 6 KiB a token) is written to a temporary folder and to
the embedded S3 server. Every measurement runs in a process of its own, raw and ours in turn, and the best of
the rounds counts. Raw is a plain sequential read of the same batch files in pieces of 16 MiB (folder), or
whole-object gets by as many threads (S3); one file a sample is the rows as safetensors files of their own.
"Kept" reads the same into memory of its own, as whoever uses the bytes must. "Cold" drops the files from the
page cache before, on both sides. Memory is anonymous memory at its peak, above what the process held before
it read. Goals: streams at 0.8 of raw on a folder, at 0.7 on S3.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load, save_file

from layertap import HiddenStates
from layertap.catalog import Catalog, Outcome, PlanRecord, Root
from layertap.dataset import TokenDataset
from layertap.object_server import ObjectServer, ServerPorts
from layertap.plan import PlanSettings, make_plan
from layertap.records import key_array
from layertap.spec import ExtractionSpec
from layertap.staging import BatchLayout
from layertap.store import Store, checksum, crc64nvme
from layertap.versions import Versions

SPEC = ExtractionSpec(target_identity="benchmark", layer_ids=(1, 7, 13, 19, 25), max_length=4096)
HIDDEN_SIZE, MEAN_TOKENS, VOCAB_SIZE = 512, 264, 150_000
PIECE = 16 << 20
THREADS = 16
NUM_RANDOM = 256
BUCKET = "layertap-bench"


def write_root(store: Store, folder: Path, gib: float) -> None:
    """Extract without a target: plan, write, commit and publish as lanes do."""
    catalog = Catalog(store)
    catalog.create_root(Root(spec=SPEC, target={"hidden_size": HIDDEN_SIZE}))
    random = np.random.default_rng(0)
    num_rows = int(gib * 2**30 / (MEAN_TOKENS * SPEC.bytes_per_token(HIDDEN_SIZE)))
    lengths = np.clip(random.lognormal(5.2, 0.85, num_rows), 1, SPEC.max_length).astype(int)
    rows = pa.array([random.integers(0, VOCAB_SIZE, n, np.int32) for n in lengths])
    pq.write_table(pa.table({"input_ids": rows}), folder / "rows.parquet")
    dataset = TokenDataset.open(folder / "rows.parquet")
    scan = dataset.scan(vocab_size=VOCAB_SIZE, max_length=SPEC.max_length)
    chosen = scan.unique(settled=None)
    settings = PlanSettings(shard_tokens=100_000)
    plan = make_plan(
        scan.keys[chosen], scan.num_tokens[chosen], spec_fingerprint=SPEC.fingerprint, settings=settings
    )
    record = catalog.put_plan(plan, lambda k: dataset.input_ids(int(chosen[plan.rows[k]])), max_batch_bytes=0)
    for shard in range(len(record.shards)):
        _write_shard(catalog, record, shard, random)
    Versions(store).publish(dataset, scan, catalog.settled(), parent=None)


def _write_shard(catalog: Catalog, plan: PlanRecord, shard: int, random: np.random.Generator) -> None:
    claim = catalog.claim(plan.plan_id, shard, 1, lane="bench", details={})
    assert claim is not None
    rows, prefix = catalog.shard_rows(plan.plan_id, shard), catalog.attempt_prefix(plan.plan_id, shard, "a")
    files, index = [], []
    for number in range(int(rows.batch[-1]) + 1):
        of_batch = np.flatnonzero(rows.batch == number)
        keys = [rows.keys[i].tobytes() for i in of_batch]
        lengths = [int(rows.num_tokens[i]) for i in of_batch]
        layout = BatchLayout.of([key.hex() for key in keys], lengths, spec=SPEC, hidden_size=HIDDEN_SIZE)
        data = bytearray(layout.header() + random.bytes(layout.data_nbytes))
        name = f"batch-{number:05d}.safetensors"
        for i, key, offset, nbytes in zip(of_batch, keys, layout.offsets, layout.nbytes, strict=True):
            data[offset + nbytes - 4 * rows.num_tokens[i] : offset + nbytes] = rows.tokens(i).tobytes()
            crc = crc64nvme(memoryview(data)[offset : offset + nbytes])
            index.append((key, int(rows.num_tokens[i]), name, offset, nbytes, crc))
        catalog.store.put(f"{prefix}/{name}", data)
        files.append({"name": name, "size": len(data), "checksum": checksum(data), "num_rows": len(keys)})
    table = _index(index)
    catalog.store.put(f"{prefix}/index.parquet", table)
    catalog.commit(claim, _outcome(claim, files, table, index))


def _index(index: list[tuple[Any, ...]]) -> bytes:
    keys, num_tokens, names, offsets, nbytes, crcs = zip(*index, strict=True)
    columns = {
        "extraction_key": key_array(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)),
        "num_tokens": pa.array(num_tokens, pa.int32()),
        "file": pa.array(names),
        "offset": pa.array(offsets, pa.int64()),
        "nbytes": pa.array(nbytes, pa.int64()),
        "crc64nvme": pa.array(crcs, pa.uint64()),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def _outcome(claim: Any, files: list[Any], table: bytes, index: list[Any]) -> Outcome:
    return Outcome(
        kind="committed", shard=claim.shard, claim=1, attempt="a", lane="bench", host="here", device="CPU",
        files=files, index={"name": "index.parquet", "size": len(table), "checksum": checksum(table)},
        num_rows=len(index), num_tokens=sum(row[1] for row in index), nbytes=sum(row[4] for row in index),
        refused=[], seconds={}, num_splits=0, environment={}, started_at="", ended_at="",
    )  # fmt: skip


def write_samples(store: Store, states: HiddenStates) -> None:
    """The rows as one file each."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(min(NUM_RANDOM, len(states))):
            row = states[i]
            path = Path(folder) / "row.safetensors"
            save_file(
                {name: row[name].clone() for name in ("hidden_states", "last_hidden_state", "input_ids")},
                path,
            )
            store.put(f"samples/hs_{i}.safetensors", path.read_bytes())


def batch_files(states: HiddenStates) -> list[str]:
    """Paths of all batch files."""
    return [o.path for o in states.store.list("plans") if o.path.endswith(".safetensors")]


def drop_from_page_cache(store: Store) -> None:
    """Have the kernel forget the pages of all files of a folder's root."""
    root = store.local_path("layertap.json")
    assert root is not None
    for path in root.parent.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def raw_files(states: HiddenStates) -> int:
    """Plain sequential read of the batch files, into one buffer."""
    buffer, num_bytes = bytearray(PIECE), 0
    for path in batch_files(states):
        with open(states.store.local_path(path), "rb", buffering=0) as file:  # type: ignore[arg-type]
            while n := file.readinto(buffer):
                num_bytes += n
    return num_bytes


def raw_objects(states: HiddenStates) -> int:
    """Whole-object gets by as many threads as the stream has."""
    objects = states.store._objects
    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(lambda f: len(memoryview(objects.get(f).bytes())), batch_files(states)))


def raw_kept(states: HiddenStates) -> int:
    """The same into memory of its own for each piece."""
    num_bytes = 0
    for path in batch_files(states):
        with open(states.store.local_path(path), "rb", buffering=0) as file:  # type: ignore[arg-type]
            while piece := file.read(PIECE):
                num_bytes += len(piece)
    return num_bytes


def stream_rows(states: HiddenStates) -> int:
    """Row by row, shuffled."""
    return sum(_nbytes(row) for row in states.stream(num_threads=THREADS, window_bytes=128 << 20))


def stream_packed(states: HiddenStates) -> int:
    """Packed batches, shuffled."""
    stream = states.stream(max_batch_tokens=8192, num_threads=THREADS, window_bytes=128 << 20)
    return sum(_nbytes(batch) for batch in stream)


def _nbytes(batch: dict[str, Any]) -> int:
    return sum(batch[name].nbytes for name in ("input_ids", "hidden_states", "last_hidden_state"))


def some_rows(states: HiddenStates) -> list[int]:
    """The same rows for each way of reading, in no order."""
    random = np.random.default_rng(1)
    return [int(i) for i in random.permutation(min(NUM_RANDOM, len(states)))]


def random_rows(states: HiddenStates) -> int:
    """Rows by number, a batch of 64 at once."""
    chosen = some_rows(states)
    return sum(len(states.__getitems__(chosen[k : k + 64])) for k in range(0, len(chosen), 64))


def random_samples(states: HiddenStates) -> int:
    """The same rows, each from a file of its own."""

    def read(i: int) -> int:
        path = f"samples/hs_{i}.safetensors"
        local = states.store.local_path(path)
        return len(load(local.read_bytes() if local else states.store.get(path)))

    with ThreadPoolExecutor(THREADS) as pool:
        return len(list(pool.map(read, some_rows(states))))


def random_raw(states: HiddenStates) -> int:
    """The same bytes, read and neither checked nor looked at."""
    files, places = states._parts[0]._files, states.places

    def read(i: int) -> int:
        return len(
            states.store.get_range(files[places.file[i]], int(places.offset[i]), int(places.nbytes[i]))
        )

    with ThreadPoolExecutor(THREADS) as pool:
        return len(list(pool.map(read, some_rows(states))))


class AnonymousPeak(threading.Thread):
    """Samples the process's anonymous memory 50 times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.peak = self._now()

    def _now(self) -> int:
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

    def run(self) -> None:
        """Sample until the process ends."""
        while True:
            self.peak = max(self.peak, self._now())
            time.sleep(0.02)


def _measure(uri: str, measure: Callable[[HiddenStates], int], is_cold: bool, answer: Any) -> None:
    states = HiddenStates(uri)
    if is_cold:
        drop_from_page_cache(states.store)
    memory = AnonymousPeak()
    memory.start()
    begin = time.perf_counter()
    amount = measure(states)
    answer.send((amount, time.perf_counter() - begin, memory.peak - memory.first))


def measured(
    uri: str, measures: list[Callable[[HiddenStates], int]], rounds: int, *, is_cold: bool
) -> dict[str, Any]:
    """Best rate of each of the measures, in its unit a second, and its memory in MiB."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    for _ in range(rounds):
        for measure in measures:
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_measure, args=(uri, measure, is_cold, sending))
            process.start()
            sending.close()
            amount, elapsed_s, memory = receiving.recv()
            process.join()
            best = found.setdefault(measure.__name__, {"rate": 0.0, "memory_mib": 0})
            best["rate"] = max(best["rate"], amount / elapsed_s)
            best["memory_mib"] = max(best["memory_mib"], memory >> 20)
    return found


@contextmanager
def object_server(folder: Path) -> Iterator[None]:
    """The embedded server, in the environment of this process and its children."""
    server = ObjectServer.start(folder, ports=ServerPorts.free(), buckets=[BUCKET])
    os.environ.update(server.environment())
    try:
        yield
    finally:
        server.stop()


STREAMS = [stream_rows, stream_packed]
RANDOM = [random_raw, random_rows, random_samples]


def run_on(uri: str, folder: Path, gib: float, rounds: int) -> dict[str, Any]:
    """Fill a root and measure it."""
    write_root(Store.open(uri), folder, gib)
    states = HiddenStates(uri)
    write_samples(states.store, states)
    is_local = states.store.local_path("layertap.json") is not None
    raws = [raw_files, raw_kept] if is_local else [raw_objects]
    results = {"warm": measured(uri, [*raws, *STREAMS, *RANDOM], rounds, is_cold=False)}
    if is_local:
        results["cold"] = measured(uri, [*raws, *STREAMS, *RANDOM], rounds, is_cold=True)
    for found in results.values():
        for name, result in found.items():
            base = "random_raw" if name.startswith("random") else raws[0].__name__
            result["share_of_raw"] = round(result["rate"] / found[base]["rate"], 3)
    return results


def show(results: dict[str, Any]) -> None:
    """A table for people, then JSON for programs."""
    for where, states in results.items():
        for state, found in states.items():
            for name, result in found.items():
                rate = result["rate"]
                text = f"{rate:,.0f} rows/s" if name.startswith("random") else f"{rate / 1e6:,.0f} MB/s"
                share, memory = result["share_of_raw"], result["memory_mib"]
                print(f"{where:6} {state:5} {name:15} {text:>14}  {share:5.2f} of raw  {memory:5,} MiB")
    print(json.dumps(results))


def main(arguments: list[str] | None = None) -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the root")
    parser.add_argument("--folder", type=Path, help="where to write it, instead of a temporary folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="local,s3")
    asked = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        if "local" in asked.only:
            results["folder"] = run_on(str(folder / "root"), folder, asked.gib, asked.rounds)
        if "s3" in asked.only:
            with object_server(folder / "server"):
                results["s3"] = run_on(f"s3://{BUCKET}/root", folder, asked.gib, asked.rounds)
    show(results)


if __name__ == "__main__":
    sys.exit(main())
