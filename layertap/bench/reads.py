"""Reading a root as trainers do, as a share of the disk's and the server's own rate.

Streams stand against a plain sequential read of the same batch files in pieces of 16 MiB, and on S3 against
whole-object gets by as many threads. With a full page cache there is no disk to be compared with: batches
stand against the same bytes read by as many threads into as much memory as the stream holds. Random rows
stand against the same ranges read and not looked at, and against the same rows as safetensors files of their
own. On a folder the page cache is dropped before each measurement, on both sides, or full on both. Each way
reads in a process of its own; memory is anonymous memory at its peak, above what the process held before it
read.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load, save_file

from layertap import HiddenStates
from layertap.bench import Measured, in_turns, median_ratio
from layertap.bench.probes import MemoryPeak, anonymous_bytes
from layertap.bench.writes import BUCKET, object_server
from layertap.catalog import Catalog, Outcome, PlanRecord, Root
from layertap.dataset import TokenDataset
from layertap.keys import KEY_BYTES, key_array
from layertap.object_server import ObjectServer
from layertap.plan import PlanSettings, make_plan
from layertap.spec import ExtractionSpec
from layertap.staging import BatchLayout
from layertap.store import Store, checksum, crc64nvme
from layertap.versions import Versions

SPEC = ExtractionSpec(target_identity="benchmark", layer_ids=(1, 7, 13, 19, 25), max_length=4096)
HIDDEN_SIZE, MEAN_TOKENS, VOCAB_SIZE = 512, 264, 150_000
PIECE, WINDOW = 16 << 20, 128 << 20
THREADS = 16
NUM_RANDOM = 256
GIB = 0.5
NUM_TRIALS = 3

Read = Callable[[HiddenStates], int]


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
        of_batch = [int(i) for i in np.flatnonzero(rows.batch == number)]
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
        "extraction_key": key_array(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)),
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
        local = states.store.local_path(path)
        assert local is not None
        with local.open("rb", buffering=0) as file:
            while n := file.readinto(buffer):
                num_bytes += n
    return num_bytes


@cache
def _buffers() -> SimpleQueue[bytearray]:
    buffers = SimpleQueue[bytearray]()
    for _ in range(2 * WINDOW // PIECE):
        buffers.put(bytearray(PIECE))
    return buffers


def raw_into_memory(states: HiddenStates) -> int:
    """The batch files in pieces, by as many threads as the stream has, into memory of two windows in turn."""
    buffers = _buffers()

    def read(path: Path, offset: int) -> int:
        buffer = buffers.get()
        with path.open("rb", buffering=0) as file:
            num_bytes = os.preadv(file.fileno(), [buffer], offset)
        buffers.put(buffer)
        return num_bytes

    with ThreadPoolExecutor(THREADS) as pool:
        paths = [states.store.local_path(path) for path in batch_files(states)]
        reads = [
            pool.submit(read, path, offset)
            for path in paths
            if path is not None
            for offset in range(0, path.stat().st_size, PIECE)
        ]
    return sum(done.result() for done in reads)


def raw_objects(states: HiddenStates) -> int:
    """Whole-object gets by as many threads as the stream has."""
    objects = states.store._objects
    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(lambda f: len(memoryview(objects.get(f).bytes())), batch_files(states)))


def stream_rows(states: HiddenStates) -> int:
    """Row by row, shuffled."""
    return sum(_nbytes(row) for row in states.stream(num_threads=THREADS, window_bytes=WINDOW))


def stream_packed(states: HiddenStates) -> int:
    """Packed batches, shuffled."""
    stream = states.stream(max_batch_tokens=8192, num_threads=THREADS, window_bytes=WINDOW)
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


class _Reader:
    """A process that opens the root and reads it when asked; what it holds is its own."""

    def __init__(self, uri: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(uri, other), daemon=True)
        self._process.start()
        other.close()

    def read(self, way: Read, *, is_cold: bool) -> tuple[float, int]:
        """What the way reads in a second, in its own unit, and the anonymous memory that this took."""
        self._pipe.send((way, is_cold))
        rate, nbytes = self._pipe.recv()
        return float(rate), int(nbytes)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _serve(uri: str, pipe: Any) -> None:
    states = HiddenStates(uri)
    while True:
        try:
            way, is_cold = pipe.recv()
        except EOFError:
            return
        if is_cold:
            drop_from_page_cache(states.store)
        held = anonymous_bytes()
        with MemoryPeak() as memory:
            begin = time.perf_counter()
            amount = way(states)
            elapsed_s = time.perf_counter() - begin
        pipe.send((amount / elapsed_s, memory.peak_bytes - held))


@contextmanager
def _environment_of(server: ObjectServer) -> Iterator[None]:
    """The server's address and keys in the environment of this process and its children."""
    before = dict(os.environ)
    os.environ.update(server.environment())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(frozen=True, kw_only=True)
class _Race:
    """A way of reading against another."""

    name: str
    ours: Read
    theirs: Read
    against_what: str
    unit: str = "MB/s"
    at_least: float | None = None

    def run(self, readers: Mapping[Read, _Reader], where: str, *, is_cold: bool = False) -> Measured:
        """In turns, each in a process of its own."""
        memory: list[int] = []

        def rate(way: Read) -> float:
            found, nbytes = readers[way].read(way, is_cold=is_cold)
            if way is self.ours:
                memory.append(nbytes >> 20)
            return found / (1e6 if self.unit == "MB/s" else 1)

        ours, theirs = in_turns(NUM_TRIALS, partial(rate, self.ours), partial(rate, self.theirs))
        return Measured(
            name=f"{self.name}, {where}",
            layertap=statistics.median(ours),
            against=statistics.median(theirs),
            unit=self.unit,
            against_what=self.against_what,
            ratio=median_ratio(ours, theirs),
            at_least=self.at_least,
            details={"layertap": ours, "against": theirs, "memory_mib": memory},
        )


def _races(*, is_local: bool, is_cold: bool) -> list[_Race]:
    of_disk = (raw_files, "plain sequential read", 0.8 if is_cold else None)
    of_memory = (raw_into_memory, "into as much memory", None)
    of_server = (raw_objects, "whole-object gets", 0.7)
    against_rows = of_disk if is_local else of_server
    against_batches = of_memory if is_local and not is_cold else against_rows
    streams = [
        _Race(name=name, ours=ours, theirs=theirs, against_what=what, at_least=goal)
        for name, ours, (theirs, what, goal) in (
            ("stream of rows", stream_rows, against_rows),
            ("stream of packed batches", stream_packed, against_batches),
        )
    ]
    random = ((random_samples, "one file a sample"), (random_raw, "the same ranges, unchecked"))
    return streams + [
        _Race(name="random rows", ours=random_rows, theirs=theirs, against_what=other, unit="rows/s")
        for theirs, other in random
    ]


def _of_root(uri: str, folder: Path, states: Mapping[str, bool]) -> list[Measured]:
    """The races on one root; `states` names where it lies, and says whether the page cache is dropped."""
    write_root(Store.open(uri), folder, GIB)
    stored = HiddenStates(uri)
    write_samples(stored.store, stored)
    is_local = stored.store.local_path("layertap.json") is not None
    races = [
        (where, cold, race)
        for where, cold in states.items()
        for race in _races(is_local=is_local, is_cold=cold)
    ]
    with ExitStack() as stack:
        readers = {
            way: _Reader(uri) for way in {way for *_, race in races for way in (race.ours, race.theirs)}
        }
        for reader in readers.values():
            stack.callback(reader.close)
        return [race.run(readers, where, is_cold=cold) for where, cold, race in races]


def measure(folder: Path) -> list[Measured]:
    """Streams and random rows, from a folder and the embedded S3 server; needs 3 GiB of disk in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        local = _of_root(
            str(Path(name) / "root"), Path(name), {"folder, cold": True, "folder, cached": False}
        )
        with object_server(Path(name)) as server, _environment_of(server):
            return local + _of_root(f"s3://{BUCKET}/root", Path(name), {"S3": False})
