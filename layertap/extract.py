"""One shard from tokens to files: read ahead, forward, device to host, put; all at once.

The calling thread issues GPU work and holds the device lock while it does. Beside it a thread reads the next
batches, the copy to the host runs on its own stream, and a thread a slot waits for that copy, drops rows that
aren't finite, and puts the slot. Two shards may be in flight: the second reads ahead while the first has the
device, and takes it when the first has issued its last batch and only drains.
"""

import contextlib
import io
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.background import in_background
from layertap.errors import DeviceError
from layertap.kernels import is_out_of_memory
from layertap.keys import KEY_BYTES
from layertap.progress import Clock, SpentOn
from layertap.records import DATA, MEMORY, ShardRows
from layertap.staging import BatchLayout, Slot, SlotPool, pack, slot_nbytes
from layertap.store import Store, checksum, checksum_text, crc64nvme, crc64nvme_of_all
from layertap.target import Target

UNFINITE = "hidden states aren't finite (NaN or infinity)"
"""Why a row is refused that the target can't compute."""

BATCHES_AHEAD = 2
"""Batches read before they are needed."""

LAST_PUTS_S = 10.0
"""Seconds that the puts of a shard have to end when it does; one that nobody answers may take minutes."""

BATCHES_ISSUED = 2
"""Batches whose work may be queued on the device: enough to keep it busy, too few to hide a slow store."""

INDEX = "index.parquet"

INDEX_FIELDS: "list[pa.Field[Any]]" = [
    pa.field("extraction_key", pa.binary(KEY_BYTES)),
    pa.field("num_tokens", pa.int32()),
    pa.field("file", pa.string()),
    pa.field("offset", pa.int64()),
    pa.field("nbytes", pa.int64()),
    pa.field("crc64nvme", pa.uint64()),
]
INDEX_SCHEMA = pa.schema(INDEX_FIELDS)
"""One row for each stored row: where it lies in the batch files beside the index."""


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """What came of a shard, in JSON values."""

    files: list[dict[str, Any]]
    """name, size, checksum, num_rows of each batch file."""

    index: dict[str, Any]
    """The same of index.parquet."""

    num_rows: int
    num_tokens: int
    """Rows and tokens that are stored."""

    nbytes: int
    """Bytes of the batch files and the index."""

    refused: list[dict[str, str]]
    """key (hex), reason and fault (`data` or `memory`) of rows that can't be extracted."""

    num_splits: int
    """Batches that were cut in two because the device ran out of memory."""

    seconds: dict[str, float]
    """Where the time of this shard went."""


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """A batch that was read: token ids in (pinned) host memory."""

    number: int
    layout: BatchLayout
    ids_BT: Tensor
    lengths_B: Tensor


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """A batch whose file is in the store, or that has no row left for one."""

    name: str
    layout: BatchLayout
    checksum: str | None
    row_crcs: list[int]
    refused: list[dict[str, str]]


class Extractor:
    """One target on one device, with the slots and threads around it. A context manager.

    Args:
        target: the target, self-checked.
        store: where files go.
        max_batch_bytes: bytes of the rows of the plan's largest batch; it sizes the slots.
        num_slots: batches that may be between the device and the store.
        clock: where the lane's seconds are counted.
    """

    def __init__(
        self, target: Target, store: Store, *, max_batch_bytes: int, num_slots: int, clock: Clock
    ) -> None:
        self.target = target
        self.store = store
        self.clock = clock
        self.device_lock = threading.Lock()
        """Held by the thread that issues work to the device."""

        nbytes = slot_nbytes(max_batch_bytes, spec=target.spec, hidden_size=target.info.hidden_size)
        self._slots = SlotPool(num_slots, nbytes, target.device)
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="read-ahead")
        self._is_cuda = target.device.type == "cuda"
        self._copies = torch.cuda.Stream(target.device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._issued: deque[torch.cuda.Event] = deque()
        self._longest_passed = 0

    def extract_shard(
        self,
        rows: ShardRows,
        prefix: str,
        *,
        on_progress: Callable[[int, int], None],
        should_stop: Callable[[], None],
        clock: Clock | None = None,
    ) -> ShardResult:
        """Extract a shard and put its files; two threads may do so at once.

        Args:
            rows: the rows of the shard.
            prefix: the folder of this attempt in the store, used by nobody before.
            on_progress: called from other threads with the rows and tokens done so far, refused ones too.
            should_stop: called between batches and while waiting; raises to end the shard.
            clock: where this shard's own seconds are counted; for who wants to see them meanwhile.

        Returns:
            What was stored; files are durable when this returns.

        Raises:
            StoreError: a put failed.
            DeviceError: the device ran out of memory on a row that it had room for before.
            TargetError: the target can't be tapped.
        """
        shard = _Shard(self, rows, prefix, on_progress, should_stop, clock or Clock())
        with shard.ending():
            shard.issue()
            return shard.drain()

    def close(self) -> None:
        """End the threads that read; one whose put still hangs ends with it, or with the process."""
        self._readers.shutdown()

    def __enter__(self) -> "Extractor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pace(self) -> None:
        """Wait until the device is at most a few batches behind."""
        if not self._is_cuda:
            return
        self._issued.append(torch.cuda.current_stream(self.target.device).record_event())
        if len(self._issued) > BATCHES_ISSUED:
            self._issued.popleft().synchronize()


class _Shard:
    """One shard in flight."""

    def __init__(
        self,
        extractor: Extractor,
        rows: ShardRows,
        prefix: str,
        on_progress: Callable[[int, int], None],
        should_stop: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._extractor = extractor
        self._target = extractor.target
        self._rows = rows
        self._num_tokens = rows.num_tokens
        self._prefix = prefix
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._clock = clock
        self._lock = threading.Lock()
        self._rows_done = self._tokens_done = 0
        self._num_splits = 0
        self._to_read = deque(_batch_slices(rows.batch))
        self._reads: deque[Future[_Batch]] = deque()
        self._writes: list[Future[_Stored]] = []
        for _ in range(BATCHES_AHEAD):
            self._read_next()

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Leave nothing of this shard running, however it ends, but for a put that hangs."""
        try:
            yield
        finally:
            for read in self._reads:
                read.cancel()
            wait(self._reads)
            wait(self._writes, LAST_PUTS_S)

    def issue(self) -> None:
        """Issue the work of every batch while holding the device."""
        while not self._extractor.device_lock.acquire(timeout=1.0):
            self._check()
        try:
            while self._reads:
                self._check()
                with self._spent("waiting for data"):
                    batch = self._reads.popleft().result()
                self._read_next()
                with self._spent("waiting for the store"):
                    slot = self._extractor._slots.acquire(self._check)
                self._issue_batch(batch, slot)
        finally:
            self._extractor.device_lock.release()

    def drain(self) -> ShardResult:
        """Wait for the last files, then write the index, while the device may be with the next shard."""
        with self._spent("waiting for the store"):
            while wait(self._writes, timeout=1.0, return_when=FIRST_EXCEPTION).not_done:
                self._check()
            stored = [write.result() for write in self._writes]
            index = self._put_index(stored)
        files = [
            {
                "name": done.name,
                "size": done.layout.file_nbytes,
                "checksum": done.checksum,
                "num_rows": len(done.layout.keys),
            }
            for done in stored
            if done.checksum is not None
        ]
        return ShardResult(
            files=files,
            index=index,
            num_rows=sum(len(done.layout.keys) for done in stored),
            num_tokens=sum(sum(done.layout.num_tokens) for done in stored),
            nbytes=sum(file["size"] for file in [*files, index]),
            refused=[row for done in stored for row in done.refused],
            num_splits=self._num_splits,
            seconds=self._clock.seconds,
        )

    def _check(self) -> None:
        """Raise when the shard is to end: told to stop, or a put failed."""
        self._should_stop()
        for write in self._writes:
            if write.done():
                write.result()

    @contextlib.contextmanager
    def _spent(self, on: SpentOn) -> Iterator[None]:
        with self._extractor.clock.spent(on), self._clock.spent(on):
            yield

    def _read_next(self) -> None:
        if self._to_read:
            self._reads.append(self._extractor._readers.submit(self._read, self._to_read.popleft()))

    def _read(self, span: slice) -> _Batch:
        lengths = self._num_tokens[span].tolist()
        ids_BT = np.zeros((len(lengths), max(lengths)), np.int32)
        for row, length in enumerate(lengths):
            ids_BT[row, :length] = self._rows.tokens(span.start + row)
        layout = BatchLayout.of(
            [bytes(key).hex() for key in self._rows.keys[span]],
            lengths,
            spec=self._target.spec,
            hidden_size=self._target.info.hidden_size,
        )
        tensors = [torch.from_numpy(ids_BT), torch.tensor(lengths)]
        if self._extractor._is_cuda:
            tensors = [tensor.pin_memory() for tensor in tensors]
        number = int(self._rows.batch[span.start])
        return _Batch(number=number, layout=layout, ids_BT=tensors[0], lengths_B=tensors[1])

    def _issue_batch(self, batch: _Batch, slot: Slot) -> None:
        """Forward, pack and copy one batch; from here on the slot belongs to a store thread."""
        try:
            with self._spent("forward"):
                refused = self._forward(batch, slot)
                slot.send(batch.layout, self._extractor._copies)
                self._extractor._pace()
        except BaseException:
            self._extractor._slots.release(slot)
            raise
        self._writes.append(in_background("store", self._put, batch, slot, refused))

    @torch.inference_mode()
    def _forward(self, batch: _Batch, slot: Slot) -> dict[int, str]:
        """Fill the slot; returns the rows that the device has no memory for, with the reason."""
        device, refused = self._target.device, dict[int, str]()
        ids_BT = batch.ids_BT.to(device, non_blocking=True)
        lengths_B = batch.lengths_B.to(device, non_blocking=True)
        todo = [(0, len(ids_BT))]
        while todo:
            first, end = todo.pop()
            longest = max(batch.layout.num_tokens[first:end])
            no_memory = self._try_rows(
                batch.layout, slot, first, ids_BT[first:end, :longest], lengths_B[first:end]
            )
            if no_memory is None:
                self._extractor._longest_passed = max(self._extractor._longest_passed, longest)
            elif end - first == 1:
                refused[first] = self._too_large(longest, no_memory)
            else:
                self._num_splits += 1
                middle = (first + end) // 2
                todo += [(middle, end), (first, middle)]
        return refused

    def _try_rows(
        self, layout: BatchLayout, slot: Slot, first: int, ids_BT: Tensor, lengths_B: Tensor
    ) -> str | None:
        """Tap and pack some rows; returns what is said if the device has no memory for them."""
        message = ""
        num_tries = 2 if len(ids_BT) == 1 else 1  # a row alone once more, with all free that PyTorch kept
        for _ in range(num_tries):
            try:
                pack(slot.words(layout), layout, first, self._target.tap(ids_BT), ids_BT, lengths_B)
                return None
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                message = str(error)
            if self._extractor._is_cuda:
                torch.cuda.empty_cache()
        return message

    def _too_large(self, num_tokens: int, no_memory: str) -> str:
        """Why a row is refused; one no longer than others that had room isn't at fault."""
        if num_tokens <= self._extractor._longest_passed:
            raise DeviceError(
                f"{self._target.device} has no memory for a row of {num_tokens} tokens, though it had for "
                f"one of {self._extractor._longest_passed}: what else uses it? {no_memory}"
            )
        return (
            f"{num_tokens} tokens don't fit the memory of {self._target.device}, even alone, and are tried "
            f"again by the next run: {no_memory}"
        )

    def _put(self, batch: _Batch, slot: Slot, refused: dict[int, str]) -> _Stored:
        """Make the slot a finished file and put it; the slot is free when that is done, or has failed."""
        try:
            with self._spent("forward"):
                slot.wait_until_computed()
            with self._spent("copying to the host"):
                slot.wait_until_copied()
            unfinite = [row for row in slot.unfinite_rows(batch.layout) if row not in refused]
            layout = slot.finish(batch.layout, {*unfinite, *refused})
            name, crc = f"batch-{batch.number:05d}.safetensors", None
            file, spans = slot.file(layout), zip(layout.offsets, layout.nbytes, strict=True)
            row_crcs = [crc64nvme(file[offset : offset + nbytes]) for offset, nbytes in spans]
            if layout.keys:
                header = (crc64nvme(file[: layout.data_offset]), layout.data_offset)
                crc = crc64nvme_of_all([header, *zip(row_crcs, layout.nbytes, strict=True)])
                self._extractor.store.put(f"{self._prefix}/{name}", file, durable=True, crc=crc)
        finally:
            self._extractor._slots.release(slot)
        self._count(batch.layout)
        keys = batch.layout.keys
        told = [{"key": keys[row], "reason": UNFINITE, "fault": DATA} for row in unfinite]
        told += [{"key": keys[row], "reason": why, "fault": MEMORY} for row, why in sorted(refused.items())]
        digest = None if crc is None else checksum_text(crc)
        return _Stored(name=name, layout=layout, checksum=digest, row_crcs=row_crcs, refused=told)

    def _count(self, layout: BatchLayout) -> None:
        with self._lock:
            self._rows_done += len(layout.keys)
            self._tokens_done += sum(layout.num_tokens)
            self._on_progress(self._rows_done, self._tokens_done)

    def _put_index(self, stored: list[_Stored]) -> dict[str, Any]:
        columns: list[list[Any]] = [
            [bytes.fromhex(key) for done in stored for key in done.layout.keys],
            [n for done in stored for n in done.layout.num_tokens],
            [done.name for done in stored for _ in done.layout.keys],
            [offset for done in stored for offset in done.layout.offsets],
            [nbytes for done in stored for nbytes in done.layout.nbytes],
            [crc for done in stored for crc in done.row_crcs],
        ]
        table = pa.Table.from_pydict(dict(zip(INDEX_SCHEMA.names, columns, strict=True)), INDEX_SCHEMA)
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        data = buffer.getbuffer()
        self._extractor.store.put(f"{self._prefix}/{INDEX}", data, durable=True)
        return {"name": INDEX, "size": len(data), "checksum": checksum(data), "num_rows": len(table)}


def _batch_slices(batch: NDArray[np.int32]) -> list[slice]:
    """The rows of each batch."""
    starts = [0, *(int(k) for k in np.flatnonzero(np.diff(batch)) + 1), len(batch)]
    return [slice(a, b) for a, b in zip(starts, starts[1:], strict=False)]
